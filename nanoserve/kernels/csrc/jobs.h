/* How many jobs a record has at replay, and how they are handed out. Knows sizes, no arithmetic. */
#ifndef NS_JOBS_H
#define NS_JOBS_H

#include "kernels.h"

/* `serial`: so little work that the thread that finished the record before does it at once, without waking anyone. */
typedef struct {
    int64_t jobs;
    int64_t grain;
    int serial;
} ns_share;

static inline ns_share ns_rows_share(int32_t rows, int64_t row_cost, int32_t threads)
{
    const int64_t grain = rows / (threads * 4);
    return (ns_share){rows, grain < 1 ? 1 : grain, rows * row_cost < 4096};
}

/* Where there are enough rows, whole blocks of quantised ones: those are made together. */
static inline ns_share ns_blocks_share(int32_t rows, int64_t row_cost, int32_t threads)
{
    ns_share share = ns_rows_share(rows, row_cost, threads);
    if (rows >= NS_ROWS * threads) share.grain = (share.grain + NS_ROWS - 1) / NS_ROWS * NS_ROWS;
    return share;
}

/* Few grains, so that each streams a long stretch of weights: a thread that jumps about loses the prefetcher. With many
 * rows a grain takes so long that half a one is a loss at the end. */
static inline ns_share ns_linear_share(const ns_linear_rec *r, int32_t rows, int32_t threads)
{
    const int32_t units = r->gate < 0 ? ns_ceil_div(r->w.rows, NS_LANES) : ns_ceil_div(r->w.rows / 2, NS_GROUP);
    const int32_t spans = ns_ceil_div(rows, ns_row_span(rows, threads));
    const int64_t grain = units / (threads * (rows < 2 * NS_ROWS * threads ? 2 : 4));
    return (ns_share){(int64_t)units * spans, grain < 1 ? 1 : grain, 0};
}

static inline ns_share ns_share_of(const ns_record *record, int32_t threads)
{
    const int32_t rows = ns_rows(&record->head);
    if (rows == 0) return (ns_share){0, 1, 1};
    switch ((ns_op)record->head.op) {
    case NS_OP_PLAN: return (ns_share){1, 1, 1};
    case NS_OP_EMBED: return ns_rows_share(rows, record->embed.table.cols, threads);
    case NS_OP_NORM: return ns_blocks_share(rows, record->norm.cols, threads);
    case NS_OP_QUANT: return ns_rows_share(rows, record->quant.cols, threads);
    case NS_OP_GATE: return ns_rows_share(rows, record->gate.n, threads);
    case NS_OP_ROPE: return ns_rows_share(rows, record->rope.qkv_ld, threads);
    case NS_OP_GATHER: return ns_rows_share(rows, record->gather.cols, threads);
    case NS_OP_SAMPLE: return ns_rows_share(rows, record->sample.vocab, threads);
    case NS_OP_REMEMBER:
    case NS_OP_APPEND: return (ns_share){rows, rows, 1};
    case NS_OP_COPY: return (ns_share){1, 1, 1};
    case NS_OP_ADJUST: return ns_rows_share(rows, record->adjust.vocab, threads);
    case NS_OP_LOGPROBS: return ns_rows_share(rows, record->logprobs.vocab, threads);
    case NS_OP_LINEAR: return ns_linear_share(&record->linear, rows, threads);
    case NS_OP_ATTENTION: {
        /* The heads of a group, or of its split, lie side by side: a thread takes all where there are enough. */
        const ns_plan *plan = record->attention.plan;
        const int32_t heads = record->attention.kv_heads, units = plan->tasks ? plan->tasks : plan->groups;
        return (ns_share){(int64_t)units * heads, units >= 4 * threads ? heads : 1, 0};
    }
    case NS_OP_COUNT: break;
    }
    return (ns_share){0, 1, 1};
}

#endif
