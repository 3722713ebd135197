/* What Python and the kernels share: record layouts, weight kinds, the K/V layout. Mirrored by native_lib.py, which
 * checks every size and offset against ns_layout(). Everything is little endian and 64-bit.
 *
 * A program is an array of records. A record names its op and points at its operands; nothing else is looked up while
 * it runs. Rows of a step are cut to `*live` at replay, so that pad rows cost nothing and are never written.
 */
#ifndef NS_ABI_H
#define NS_ABI_H

#include <stdint.h>

enum {
    NS_BLOCK = 16,       /* keys per K/V block: the width of a score vector */
    NS_LANES = 16,       /* output rows per weight tile */
    NS_GROUP = 32,       /* inputs per quantisation group */
    NS_ROWS = 16,        /* activation rows per quantised block */
    NS_SPLIT = 128,      /* keys per attention split: fixed, because it fixes the bits */
    NS_MAX_QUERIES = 32, /* queries one attention task holds at once, if one row has no more */
    NS_MAX_HEAD_DIM = 256,
    NS_MAX_TOP = 20,     /* likeliest tokens reported beside a chosen one */
};

typedef enum {
    NS_OP_PLAN,
    NS_OP_EMBED,
    NS_OP_NORM,
    NS_OP_QUANT,
    NS_OP_LINEAR,
    NS_OP_GATE,
    NS_OP_ROPE,
    NS_OP_ATTENTION,
    NS_OP_GATHER,
    NS_OP_SAMPLE,
    NS_OP_REMEMBER,
    NS_OP_ADJUST,
    NS_OP_LOGPROBS,
    NS_OP_APPEND,
    NS_OP_COPY,
    NS_OP_COUNT,
} ns_op;

/* How a weight matrix is packed. Tiles of 16 output rows; in a tile, pairs of groups of 32 inputs: the quants of both,
 * then the scales of both, so that one stream of whole cache lines brings everything in the order of its use. An odd
 * last group is half of a pair. Quants of a group are 64-byte vectors of 16 lanes x 4 consecutive inputs:
 *   4 bits: vector v holds inputs 4v..4v+3 in its low nibbles and 16+4v..16+4v+3 in its high ones;
 *   8 bits: vector v holds inputs 4v..4v+3.
 * Scales of one group: 16 scales, then 16 minima where the kind has them.
 * Dense kinds: F32 and F16 are [in][16]; BF16 is [in/2][16][2]; the odd last input is paired with zero.
 */
typedef enum {
    NS_F32,
    NS_F16,
    NS_BF16,
    NS_Q4Z,  /* (q - 8) * d; d fp16 (Q4_0) */
    NS_Q4M,  /* q * d + m; fp16 (Q4_1) */
    NS_Q4MF, /* q * d + m; fp32 (Q4_K) */
    NS_Q8Z,  /* (q - 128) * d; fp16 (Q8_0, Q5_0) */
    NS_Q8M,  /* q * d + m; fp16 (Q5_1) */
    NS_Q8MF, /* q * d + m; fp32 (Q5_K) */
    NS_Q8G,  /* (q - 128) * d; one fp32 d per 16 inputs: 16 for the first half, 16 for the second (Q6_K) */
    NS_KIND_COUNT,
} ns_kind;

typedef enum { NS_SILU, NS_GELU } ns_gate_kind;

typedef struct {
    int32_t kind;
    int32_t rows; /* outputs */
    int32_t cols; /* inputs */
    int32_t reserved;
    const void *data;
} ns_matrix;

/* One group of 32 inputs of 16 activation rows. x = dx * q; sx = dx * sum(q); the z are what a zero point of 8, of 128, or
 * of 128 in the first half of the group, adds to the integer dot product. A buffer is [ceil(rows/16)][cols/32]. */
typedef struct {
    int8_t q[NS_ROWS][NS_GROUP];
    float dx[NS_ROWS];
    float sx[NS_ROWS];
    int32_t z8[NS_ROWS];
    int32_t z128[NS_ROWS];
    int32_t z128_first[NS_ROWS];
} ns_qgroup;

