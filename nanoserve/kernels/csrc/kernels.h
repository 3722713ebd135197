/* What a kernel gets, and the table of kernels one instruction set exports. */
#ifndef NS_KERNELS_H
#define NS_KERNELS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "ns_abi.h"

/* One compute thread. `scratch` is its own and survives nothing. */
typedef struct {
    int32_t index;
    int32_t threads;
    void *scratch;
    size_t scratch_bytes;
} ns_worker;

/* Runs jobs begin <= job < end of a record; which jobs a record has is ns_share_of (jobs.h). */
typedef void (*ns_kernel)(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);

/* By ns_op. */
extern const ns_kernel ns_kernel_table[NS_OP_COUNT];

/* Whether this machine has the instruction set the kernels were compiled for. */
int ns_isa_supported(void);

void ns_run_plan(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_embed(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_norm(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_quant(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_linear(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_gate(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_rope(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_attention(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_gather(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_sample(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_remember(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_adjust(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_logprobs(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_append(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);
void ns_run_copy(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end);

/* How attention is shared out: made by NS_OP_PLAN for every layer of a step. A split task is one NS_SPLIT of keys of a
 * group; without a split a task is a whole group. `partial` is where a group's partial results start, in partials. */
typedef struct {
    int32_t row;
    int32_t rows;
    int32_t longest; /* context_lens of the group's longest row */
    int32_t partial;
} ns_row_group;

enum {
    NS_PLAN_TASKS = 1024,     /* split tasks at most */
    NS_PLAN_PARTIALS = 16384, /* partial results at most: groups x K/V heads x queries x splits */
};

typedef struct {
    int32_t groups;
    int32_t tasks; /* 0: attention is not split */
    struct {
        int32_t group;
        int32_t split;
    } task[NS_PLAN_TASKS];
    _Atomic int32_t done[NS_PLAN_TASKS]; /* finished splits per group and K/V head; 0 between records */
    ns_row_group group[];                /* as many as the record has rows */
} ns_plan;

static inline int32_t ns_rows(const ns_head *head)
{
    int64_t live = head->live ? *head->live : head->rows;
    return live < 0 ? 0 : live > head->rows ? head->rows : (int32_t)live;
}

static inline int32_t ns_ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

enum { NS_ROW_SPAN = 128 }; /* activation rows one linear job takes at most: what a core's own cache holds */

/* Activation rows one linear job takes. Where every thread has 32 of its own or more, jobs are for equal parts of the
 * rows: a thread then computes what it reads in the next record, and the weights are read once for each part. The
 * rest, less than 16 rows for each part, is a part of its own that evens the threads out. With fewer rows, reading the
 * weights once for all of them is worth more. */
static inline int32_t ns_row_span(int32_t rows, int32_t threads)
{
    const int32_t parts = threads * ns_ceil_div(rows, threads * NS_ROW_SPAN);
    return rows < 2 * NS_ROWS * threads ? NS_ROW_SPAN : rows / (NS_ROWS * parts) * NS_ROWS;
}

#endif
