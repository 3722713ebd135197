/* Random legal programs over operands that are exactly as large as they must be, for the sanitizers to watch.
 *
 *   driver SEED COUNT   runs COUNT programs from SEED on; exits 0 if every launch ends and every token is in range
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "weights.h"

static uint64_t state;
static void *owned[4096];
static int owned_count;

static uint32_t draw(uint32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static float real(void) { return (float)draw(2001) / 1000.0f - 1.0f; }

static void *keep(size_t bytes)
{
    void *made = malloc(bytes ? bytes : 1);
    if (!made || owned_count == 4096) abort();
    owned[owned_count++] = made;
    return made;
}

static float *floats(size_t count)
{
    float *made = keep(count * sizeof *made);
    for (size_t i = 0; i < count; i++) made[i] = real();
    return made;
}

static int64_t *integers(size_t count, uint32_t below)
{
    int64_t *made = keep(count * sizeof *made);
    for (size_t i = 0; i < count; i++) made[i] = draw(below);
    return made;
}

/* Random bits are legal quants and legal scales of every kind. */
static ns_matrix matrix(int32_t rows, int32_t cols, int plain)
{
    ns_matrix made = {.kind = (int32_t)draw(NS_KIND_COUNT), .rows = rows, .cols = cols};
    if (cols % NS_GROUP && !ns_is_dense(made.kind)) made.kind = NS_F32;
    size_t bytes = (size_t)ns_ceil_div(rows, NS_LANES) * (size_t)ns_tile_bytes(made.kind, cols);
    if (plain && ns_is_dense(made.kind)) bytes = (size_t)rows * (size_t)cols * (made.kind == NS_F32 ? 4 : 2);
    uint8_t *data = keep(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)draw(256);
    if (made.kind == NS_F32) memcpy(data, floats(bytes / 4), bytes);
    made.data = data;
    return made;
}

typedef struct {
    ns_record records[64];
    int count;
    int32_t rows;
    int64_t *live;
    size_t scratch;
} program;

static ns_record *add(program *p, ns_op op)
{
    ns_record *record = &p->records[p->count++];
    memset(record, 0, sizeof *record);
    record->head = (ns_head){op, p->rows, p->live};
    return record;
}

static void need(program *p, size_t bytes) { p->scratch = bytes > p->scratch ? bytes : p->scratch; }

static ns_qgroup *quants(int32_t rows, int32_t cols)
{
    return keep(sizeof(ns_qgroup) * (size_t)ns_ceil_div(rows, NS_ROWS) * (size_t)(cols / NS_GROUP));
}

static float *linear(program *p, float *x, int32_t cols, ns_matrix w, int gate)
{
    ns_record *convert = ns_is_dense(w.kind) && w.kind != NS_BF16 ? NULL : add(p, NS_OP_QUANT);
    const int32_t outputs = gate < 0 ? w.rows : w.rows / 2;
    ns_linear_rec made = {.w = w, .x = x, .x_ld = cols, .gate = gate, .out_ld = outputs};
    if (convert) {
        convert->quant.x = x;
        convert->quant.x_ld = cols;
        convert->quant.cols = cols;
        if (w.kind == NS_BF16)
            made.halves = convert->quant.halves = keep((size_t)p->rows * (size_t)(cols + cols % 2) * 2);
        else
            made.quants = convert->quant.quants = quants(p->rows, cols);
    }
    made.bias = draw(2) ? floats((size_t)w.rows) : NULL;
    made.out = floats((size_t)p->rows * (size_t)outputs);
    if (gate >= 0 && outputs % NS_GROUP == 0) made.out_quants = quants(p->rows, outputs);
    ns_record *record = add(p, NS_OP_LINEAR);
    made.head = record->head;
    record->linear = made;
    return made.out;
}