/* First member of every record. `live` may be null: then all `rows` are. */
typedef struct {
    int32_t op;
    int32_t rows;
    const int64_t *live;
} ns_head;

/* Groups consecutive rows of one sequence and decides how attention is shared out; `plan` is an ns_plan. */
typedef struct {
    ns_head head;
    const int64_t *table_rows;
    const int64_t *context_lens;
    void *plan;
    int32_t rows_per_group;
    int32_t kv_heads;
    int32_t group_queries; /* queries per K/V head and row */
    int32_t reserved;
} ns_plan_rec;

typedef struct {
    ns_head head;
    ns_matrix table; /* dense kinds are plain row-major here */
    const int64_t *ids;
    const int64_t *table_rows;
    const int64_t *last_tokens;
    float *out; /* [rows, cols] */
    int64_t ld;
} ns_embed_rec;

/* total = x + residual (x where residual is null); out = total / rms(total) * weight. */
typedef struct {
    ns_head head;
    const float *x;
    const float *residual;
    const float *weight;
    float *total; /* may be null, or x or residual */
    float *out;   /* may be null */
    ns_qgroup *quants; /* may be null */
    int64_t x_ld;
    int32_t cols;
    float eps;
} ns_norm_rec;

/* x as quants, or rounded to bf16 pairs [rows, cols rounded up to 2]. */
typedef struct {
    ns_head head;
    const float *x;
    ns_qgroup *quants; /* either this */
    uint16_t *halves;  /* or this */
    int64_t x_ld;
    int32_t cols;
    int32_t reserved;
} ns_quant_rec;

/* out[r, o] = x[r] . w[o] + bias[o]. Gated (gate >= 0): the matrix holds n gate rows, then n up rows, and
 * out[r, o] = gate(x . w[o]) * (x . w[n + o]). */
typedef struct {
    ns_head head;
    ns_matrix w;
    const ns_qgroup *quants; /* the input of quantised kinds */
    const uint16_t *halves;  /* of BF16 */
    const float *x;          /* of F16 and F32 */
    const float *bias;       /* may be null */
    float *out;              /* may be null if out_quants is not */
    ns_qgroup *out_quants;   /* gated, n a multiple of 32 only; may be null */
    int64_t x_ld;
    int64_t out_ld;
    int32_t gate; /* ns_gate_kind, or -1 */
    int32_t reserved;
} ns_linear_rec;

typedef struct {
    ns_head head;
    const float *x; /* [rows, 2n] */
    float *out;     /* [rows, n] */
    ns_qgroup *quants;
    int64_t x_ld;
    int32_t n;
    int32_t gate;
} ns_gate_rec;

/* Rotates q and k of qkv in place of q, stores k and v. Norm weights may be null. */
typedef struct {
    ns_head head;
    float *qkv; /* [rows, (heads + 2 kv_heads) * head_dim] */
    const float *q_norm;
    const float *k_norm;
    const float *cos; /* [positions, head_dim / 2] */
    const float *sin;
    const int64_t *positions;
    const int64_t *write_slots;
    uint16_t *keys;   /* [blocks][kv_heads][head_dim / 2][16][2] bf16 */
    uint16_t *values; /* [blocks][kv_heads][8][head_dim][2] bf16 */
    int64_t qkv_ld;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    float eps;
} ns_rope_rec;

typedef struct {
    ns_head head;
    const float *q; /* [rows, heads * head_dim], rows q_ld apart */
    const int64_t *table; /* [max_sequences, width] slots */
    const int64_t *table_rows;
    const int64_t *context_lens;
    const uint16_t *keys;
    const uint16_t *values;
    void *plan;
    float *partials;
    float *out; /* [rows, heads * head_dim]; may be null */
    ns_qgroup *quants;
    int64_t q_ld;
    int64_t table_ld;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t window; /* 0: the whole context */
    float scale;
    int32_t reserved;
} ns_attention_rec;

