/* Threads and the sharing of jobs.
 *
 * A launch wakes the threads once. One record at a time is open: threads take its jobs until there are none, half of
 * the threads from the first job on and half from the last one down, so that a thread has about the same part of every
 * record and finds in its own cache what it wrote before. Whoever finishes the last job runs the records that follow,
 * as long as those are too small to share, and opens the next that is not. A record is over when its jobs are, not
 * when every thread has come by: a core that the machine lends to somebody else delays the job its thread is in, and
 * nothing if it is in none. Waiting for the next record spins for some hundreds of microseconds before it sleeps,
 * since waking a thread takes longer than most records do; with nothing launched every thread sleeps.
 *
 * A second launch may be made while one runs: it begins when the first is over, without anyone having slept.
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

#include "cores.h"
#include "jobs.h"
#include "wait.h"

enum { NS_MAX_THREADS = 256, NS_MAX_SEGMENTS = 8, NS_MAX_LAUNCHES = 2, NS_SPINS = 20000, NS_LINE = 64 };
enum { NS_MAX_GRAINS = 0xffff };

typedef struct {
    ns_segment segments[NS_MAX_SEGMENTS];
    int32_t count;
    int32_t notify_fd;
} ns_launch;

typedef struct {
    ns_pool *pool;
    ns_worker worker;
    pthread_t thread;
} ns_seat;

/* `ticket` is the open record's turn in its high half and, in its low one, which grains of jobs nobody has taken:
 * from one (16 bits) to before another. Who has taken a grain may read `record`, `jobs` and `grain` until it has
 * given it back through `left`: before that no other record can be open. */
struct ns_pool {
    int32_t threads;
    ns_seat *seats;
    ns_launch launches[NS_MAX_LAUNCHES];
    uint32_t launched;        /* launches so far: the launcher's */
    _Atomic uint32_t current; /* launches that are over: the one that runs, in the ring */
    int32_t segment;          /* the record to come, and where it lies */
    int64_t at;
    int64_t started;      /* when the program that runs began: nanoseconds of a monotonic clock */
    _Atomic int64_t took; /* how long the last one that is over ran */
    _Atomic int32_t stop;
    _Atomic int32_t open;    /* launches that are not over */
    _Atomic int32_t untold;  /* launches whose descriptor has not been written to; those that have none count too */
    _Atomic int32_t running; /* records are left */
    _Atomic(const ns_record *) record; /* null: a launch, which is one empty job */
    _Atomic int64_t jobs;
    _Atomic int64_t grain; /* jobs that are taken at a time */
    _Alignas(NS_LINE) _Atomic uint64_t ticket;
    _Alignas(NS_LINE) _Atomic int64_t left; /* grains of the open record that are not over */
    ns_word launch; /* changes when there is a program */
    ns_word turn;   /* changes when the next record is open */
    ns_word done;   /* changes when a program's end has been told */
};

/* Round to nearest, denormals kept: a library loaded elsewhere may have set this thread's parent otherwise. */
static void ns_default_rounding(void)
{
#ifdef __x86_64__
    _mm_setcsr(0x1f80);
#endif
}

static uint64_t ns_ticket(uint32_t turn, uint32_t from, uint32_t to)
{
    return (uint64_t)turn << 32 | (uint64_t)to << 16 | from;
}

/* Whether the record whose turn it is has no grain that nobody has taken. */
static int ns_none_left(uint64_t ticket, uint32_t turn)
{
    return ticket >> 32 == turn && (ticket & 0xffff) == (ticket >> 16 & 0xffff);
}

