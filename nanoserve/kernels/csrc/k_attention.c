/* Sharing attention out: the plan of a step, and the jobs of a layer.
 *
 * Consecutive rows of one sequence form a group, which reads K and V once per K/V head. Where there are too few groups
 * to keep the threads busy, or one of them is most of the work, a group's splits of keys are tasks of their own; the last
 * one to finish merges them all, in the order in which a single thread would have.
 */
#include "attention_split.h"
#include "quantise.h"

void ns_run_plan(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_plan_rec *r = &record->plan;
    ns_plan *plan = r->plan;
    const int32_t rows = ns_rows(&r->head);
    (void)begin;
    (void)end;
    plan->groups = 0;
    plan->tasks = 0;
    for (int32_t row = 0; row < rows; row++) {
        ns_row_group *last = &plan->group[plan->groups - 1];
        const int32_t lens = (int32_t)r->context_lens[row];
        if (plan->groups && last->rows < r->rows_per_group && r->table_rows[row] == r->table_rows[row - 1]) {
            last->rows++;
            last->longest = lens > last->longest ? lens : last->longest;
        } else {
            plan->group[plan->groups++] = (ns_row_group){row, 1, lens, 0};
        }
    }
    int64_t all = 0, most = 0, tasks = 0, partials = 0;
    for (int32_t g = 0; g < plan->groups; g++) {
        const int64_t work = (int64_t)plan->group[g].rows * plan->group[g].longest;
        all += work;
        most = work > most ? work : most;
    }
    const int even = 2 * worker->threads * most <= all && plan->groups * r->kv_heads >= 4 * worker->threads;
    if (worker->threads == 1 || even || plan->groups * r->kv_heads > NS_PLAN_TASKS) return;
    for (int32_t g = 0; g < plan->groups; g++) {
        const int64_t splits = ns_ceil_div(plan->group[g].longest, NS_SPLIT);
        plan->group[g].partial = (int32_t)partials;
        tasks += splits ? splits : 1;
        partials += splits * r->kv_heads * plan->group[g].rows * r->group_queries;
        if (tasks > NS_PLAN_TASKS || partials > NS_PLAN_PARTIALS) return;
    }
    if (tasks == plan->groups) return;
    for (int32_t g = 0; g < plan->groups; g++) {
        const int32_t splits = ns_ceil_div(plan->group[g].longest, NS_SPLIT);
        int32_t split = 0;
        do {
            plan->task[plan->tasks].group = g;
            plan->task[plan->tasks++].split = split++;
        } while (split < splits);
    }
}

/* One group and K/V head while it is worked on. */
typedef struct {
    ns_queries s;
    const ns_row_group *group;
    int32_t head;
    float *state_max, *state_sum, *state; /* [n], [n], [n][dim] */
} ns_attend;

static void ns_attend_open(ns_attend *a, const ns_attention_rec *r, const ns_worker *worker, int32_t group,
                           int32_t head)
{
    const ns_plan *plan = r->plan;
    const int32_t per_row = r->heads / r->kv_heads, dim = r->head_dim;
    a->group = &plan->group[group];
    a->head = head;
    const int32_t n = a->group->rows * per_row;
    float *at = worker->scratch;
    a->s = (ns_queries){.r = r, .count = n, .dim = dim};
    a->s.scores = at, at += n * NS_SPLIT;
    a->s.acc = at, at += n * dim;
    a->state = at, at += n * dim;
    a->s.max = at, at += n;
    a->s.sum = at, at += n;
    a->state_max = at, at += n;
    a->state_sum = at, at += n;
    a->s.lo = (int32_t *)at, at += n;
    a->s.hi = (int32_t *)at, at += n;
    a->s.p = (ns_operand *)at;
    a->s.q = a->s.p + n * NS_SPLIT;
    const vf scale = vf_set1(r->scale * 1.4426950408889634f);
    for (int32_t i = 0; i < n; i++) {
        const float *q = r->q + (a->group->row + i / per_row) * r->q_ld + (head * per_row + i % per_row) * dim;
        for (int32_t d = 0; d < dim; d += 16) vf_store_operand(a->s.q + i * dim + d, vf_mul(vf_load(q + d), scale));
        a->state_max[i] = -INFINITY;
        a->state_sum[i] = 0.0f;
        memset(a->state + i * dim, 0, (size_t)dim * sizeof *a->state);
    }
}

/* The keys of split `split` that query i sees, relative to the split's first. */
NS_INLINE void ns_range(const ns_attend *a, int32_t i, int32_t split, int32_t *lo, int32_t *hi)
{
    const ns_attention_rec *r = a->s.r;
    const int32_t row = a->group->row + i / (r->heads / r->kv_heads);
    const int64_t lens = r->context_lens[row], base = (int64_t)split * NS_SPLIT;
    const int64_t first = r->window && lens > r->window ? lens - r->window : 0;
    const int64_t from = first > base ? first - base : 0, to = lens - base < NS_SPLIT ? lens - base : NS_SPLIT;
    *lo = from < to ? (int32_t)from : 0;
    *hi = from < to ? (int32_t)to : 0;
}

