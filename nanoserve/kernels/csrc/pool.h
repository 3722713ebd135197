/* The compute threads. One program runs at a time and one more may wait; see pool.c for how jobs are shared out. */
#ifndef NS_POOL_H
#define NS_POOL_H

#include "kernels.h"

typedef struct ns_pool ns_pool;

/* Each returns 0 or a negative errno. */
int ns_pool_new(int32_t threads, ns_pool **out);
void ns_pool_free(ns_pool *pool);
int ns_pool_reserve(ns_pool *pool, int64_t scratch_bytes);
/* -EBUSY while a launch waits for another. */
int ns_pool_launch(ns_pool *pool, const ns_segment *segments, int32_t count, int32_t notify_fd);
int ns_pool_wait(ns_pool *pool);

/* Nanoseconds that the last launch which is over ran. */
int64_t ns_pool_took(const ns_pool *pool);

#endif