static float *attention(program *p, float *qkv, int32_t heads, int32_t kv_heads, int32_t dim)
{
    const int32_t sequences = 1 + (int32_t)draw(4), width = NS_BLOCK * (1 + (int32_t)draw(30)), rows = p->rows;
    const int64_t slots = (int64_t)sequences * width, ld = (int64_t)(heads + 2 * kv_heads) * dim;
    int64_t *table = keep((size_t)slots * sizeof *table), *write = keep((size_t)rows * sizeof *write);
    int64_t *table_rows = integers((size_t)rows, (uint32_t)sequences), *lens = integers((size_t)rows, (uint32_t)width + 1);
    int64_t *positions = keep((size_t)rows * sizeof *positions);
    const int64_t shift = draw((uint32_t)sequences);
    for (int64_t i = 0; i < slots; i++) table[i] = (i + shift * width) % slots;
    uint8_t *taken = memset(keep((size_t)slots), 0, (size_t)slots);
    for (int32_t row = 0; row < rows; row++) {
        if (row && draw(3)) { /* the next token of the row before it */
            table_rows[row] = table_rows[row - 1];
            lens[row] = lens[row - 1] < width ? lens[row - 1] + 1 : width;
        }
        positions[row] = lens[row] ? lens[row] - 1 : 0;
        const int64_t slot = table[table_rows[row] * width + positions[row]];
        if (lens[row] && !taken[slot]) {
            taken[slot] = 1;
            write[row] = slot;
        } else { /* a sink of its own, so that a thread sanitizer sees only our races */
            lens[row] = 0;
            write[row] = slots + row;
        }
    }
    const size_t store = (size_t)(slots + (rows + NS_BLOCK - 1) / NS_BLOCK * NS_BLOCK) * (size_t)kv_heads * (size_t)dim * 2;
    uint16_t *keys = memset(keep(store), 0, store), *values = memset(keep(store), 0xff, store);
    ns_record *rope = add(p, NS_OP_ROPE);
    const ns_head head = rope->head;
    rope->rope = (ns_rope_rec){
        .head = head, .qkv = qkv, .q_norm = draw(2) ? floats((size_t)dim) : NULL, .k_norm = draw(2) ? floats((size_t)dim) : NULL,
        .cos = floats((size_t)width * (size_t)dim / 2), .sin = floats((size_t)width * (size_t)dim / 2),
        .positions = positions, .write_slots = write, .keys = keys, .values = values, .qkv_ld = ld, .heads = heads,
        .kv_heads = kv_heads, .head_dim = dim, .eps = 1e-5f,
    };
    const int32_t per_row = heads / kv_heads, together = NS_MAX_QUERIES / per_row;
    const size_t plan_bytes = sizeof(ns_plan) + (size_t)rows * sizeof(ns_row_group);
    void *plan = memset(keep(plan_bytes), 0, plan_bytes);
    ns_record *share = add(p, NS_OP_PLAN);
    share->plan = (ns_plan_rec){head, table_rows, lens, plan, together ? together : 1, kv_heads, per_row, 0};
    share->head.op = NS_OP_PLAN;
    float *out = keep((size_t)rows * (size_t)heads * (size_t)dim * sizeof *out);
    ns_record *attend = add(p, NS_OP_ATTENTION);
    attend->attention = (ns_attention_rec){
        .head = {NS_OP_ATTENTION, rows, p->live}, .q = qkv, .table = table, .table_rows = table_rows, .context_lens = lens,
        .keys = keys, .values = values, .plan = plan, .partials = keep(NS_PLAN_PARTIALS * (size_t)(dim + 2) * sizeof(float)),
        .out = out, .quants = dim % NS_GROUP ? NULL : quants(rows, heads * dim), .q_ld = ld, .table_ld = width,
        .heads = heads, .kv_heads = kv_heads, .head_dim = dim, .window = draw(2) ? 0 : 1 + (int32_t)draw(200), .scale = 0.1f,
    };
    const size_t queries = per_row > NS_MAX_QUERIES ? (size_t)per_row : NS_MAX_QUERIES;
    need(p, queries * (NS_SPLIT * 6 + (size_t)dim * 10 + 6 * 4));
    return out;
}

