/* Compute threads and the cores they share with the event loop, its clients, and whoever else runs.
 *
 * A thread that computes without end keeps its core from one that wakes until the scheduler's next tick, and loses it in
 * the middle of a job, which every thread then waits for. So it offers the core where nothing is in hand, between two
 * jobs. An offer that is taken for long went to somebody who computes too: for a while there are none, for each may cost
 * a whole time slice.
 */
#ifndef NS_CORES_H
#define NS_CORES_H

#include <sched.h>
#include <stdint.h>
#include <time.h>

enum { NS_LONG_OFFER = 2000000, NS_OFFERS_LEFT_OUT = 256 }; /* nanoseconds; jobs' ends, about as many as a step has */

/* Nanoseconds of a monotonic clock. */
static inline int64_t ns_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* `left_out` is the caller's own: how many offers it will leave out. */
static inline void ns_offer_core(int32_t *left_out)
{
    if (*left_out > 0) {
        --*left_out;
        return;
    }
    const int64_t offered = ns_now();
    sched_yield();
    if (ns_now() - offered > NS_LONG_OFFER) *left_out = NS_OFFERS_LEFT_OUT;
}

/* Where there are as many threads as cores, each stays on its own: the scheduler puts two on one when a third thread
 * comes by, and sees an idle core at its next tick only. With fewer threads there is room to move. */
static inline void ns_keep_core(int32_t index, int32_t threads)
{
#ifdef __linux__
    cpu_set_t allowed, own;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
        CPU_ZERO(&own);
        CPU_SET(cpu, &own);
        sched_setaffinity(0, sizeof own, &own);
        return;
    }
#else
    (void)index;
    (void)threads;
#endif
}

#endif
