/* Paged attention over one NS_SPLIT of keys: scores, softmax, weighted values, for the queries of a group of rows.
 *
 * A query's operations are one fixed sequence: scores per key over ascending pairs of dimensions, the maximum of the
 * split, exponentials added block by block, values by ascending pairs of keys, then the merge of splits in ascending
 * order. How queries are tiled into registers, and which thread takes which split, changes none of it.
 * A key outside a row's range is never multiplied: its score is replaced, its value masked or skipped.
 */
#include "kernels.h"
#include "vec.h"

/* The queries of one group and K/V head, and their state while splits are merged. [n] is `count` entries. */
typedef struct {
    const ns_attention_rec *r;
    int32_t count;
    int32_t dim;
    ns_operand *q;  /* [n][dim], times scale and log2(e) */
    float *scores;  /* [n][NS_SPLIT] */
    ns_operand *p;  /* [n][NS_SPLIT] */
    float *acc;     /* [n][dim] of one split */
    float *max, *sum;
    int32_t *lo, *hi; /* the keys of the split a query sees */
} ns_queries;

enum { NS_SPLIT_BLOCKS = NS_SPLIT / NS_BLOCK, NS_AHEAD = NS_SPLIT_BLOCKS };

/* A split's blocks, and as many after them, which are only fetched ahead. */
typedef struct {
    const uint16_t *keys[NS_SPLIT_BLOCKS + NS_AHEAD];
    const uint16_t *values[NS_SPLIT_BLOCKS];
} ns_blocks;

/* Scores of `nq` queries against `nb` blocks from `b` on. The first queries fetch what comes next: the values of these
 * blocks, which are as large as the keys, and the keys of the blocks ahead. */
NS_INLINE void ns_score_tile(const ns_queries *s, const ns_blocks *blocks, int32_t first, int b, const int nq,
                             const int nb)
{
    const uint16_t *const *keys = blocks->keys + b;
    const ns_operand *q[NS_TILE_QUERIES];
    vf acc[NS_TILE_QUERIES][NS_TILE_BLOCKS];
    for (int i = 0; i < nq; i++) q[i] = s->q + (first + i) * s->dim;
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nb; j++) acc[i][j] = vf_set1(0.0f);
    for (int32_t pair = 0; pair < s->dim / 2; pair++) {
        vw k[NS_TILE_BLOCKS];
        for (int j = 0; j < nb; j++) k[j] = vw_load(keys[j] + pair * 32);
        for (int j = 0; first == 0 && j < nb; j++) {
            ns_prefetch_far(blocks->values[b + j] + pair * 32);
            ns_prefetch_far(keys[NS_AHEAD + j] + pair * 32);
        }
        for (int i = 0; i < nq; i++)
            for (int j = 0; j < nb; j++) acc[i][j] = vf_dot_pair(acc[i][j], k[j], q[i] + 2 * pair);
    }
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nb; j++) vf_store(s->scores + (first + i) * NS_SPLIT + (b + j) * NS_BLOCK, acc[i][j]);
}

NS_INLINE void ns_score_rows(const ns_queries *s, const ns_blocks *blocks, int32_t first, int lo, int hi, const int nq)
{
    int b = lo;
    for (; b + NS_TILE_BLOCKS <= hi; b += NS_TILE_BLOCKS) ns_score_tile(s, blocks, first, b, nq, NS_TILE_BLOCKS);
    for (; b < hi; b++) ns_score_tile(s, blocks, first, b, nq, 1);
}

/* Scores to probabilities relative to the split's maximum, and their sum. */
NS_INLINE void ns_soften(const ns_queries *s, int32_t query)
{
    const int lo = s->lo[query], hi = s->hi[query], first = lo / NS_BLOCK, last = (hi + NS_BLOCK - 1) / NS_BLOCK;
    float *scores = s->scores + query * NS_SPLIT;
    vf top = vf_set1(-INFINITY), sum = vf_set1(0.0f);
    for (int b = first; b < last; b++) {
        vf v = vf_load(scores + b * NS_BLOCK);
        if (lo > b * NS_BLOCK || hi < (b + 1) * NS_BLOCK) {
            int from = lo - b * NS_BLOCK, to = hi - b * NS_BLOCK;
            v = vf_keep(v, from > 0 ? from : 0, to < NS_BLOCK ? to : NS_BLOCK, -INFINITY);
            vf_store(scores + b * NS_BLOCK, v);
        }
        top = vf_max(v, top);
    }
    s->max[query] = vf_hmax(top);
    vf shift = vf_set1(s->max[query]);
    for (int b = first; b < last; b++) {
        vf e = vf_exp2(vf_sub(vf_load(scores + b * NS_BLOCK), shift));
        sum = vf_add(sum, e);
        vf_store_operand(s->p + query * NS_SPLIT + b * NS_BLOCK, e);
    }
    s->sum[query] = vf_hadd(sum);
}

/* acc += P V over pairs lo <= pair < hi, for `nq` queries and `nd` vectors of dimensions from `d` on. */
NS_INLINE void ns_value_tile(const ns_queries *s, const uint16_t *const *values, int32_t first, int d, int lo, int hi,
                             uint32_t keep, const int nq, const int nd)
{
    const int32_t dim = s->dim;
    const ns_operand *p[NS_TILE_QUERIES];
    vf acc[NS_TILE_QUERIES][NS_TILE_DIMS];
    for (int i = 0; i < nq; i++) p[i] = s->p + (first + i) * NS_SPLIT;
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nd; j++) acc[i][j] = vf_load(s->acc + (first + i) * dim + d + 16 * j);
    for (int pair = lo; pair < hi; pair++) {
        const uint16_t *row = values[pair / 8] + (pair % 8 * dim + d) * 2;
        vw v[NS_TILE_DIMS];
        for (int j = 0; j < nd; j++) v[j] = vw_load(row + 32 * j);
        if (keep != 0xffffffffu)
            for (int j = 0; j < nd; j++) v[j] = vw_and(v[j], keep);
        for (int i = 0; i < nq; i++)
            for (int j = 0; j < nd; j++) acc[i][j] = vf_dot_pair(acc[i][j], v[j], p[i] + 2 * pair);
    }
    for (int i = 0; i < nq; i++)
        for (int j = 0; j < nd; j++) vf_store(s->acc + (first + i) * dim + d + 16 * j, acc[i][j]);
}