typedef struct {
    int64_t *table_rows, *positions, *index;
    int32_t *tokens;
    ns_history_counts *counts;
    ns_penalties *penalties;
    int32_t *bias_ids;
    float *bias_values;
    int32_t longest, biases;
} history;

/* A table row of its own for each row of the step, in any order; lengths up to the longest history. */
static history history_of(program *p, int32_t vocab)
{
    const size_t rows = (size_t)p->rows;
    history made = {.longest = 1 + (int32_t)draw(100), .biases = (int32_t)draw(9)};
    const size_t longest = (size_t)made.longest, biases = (size_t)made.biases;
    made.table_rows = keep(rows * sizeof(int64_t));
    const int64_t shift = draw((uint32_t)rows);
    for (size_t i = 0; i < rows; i++) made.table_rows[i] = ((int64_t)i + shift) % (int64_t)rows;
    made.positions = integers(rows, (uint32_t)made.longest + 1);
    made.index = NULL;
    if (draw(2)) {
        made.index = keep(rows * sizeof(int64_t));
        for (size_t i = 0; i < rows; i++) made.index[i] = (int64_t)(rows - 1 - i);
    }
    made.tokens = keep(rows * longest * sizeof(int32_t));
    for (size_t i = 0; i < rows * longest; i++) made.tokens[i] = (int32_t)draw((uint32_t)vocab);
    made.counts = keep(rows * sizeof *made.counts);
    made.penalties = keep(rows * sizeof *made.penalties);
    for (size_t i = 0; i < rows; i++) {
        made.counts[i] = (ns_history_counts){draw((uint32_t)made.longest + 1), draw((uint32_t)made.biases + 1), (int64_t)draw(22) - 1};
        made.penalties[i] = (ns_penalties){draw(2) ? 1.0f : 1.3f, draw(2) ? 0.0f : real(), draw(2) ? 0.0f : real()};
    }
    made.bias_ids = keep(rows * biases * sizeof(int32_t));
    for (size_t i = 0; i < rows * biases; i++) made.bias_ids[i] = (int32_t)draw((uint32_t)vocab);
    made.bias_values = floats(rows * biases);
    return made;
}

