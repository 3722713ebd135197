/* Threads, barriers and the sharing of jobs.
 *
 * A launch wakes the threads once. They then meet after every record: the last to arrive runs the records that follow
 * as long as those are too small to share, opens the next one that is not, and lets the others go. Each thread has a
 * range of a record's jobs and takes from its own first, then from the others', so a core that the machine lends to
 * somebody else delays one job and not a share. Waiting spins for some tens of microseconds, then sleeps; with nothing
 * launched every thread sleeps.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "jobs.h"
#include "wait.h"

enum { NS_MAX_THREADS = 256, NS_MAX_SEGMENTS = 8, NS_BARRIER_SPINS = 2000, NS_LINE = 64 };

typedef struct {
    _Alignas(NS_LINE) _Atomic int64_t next;
    int64_t end;
} ns_range_of_jobs;

typedef struct {
    ns_pool *pool;
    ns_worker worker;
    pthread_t thread;
} ns_seat;

struct ns_pool {
    int32_t threads;
    int32_t notify_fd;
    ns_seat *seats;
    ns_range_of_jobs *ranges;
    ns_segment segments[NS_MAX_SEGMENTS];
    int32_t segment_count;
    int32_t segment; /* the open record, and where it lies */
    int64_t at;
    const ns_record *record; /* null: the program is over */
    int64_t grain;
    _Atomic int32_t stop;
    _Atomic int32_t busy;
    _Alignas(NS_LINE) _Atomic int32_t arrived;
    ns_word launch; /* changes when there is a program */
    ns_word turn;   /* changes when the next record is open */
    ns_word done;   /* changes when a program is over */
};

/* Round to nearest, denormals kept: a library loaded elsewhere may have set this thread's parent otherwise. */
static void ns_default_rounding(void)
{
#ifdef __x86_64__
    _mm_setcsr(0x1f80);
#endif
}

static void ns_open(ns_pool *pool, const ns_record *record, ns_share share)
{
    for (int32_t i = 0; i < pool->threads; i++) {
        pool->ranges[i].end = share.jobs * (i + 1) / pool->threads;
        atomic_store_explicit(&pool->ranges[i].next, share.jobs * i / pool->threads, memory_order_relaxed);
    }
    pool->record = record;
    pool->grain = share.grain;
}

/* Runs what is too small to share and opens the next record that is not; none left: the program is over. */
static void ns_advance(ns_pool *pool, const ns_worker *worker)
{
    for (; pool->segment < pool->segment_count; pool->segment++, pool->at = 0) {
        const ns_segment *segment = &pool->segments[pool->segment];
        while (pool->at < segment->count) {
            const ns_record *record = &segment->records[pool->at++];
            const ns_share share = ns_share_of(record, pool->threads);
            if (share.jobs == 0) continue;
            if (!share.serial && pool->threads > 1) {
                ns_open(pool, record, share);
                return;
            }
            ns_kernel_table[record->head.op](record, worker, 0, share.jobs);
        }
    }
    pool->record = NULL;
}

static void ns_take(ns_pool *pool, const ns_worker *worker)
{
    const ns_record *record = pool->record;
    const ns_kernel run = ns_kernel_table[record->head.op];
    for (int32_t i = 0; i < pool->threads; i++) {
        ns_range_of_jobs *range = &pool->ranges[(worker->index + i) % pool->threads];
        for (;;) {
            int64_t begin = atomic_fetch_add_explicit(&range->next, pool->grain, memory_order_relaxed);
            if (begin >= range->end) break;
            run(record, worker, begin, begin + pool->grain < range->end ? begin + pool->grain : range->end);
        }
    }
}

static void ns_finish(ns_pool *pool)
{
    const int32_t fd = pool->notify_fd;
    atomic_store(&pool->busy, 0);
    ns_word_set(&pool->done, ns_word_get(&pool->done) + 1);
    if (fd >= 0) {
        const uint64_t one = 1;
        while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
    }
}

/* Returns false when the program is over. */
static int ns_meet(ns_pool *pool, const ns_worker *worker)
{
    const uint32_t turn = ns_word_get(&pool->turn);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) + 1 == pool->threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        ns_advance(pool, worker);
        const int more = pool->record != NULL;
        ns_word_set(&pool->turn, turn + 1);
        if (!more) ns_finish(pool);
        return more;
    }
    ns_word_wait(&pool->turn, turn, NS_BARRIER_SPINS);
    return pool->record != NULL;
}