NS_INLINE void ns_value_pairs(const ns_queries *s, const uint16_t *const *values, int32_t first, int lo, int hi,
                              uint32_t keep, const int nq)
{
    int d = 0;
    if (lo >= hi) return;
    for (; d + 16 * NS_TILE_DIMS <= s->dim; d += 16 * NS_TILE_DIMS)
        ns_value_tile(s, values, first, d, lo, hi, keep, nq, NS_TILE_DIMS);
    for (; d < s->dim; d += 16) ns_value_tile(s, values, first, d, lo, hi, keep, nq, 1);
}

/* A query's pairs from `lo` to `hi` keys, an odd key at either end with its neighbour masked. */
NS_INLINE void ns_value_ragged(const ns_queries *s, const uint16_t *const *values, int32_t query, int lo, int hi)
{
    if (lo >= hi) return;
    if (lo % 2) ns_value_pairs(s, values, query, lo / 2, lo / 2 + 1, 0xffff0000u, 1);
    ns_value_pairs(s, values, query, (lo + 1) / 2, hi / 2, 0xffffffffu, 1);
    if (hi % 2 && hi > lo) ns_value_pairs(s, values, query, hi / 2, hi / 2 + 1, 0x0000ffffu, 1);
}

/* The pairs that all queries of a tile see run together; what is before and after them, query by query. */
NS_INLINE void ns_value_rows(const ns_queries *s, const uint16_t *const *values, int32_t first, const int nq)
{
    int lo = 0, hi = NS_SPLIT;
    for (int i = 0; i < nq; i++) {
        const int from = (s->lo[first + i] + 1) & ~1, to = s->hi[first + i] & ~1;
        lo = from > lo ? from : lo;
        hi = to < hi ? to : hi;
    }
    for (int i = 0; i < nq; i++) {
        const int32_t query = first + i;
        ns_value_ragged(s, values, query, s->lo[query], lo < hi ? lo : s->hi[query]);
    }
    if (lo >= hi) return;
    ns_value_pairs(s, values, first, lo / 2, hi / 2, 0xffffffffu, nq);
    for (int i = 0; i < nq; i++) ns_value_ragged(s, values, first + i, hi, s->hi[first + i]);
}

/* One split from key `base` on: max, sum and acc of every query that sees any of it; lo == hi marks the others. */
static __attribute__((noinline)) void ns_attend_split(ns_queries *s, const ns_blocks *blocks)
{
    int lo = NS_SPLIT, hi = 0;
    for (int32_t i = 0; i < s->count; i++) {
        if (s->lo[i] >= s->hi[i]) continue;
        lo = s->lo[i] < lo ? s->lo[i] : lo;
        hi = s->hi[i] > hi ? s->hi[i] : hi;
    }
    const int first = lo / NS_BLOCK, last = (hi + NS_BLOCK - 1) / NS_BLOCK;
    int32_t i = 0;
    for (; i + NS_TILE_QUERIES <= s->count; i += NS_TILE_QUERIES)
        ns_score_rows(s, blocks, i, first, last, NS_TILE_QUERIES);
#if NS_TILE_QUERIES > 1
    if (s->count - i == 1) ns_score_rows(s, blocks, i, first, last, 1);
#endif
#if NS_TILE_QUERIES > 2
    if (s->count - i == 2) ns_score_rows(s, blocks, i, first, last, 2);
    if (s->count - i == 3) ns_score_rows(s, blocks, i, first, last, 3);
#endif
    for (i = 0; i < s->count; i++)
        if (s->lo[i] < s->hi[i]) ns_soften(s, i);
    memset(s->acc, 0, (size_t)s->count * (size_t)s->dim * sizeof *s->acc);
    i = 0;
    for (; i + NS_TILE_QUERIES <= s->count; i += NS_TILE_QUERIES) ns_value_rows(s, blocks->values, i, NS_TILE_QUERIES);
#if NS_TILE_QUERIES > 1
    if (s->count - i == 1) ns_value_rows(s, blocks->values, i, 1);
#endif
#if NS_TILE_QUERIES > 2
    if (s->count - i == 2) ns_value_rows(s, blocks->values, i, 2);
    if (s->count - i == 3) ns_value_rows(s, blocks->values, i, 3);
#endif
}

/* state = state merged with part, both (max, sum, acc[dim]); the first part is taken as it is. */
NS_INLINE void ns_merge(float *max, float *sum, float *acc, float part_max, float part_sum, const float *part, int dim)
{
    if (*sum == 0.0f && *max == -INFINITY) {
        *max = part_max;
        *sum = part_sum;
        memcpy(acc, part, (size_t)dim * sizeof *acc);
        return;
    }
    const float top = part_max > *max ? part_max : *max;
    const float old = ns_exp2(*max - top), new = ns_exp2(part_max - top);
    *max = top;
    *sum = *sum * old + part_sum * new;
    for (int d = 0; d < dim; d += 16) {
        vf scaled = vf_mul(vf_load(part + d), vf_set1(new));
        vf_store(acc + d, vf_fma(vf_load(acc + d), vf_set1(old), scaled));
    }
}