static int run_one(ns_pool *pool)
{
    static const int32_t dims[] = {16, 32, 64, 80, 96, 128, 256};
    const int32_t dim = dims[draw(7)], kv_heads = 1 + (int32_t)draw(3), heads = kv_heads * (1 + (int32_t)draw(5));
    const int32_t hidden = draw(2) ? NS_GROUP * (1 + (int32_t)draw(4)) : 1 + (int32_t)draw(100), vocab = 1 + (int32_t)draw(200);
    const int32_t inner = draw(2) ? NS_GROUP * (1 + (int32_t)draw(4)) : NS_LANES * (1 + (int32_t)draw(5));
    program p = {.rows = 1 + (int32_t)draw(200)};
    int64_t live = draw((uint32_t)p.rows + 1);
    p.live = draw(4) ? &live : NULL;
    ns_record *embed = add(&p, NS_OP_EMBED);
    int64_t *ids = integers((size_t)p.rows, (uint32_t)vocab);
    ids[0] = -1;
    float *x = floats((size_t)p.rows * (size_t)hidden);
    embed->embed = (ns_embed_rec){embed->head, matrix(vocab, hidden, 1), ids, integers((size_t)p.rows, 3),
                                  integers(3, (uint32_t)vocab), x, hidden};
    need(&p, ((size_t)(hidden > inner ? hidden : inner) + 16) * 4);
    float *qkv = linear(&p, x, hidden, matrix((heads + 2 * kv_heads) * dim, hidden, 0), -1);
    float *attended = attention(&p, qkv, heads, kv_heads, dim);
    float *back = linear(&p, attended, heads * dim, matrix(hidden, heads * dim, 0), -1);
    ns_record *norm = add(&p, NS_OP_NORM);
    float *normed = floats((size_t)p.rows * (size_t)hidden);
    norm->norm = (ns_norm_rec){norm->head, back, x, floats((size_t)hidden), floats((size_t)p.rows * (size_t)hidden), normed,
                               hidden % NS_GROUP ? NULL : quants(p.rows, hidden), hidden, hidden, 1e-5f};
    float *gated = linear(&p, normed, hidden, matrix(2 * inner, hidden, 0), (int)draw(2));
    float *down = linear(&p, gated, inner, matrix(hidden, inner, 0), -1);
    ns_record *gather = add(&p, NS_OP_GATHER);
    float *picked = floats((size_t)p.rows * (size_t)hidden);
    gather->gather = (ns_gather_rec){gather->head, down, integers((size_t)p.rows, (uint32_t)p.rows), picked,
                                     hidden % NS_GROUP ? NULL : quants(p.rows, hidden), hidden, hidden, 0};
    float *logits = linear(&p, picked, hidden, matrix(vocab, hidden, 0), -1);
    const size_t n = (size_t)p.rows;
    const history past = history_of(&p, vocab);
    ns_record *adjust = add(&p, NS_OP_ADJUST);
    float *adjusted = floats(n * (size_t)vocab);
    adjust->adjust = (ns_adjust_rec){adjust->head, logits, adjusted, past.table_rows, past.positions, past.index, past.tokens,
                                     past.counts, past.penalties, past.bias_ids, past.bias_values, past.longest,
                                     past.biases, vocab};
    need(&p, (size_t)vocab * 4);
    ns_record *sample = add(&p, NS_OP_SAMPLE);
    int64_t *tokens = memset(keep(n * sizeof *tokens), 0, n * sizeof *tokens);
    sample->sample = (ns_sample_rec){sample->head, adjusted, floats(n), floats(n), floats(n), integers(n, 50), integers(n, 99),
                                     integers(n, 3), integers(n, 99), integers(n, (uint32_t)p.rows), tokens, vocab, 0};
    need(&p, ((size_t)vocab + 16) * 2 * 4);
    ns_record *remember = add(&p, NS_OP_REMEMBER);
    remember->remember = (ns_remember_rec){remember->head, tokens, integers(n, 5), NULL, integers(5, 9)}; /* one thread */
    ns_record *append = add(&p, NS_OP_APPEND);
    append->append = (ns_append_rec){append->head, tokens, past.table_rows, past.positions, past.index, past.tokens,
                                     past.longest};
    ns_record *logprobs = add(&p, NS_OP_LOGPROBS);
    const int32_t top = vocab < NS_MAX_TOP ? vocab : NS_MAX_TOP;
    logprobs->logprobs = (ns_logprobs_rec){logprobs->head, logits, tokens, past.table_rows, past.index, past.counts,
                                           floats(n), keep(n * (size_t)top * 4), floats(n * (size_t)top), vocab, top};
    const ns_segment segment = {p.records, p.count};
    if (ns_pool_reserve(pool, (int64_t)p.scratch)) return 1;
    for (int times = 0; times < 2; times++)
        if (ns_pool_launch(pool, &segment, 1, -1) || ns_pool_wait(pool)) return 1;
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab) return 1;
    while (owned_count) free(owned[--owned_count]);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) return 2;
    const uint64_t seed = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10);
    for (uint64_t i = 0; i < count; i++) {
        ns_pool *pool = NULL;
        state = seed + i;
        draw(2);
        if (ns_pool_new(1 + (int32_t)draw(3), &pool)) return 3;
        const int failed = run_one(pool);
        ns_pool_free(pool);
        if (failed) {
            printf("program %llu failed\n", (unsigned long long)(seed + i));
            return 1;
        }
    }
    return 0;
}