typedef struct {
    ns_head head;
    const float *x;
    const int64_t *index;
    float *out;
    ns_qgroup *quants;
    int64_t x_ld;
    int32_t cols;
    int32_t reserved;
} ns_gather_rec;

typedef struct {
    ns_head head;
    const float *logits; /* [rows, vocab] */
    const float *temperature;
    const float *top_p;
    const float *min_p;
    const int64_t *top_k;
    const int64_t *seed;
    const int64_t *choice;
    const int64_t *positions; /* of the tokens to come */
    const int64_t *index;     /* logit row -> entry of positions; null: the same */
    int64_t *tokens;
    int32_t vocab;
    int32_t reserved;
} ns_sample_rec;

typedef struct {
    ns_head head;
    const int64_t *tokens;
    const int64_t *table_rows;
    const int64_t *index; /* logit row -> entry of table_rows; null: the same */
    int64_t *last_tokens;
} ns_remember_rec;

/* What the full head knows of a table row; a pad row's, and that of a sequence that asks for nothing, changes nothing. */
typedef struct {
    int64_t prompt_tokens;
    int64_t biases; /* entries of bias_ids and bias_values that count */
    int64_t top;    /* likeliest tokens to report; -1: no log-probability at all */
} ns_history_counts;

typedef struct {
    float repetition; /* 1: none */
    float presence;
    float frequency;
} ns_penalties;

/* out = logits, penalised for what the row's history holds, plus the bias of its table row. */
typedef struct {
    ns_head head;
    const float *logits; /* [rows, vocab] */
    float *out;          /* [rows, vocab] */
    const int64_t *table_rows;
    const int64_t *positions; /* of the tokens to come: as many tokens has the history */
    const int64_t *index;     /* logit row -> entry of table_rows and positions; null: the same */
    const int32_t *tokens;    /* [table rows, tokens_ld] */
    const ns_history_counts *counts;
    const ns_penalties *penalties;
    const int32_t *bias_ids; /* [table rows, bias_ld] */
    const float *bias_values;
    int64_t tokens_ld;
    int32_t bias_ld;
    int32_t vocab;
} ns_adjust_rec;

/* Log-probabilities under softmax(logits): of each row's token, and of its likeliest ones, the largest first. Rows that
 * ask for none are not written. */
typedef struct {
    ns_head head;
    const float *logits;
    const int64_t *tokens; /* chosen */
    const int64_t *table_rows;
    const int64_t *index;
    const ns_history_counts *counts;
    float *chosen;    /* [rows] */
    int32_t *top_ids; /* [rows, top_ld] */
    float *top;
    int32_t vocab;
    int32_t top_ld; /* at most NS_MAX_TOP and vocab */
} ns_logprobs_rec;

/* Each row's token joins the history of its table row. */
typedef struct {
    ns_head head;
    const int64_t *chosen;
    const int64_t *table_rows;
    const int64_t *positions;
    const int64_t *index;
    int32_t *tokens;
    int64_t tokens_ld;
} ns_append_rec;

/* Moves a step's numbers in, or its results out, between two steps. */
typedef struct {
    ns_head head;
    const void *from;
    void *to;
    int64_t bytes;
} ns_copy_rec;

typedef union {
    ns_head head;
    ns_plan_rec plan;
    ns_embed_rec embed;
    ns_norm_rec norm;
    ns_quant_rec quant;
    ns_linear_rec linear;
    ns_gate_rec gate;
    ns_rope_rec rope;
    ns_attention_rec attention;
    ns_gather_rec gather;
    ns_sample_rec sample;
    ns_remember_rec remember;
    ns_adjust_rec adjust;
    ns_logprobs_rec logprobs;
    ns_append_rec append;
    ns_copy_rec copy;
} ns_record;

/* Programs that run one after the other in one launch. */
typedef struct {
    const ns_record *records;
    int64_t count;
} ns_segment;

#endif