static void *ns_thread(void *argument)
{
    ns_seat *seat = argument;
    ns_pool *pool = seat->pool;
    uint32_t seen = 0;
    ns_default_rounding();
    for (;;) {
        ns_word_wait(&pool->launch, seen, 0);
        seen = ns_word_get(&pool->launch);
        if (atomic_load(&pool->stop)) return NULL;
        while (ns_meet(pool, &seat->worker)) ns_take(pool, &seat->worker);
    }
}

int ns_pool_reserve(ns_pool *pool, int64_t scratch_bytes)
{
    if (atomic_load(&pool->busy)) return -EBUSY;
    for (int32_t i = 0; i < pool->threads; i++) {
        ns_worker *worker = &pool->seats[i].worker;
        if (worker->scratch_bytes >= (size_t)scratch_bytes) continue;
        void *larger = NULL;
        if (posix_memalign(&larger, NS_LINE, (size_t)scratch_bytes)) return -ENOMEM;
        free(worker->scratch);
        worker->scratch = larger;
        worker->scratch_bytes = (size_t)scratch_bytes;
    }
    return 0;
}

/* Frees a pool of which `running` threads were started. */
static void ns_pool_end(ns_pool *pool, int32_t running)
{
    atomic_store(&pool->stop, 1);
    ns_word_set(&pool->launch, ns_word_get(&pool->launch) + 1);
    for (int32_t i = 0; i < running; i++) pthread_join(pool->seats[i].thread, NULL);
    for (int32_t i = 0; pool->seats && i < pool->threads; i++) free(pool->seats[i].worker.scratch);
    free(pool->seats);
    free(pool->ranges);
    free(pool);
}

int ns_pool_new(int32_t threads, ns_pool **out)
{
    void *memory = NULL, *ranges = NULL;
    if (threads < 1 || threads > NS_MAX_THREADS) return -EINVAL;
    if (!ns_isa_supported()) return -ENOTSUP;
    if (posix_memalign(&memory, NS_LINE, sizeof(ns_pool))) return -ENOMEM;
    ns_pool *pool = memset(memory, 0, sizeof(ns_pool));
    if (posix_memalign(&ranges, NS_LINE, sizeof(ns_range_of_jobs) * (size_t)threads) == 0) pool->ranges = ranges;
    pool->seats = calloc((size_t)threads, sizeof *pool->seats);
    pool->threads = threads;
    ns_word_init(&pool->launch);
    ns_word_init(&pool->turn);
    ns_word_init(&pool->done);
    int32_t running = 0;
    int failed = pool->seats && pool->ranges ? 0 : ENOMEM;
    for (; !failed && running < threads; running += !failed) {
        ns_seat *seat = &pool->seats[running];
        seat->pool = pool;
        seat->worker = (ns_worker){.index = running, .threads = threads};
        failed = pthread_create(&seat->thread, NULL, ns_thread, seat);
    }
    if (failed) {
        ns_pool_end(pool, running);
        return -failed;
    }
    *out = pool;
    return 0;
}

void ns_pool_free(ns_pool *pool)
{
    ns_pool_wait(pool);
    ns_pool_end(pool, pool->threads);
}

int ns_pool_launch(ns_pool *pool, const ns_segment *segments, int32_t count, int32_t notify_fd)
{
    int32_t idle = 0;
    if (count < 1 || count > NS_MAX_SEGMENTS) return -EINVAL;
    if (!atomic_compare_exchange_strong(&pool->busy, &idle, 1)) return -EBUSY;
    memcpy(pool->segments, segments, (size_t)count * sizeof *segments);
    pool->segment_count = count;
    pool->segment = 0;
    pool->at = 0;
    pool->notify_fd = notify_fd;
    ns_word_set(&pool->launch, ns_word_get(&pool->launch) + 1);
    return 0;
}

int ns_pool_wait(ns_pool *pool)
{
    for (;;) {
        const uint32_t done = ns_word_get(&pool->done);
        if (!atomic_load(&pool->busy)) return 0;
        ns_word_wait(&pool->done, done, 0);
    }
}