/* Returns whether any query sees any key of the split; then s holds each one's part. */
static int ns_attend_keys(ns_attend *a, int32_t split)
{
    const ns_attention_rec *r = a->s.r;
    ns_blocks blocks;
    int32_t lo = NS_SPLIT, hi = 0;
    for (int32_t i = 0; i < a->s.count; i++) {
        ns_range(a, i, split, &a->s.lo[i], &a->s.hi[i]);
        if (a->s.lo[i] >= a->s.hi[i]) continue;
        lo = a->s.lo[i] < lo ? a->s.lo[i] : lo;
        hi = a->s.hi[i] > hi ? a->s.hi[i] : hi;
    }
    if (lo >= hi) return 0;
    const int64_t *slots = r->table + r->table_rows[a->group->row] * r->table_ld;
    const int64_t stride = (int64_t)r->head_dim * NS_BLOCK;
    const int32_t last = ns_ceil_div(hi, NS_BLOCK), total = ns_ceil_div(a->group->longest, NS_BLOCK);
    for (int32_t b = lo / NS_BLOCK; b < last + NS_AHEAD; b++) {
        int32_t block = split * NS_SPLIT_BLOCKS + b, head = a->head;
        if (block >= total) { /* fetched ahead for the next job, which is likely the next head's */
            block = (block - total) % total;
            head = head + 1 < r->kv_heads ? head + 1 : head;
        }
        const int64_t at = (slots[block * NS_BLOCK] / NS_BLOCK * r->kv_heads + head) * stride;
        blocks.keys[b] = r->keys + at;
        if (b < last) blocks.values[b] = r->values + at;
    }
    ns_attend_split(&a->s, &blocks);
    return 1;
}

static void ns_attend_close(const ns_attend *a)
{
    const ns_attention_rec *r = a->s.r;
    const int32_t per_row = r->heads / r->kv_heads, dim = r->head_dim, groups = r->heads * dim / NS_GROUP;
    for (int32_t i = 0; i < a->s.count; i++) {
        const int32_t row = a->group->row + i / per_row, first = (a->head * per_row + i % per_row) * dim;
        float *state = a->state + i * dim;
        const vf inverse = vf_set1(r->context_lens[row] > 0 ? 1.0f / a->state_sum[i] : 0.0f);
        for (int32_t d = 0; d < dim; d += 16) vf_store(state + d, vf_mul(vf_load(state + d), inverse));
        if (r->out) memcpy(r->out + (int64_t)row * r->heads * dim + first, state, (size_t)dim * sizeof *state);
    }
    for (int32_t query = 0; r->quants && query < per_row; query++)
        for (int32_t d = 0; d < dim; d += NS_GROUP)
            ns_quantise_group(r->quants, groups, ((a->head * per_row + query) * dim + d) / NS_GROUP, a->group->row,
                              a->group->rows, a->state + query * dim + d, (int64_t)per_row * dim);
}

static void ns_attend_group(const ns_attention_rec *r, const ns_worker *worker, int32_t group, int32_t head)
{
    ns_attend a;
    ns_attend_open(&a, r, worker, group, head);
    const int32_t splits = ns_ceil_div(a.group->longest, NS_SPLIT);
    for (int32_t split = 0; split < splits; split++) {
        if (!ns_attend_keys(&a, split)) continue;
        for (int32_t i = 0; i < a.s.count; i++)
            if (a.s.lo[i] < a.s.hi[i])
                ns_merge(&a.state_max[i], &a.state_sum[i], a.state + i * a.s.dim, a.s.max[i], a.s.sum[i],
                         a.s.acc + i * a.s.dim, a.s.dim);
    }
    ns_attend_close(&a);
}

/* Partial results: [K/V head][split][query] of (max, sum, acc[dim]), from the group's `partial` on. */
NS_INLINE float *ns_partial(const ns_attend *a, int32_t splits, int32_t split, int32_t i)
{
    const int64_t index = a->group->partial + ((int64_t)a->head * splits + split) * a->s.count + i;
    return a->s.r->partials + index * (a->s.dim + 2);
}

static void ns_attend_task(const ns_attention_rec *r, const ns_worker *worker, int32_t task, int32_t head)
{
    ns_plan *plan = r->plan;
    const int32_t group = plan->task[task].group, split = plan->task[task].split;
    ns_attend a;
    ns_attend_open(&a, r, worker, group, head);
    const int32_t splits = ns_ceil_div(a.group->longest, NS_SPLIT), dim = a.s.dim;
    if (splits && ns_attend_keys(&a, split)) {
        for (int32_t i = 0; i < a.s.count; i++) {
            float *part = ns_partial(&a, splits, split, i);
            part[0] = a.s.max[i];
            part[1] = a.s.sum[i];
            memcpy(part + 2, a.s.acc + i * dim, (size_t)dim * sizeof *part);
        }
    }
    _Atomic int32_t *done = &plan->done[group * r->kv_heads + head];
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < (splits ? splits : 1)) return;
    atomic_store_explicit(done, 0, memory_order_relaxed);
    for (int32_t each = 0; each < splits; each++) {
        for (int32_t i = 0; i < a.s.count; i++) {
            int32_t lo, hi;
            ns_range(&a, i, each, &lo, &hi);
            const float *part = ns_partial(&a, splits, each, i);
            if (lo < hi) ns_merge(&a.state_max[i], &a.state_sum[i], a.state + i * dim, part[0], part[1], part + 2, dim);
        }
    }
    ns_attend_close(&a);
}

void ns_run_attention(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_attention_rec *r = &record->attention;
    const ns_plan *plan = r->plan;
    for (int64_t job = begin; job < end; job++) {
        const int32_t unit = (int32_t)(job / r->kv_heads), head = (int32_t)(job % r->kv_heads);
        if (plan->tasks)
            ns_attend_task(r, worker, unit, head);
        else
            ns_attend_group(r, worker, unit, head);
    }
}