static void ns_open(ns_pool *pool, const ns_record *record, int64_t jobs, int64_t grain)
{
    const uint32_t turn = (uint32_t)(atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    const int64_t least = (jobs + NS_MAX_GRAINS - 1) / NS_MAX_GRAINS, size = grain > least ? grain : least;
    const int64_t grains = (jobs + size - 1) / size;
    atomic_store_explicit(&pool->record, record, memory_order_relaxed);
    atomic_store_explicit(&pool->jobs, jobs, memory_order_relaxed);
    atomic_store_explicit(&pool->grain, size, memory_order_relaxed);
    atomic_store_explicit(&pool->left, grains, memory_order_relaxed);
    atomic_store_explicit(&pool->ticket, ns_ticket(turn, 0, (uint32_t)grains), memory_order_release);
    ns_word_set(&pool->turn, turn);
}

static ns_launch *ns_current(ns_pool *pool)
{
    return &pool->launches[atomic_load_explicit(&pool->current, memory_order_relaxed) % NS_MAX_LAUNCHES];
}

/* Ends the program that runs. Returns whether another has been launched, which is the current one then. */
static int ns_finish(ns_pool *pool)
{
    const int32_t fd = ns_current(pool)->notify_fd;
    int32_t last = 1;
    const int64_t now = ns_now();
    int more = atomic_load(&pool->open) > 1;
    atomic_store(&pool->took, now - pool->started);
    pool->started = now; /* of the next one, if it has been launched */
    pool->segment = 0;
    pool->at = 0;
    atomic_fetch_add(&pool->current, 1);
    if (more) {
        atomic_fetch_sub(&pool->open, 1);
    } else {
        atomic_store(&pool->running, 0);
        ns_open(pool, NULL, 0, 1); /* lets go whoever waits for the next record */
        if (!atomic_compare_exchange_strong(&pool->open, &last, 0)) { /* launched just now */
            atomic_fetch_sub(&pool->open, 1);
            atomic_store(&pool->running, 1);
            ns_word_bump(&pool->launch);
            more = 1;
        }
    }
    if (fd >= 0) {
        const uint64_t one = 1;
        while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue;
    }
    atomic_fetch_sub(&pool->untold, 1);
    ns_word_bump(&pool->done);
    return more;
}

/* Runs what is too small to share and opens the next record that is not, of this program or the next launched. */
static void ns_advance(ns_pool *pool, const ns_worker *worker)
{
    do {
        const ns_launch *launch = ns_current(pool);
        for (; pool->segment < launch->count; pool->segment++, pool->at = 0) {
            const ns_segment *segment = &launch->segments[pool->segment];
            while (pool->at < segment->count) {
                const ns_record *record = &segment->records[pool->at++];
                const ns_share share = ns_share_of(record, pool->threads);
                if (share.jobs == 0) continue;
                if (!share.serial && pool->threads > 1) {
                    ns_open(pool, record, share.jobs, share.grain);
                    return;
                }
                ns_kernel_table[record->head.op](record, worker, 0, share.jobs);
            }
        }
    } while (ns_finish(pool));
}

/* Takes and runs jobs until no program is left. */
static void ns_serve(ns_pool *pool, const ns_worker *worker)
{
    const int from_first = 2 * worker->index < worker->threads;
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    int32_t left_out = 0;
    for (;;) {
        const uint32_t turn = (uint32_t)(ticket >> 32), from = ticket & 0xffff, to = ticket >> 16 & 0xffff;
        if (from == to) {
            if (!atomic_load(&pool->running)) return;
            ns_word_wait(&pool->turn, turn, NS_SPINS);
            ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
            continue;
        }
        const uint64_t rest = from_first ? ns_ticket(turn, from + 1, to) : ns_ticket(turn, from, to - 1);
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, rest, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        const ns_record *record = atomic_load_explicit(&pool->record, memory_order_relaxed);
        const int64_t jobs = atomic_load_explicit(&pool->jobs, memory_order_relaxed);
        const int64_t grain = atomic_load_explicit(&pool->grain, memory_order_relaxed);
        const int64_t begin = (from_first ? from : to - 1) * grain, end = begin + grain < jobs ? begin + grain : jobs;
        if (record) ns_kernel_table[record->head.op](record, worker, begin, end);
        if (atomic_fetch_sub_explicit(&pool->left, 1, memory_order_acq_rel) == 1)
            ns_advance(pool, worker);
        else if (ns_none_left(atomic_load_explicit(&pool->ticket, memory_order_acquire), turn))
            ns_offer_core(&left_out);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static void *ns_thread(void *argument)
{
    ns_seat *seat = argument;
    ns_pool *pool = seat->pool;
    uint32_t seen = 0;
    ns_default_rounding();
    ns_keep_core(seat->worker.index, pool->threads);
    for (;;) {
        ns_word_wait(&pool->launch, seen, 0);
        seen = ns_word_get(&pool->launch);
        if (atomic_load(&pool->stop)) return NULL;
        ns_serve(pool, &seat->worker);
    }
}

int ns_pool_reserve(ns_pool *pool, int64_t scratch_bytes)
{
    for (int32_t i = 0; i < pool->threads; i++) {
        ns_worker *worker = &pool->seats[i].worker;
        if (worker->scratch_bytes >= (size_t)scratch_bytes) continue;
        if (atomic_load(&pool->open)) return -EBUSY;
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
    ns_word_bump(&pool->launch);
    for (int32_t i = 0; i < running; i++) pthread_join(pool->seats[i].thread, NULL);
    for (int32_t i = 0; pool->seats && i < pool->threads; i++) free(pool->seats[i].worker.scratch);
    free(pool->seats);
    free(pool);
}

int ns_pool_new(int32_t threads, ns_pool **out)
{
    void *memory = NULL;
    if (threads < 1 || threads > NS_MAX_THREADS) return -EINVAL;
    if (!ns_isa_supported()) return -ENOTSUP;
    if (posix_memalign(&memory, NS_LINE, sizeof(ns_pool))) return -ENOMEM;
    ns_pool *pool = memset(memory, 0, sizeof(ns_pool));
    pool->seats = calloc((size_t)threads, sizeof *pool->seats);
    pool->threads = threads;
    ns_word_init(&pool->launch);
    ns_word_init(&pool->turn);
    ns_word_init(&pool->done);
    int32_t running = 0;
    int failed = pool->seats ? 0 : ENOMEM;
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
    if (count < 1 || count > NS_MAX_SEGMENTS) return -EINVAL;
    if (atomic_load(&pool->open) == NS_MAX_LAUNCHES) return -EBUSY;
    ns_launch *launch = &pool->launches[pool->launched++ % NS_MAX_LAUNCHES];
    memcpy(launch->segments, segments, (size_t)count * sizeof *segments);
    launch->count = count;
    launch->notify_fd = notify_fd;
    atomic_fetch_add(&pool->untold, 1);
    if (atomic_fetch_add(&pool->open, 1)) return 0; /* who ends the one before begins this one */
    pool->started = ns_now();
    atomic_store(&pool->running, 1);
    ns_open(pool, NULL, 1, 1);
    ns_word_bump(&pool->launch);
    return 0;
}

/* Back once nothing runs and nobody will write to a descriptor any more, which may then be closed. */
int ns_pool_wait(ns_pool *pool)
{
    for (;;) {
        const uint32_t done = ns_word_get(&pool->done);
        if (!atomic_load(&pool->untold)) return 0;
        ns_word_wait(&pool->done, done, 0);
    }
}

int64_t ns_pool_took(const ns_pool *pool) { return atomic_load(&pool->took); }
