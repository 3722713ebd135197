/* Linear layers. A job is one tile of outputs (two gate and two up tiles where it is gated) for ns_row_span() rows.
 *
 * Integer sums are exact, so only the order of a row's float operations matters: group by group, scale times sum, then
 * the minimum's share. It is the same for every number of rows, and for every instruction set with fused multiply-add.
 */
#include "quantise.h"
#include "weights.h"

enum {
    NS_PREFETCH = 2560, /* bytes ahead: what a core has under way at the memory's bandwidth and latency */
    NS_TILES_A_JOB = 2,
    NS_TILE_FLOATS = NS_ROWS * NS_LANES
};

typedef struct {
    const ns_linear_rec *r;
    int64_t tile_bytes;
    int32_t groups;
} ns_linear_plan;

/* A pass of few rows is as fast as the memory: there the core's own prefetcher runs ahead, and lines fetched into the
 * first-level cache would take the few misses it can have under way. */
NS_INLINE void ns_fetch_ahead(const uint8_t *from, const int bytes, const int count)
{
    if (count < NS_FAR_BELOW)
        for (int at = 0; at < bytes; at += 128) ns_prefetch_far(from + at);
    else
        for (int at = 0; at < bytes; at += 64) ns_prefetch(from + at);
}

/* Where a row's integer dot product begins: at what a zero point of its weights takes away. An AVX2 dot8 reads stored
 * weights as signed, so there 128 per weight is added back for a kind that has no zero point. */
NS_INLINE vi ns_sum_start(const ns_qgroup *x, int lane, int kind)
{
    if (kind == NS_Q4Z) return vi_set1(x->z8[lane]);
    if (kind == NS_Q8Z && NS_DOT8_BIASED) return vi_set1(x->z128[lane]);
    if ((kind == NS_Q8M || kind == NS_Q8MF) && !NS_DOT8_BIASED) return vi_set1(-x->z128[lane]);
    return vi_zero();
}

/* acc[t * count + i] += the products of one group of 16 outputs of tile t with row `lane` + i. */
NS_INLINE void ns_group_rows(vf *acc, const uint8_t *const *quants, const vf *d, const vf *m, const int tiles,
                             const ns_qgroup *x, int lane, const int count, const int kind)
{
    const int8_t(*q)[NS_GROUP] = x->q + lane;
    vi sum[NS_TILES * NS_TILE_ROWS];
    if (kind == NS_Q8G) {
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < count; i++) {
                const int32_t first = x->z128_first[lane + i], zero = half ? x->z128[lane + i] - first : first;
                for (int t = 0; t < tiles; t++) sum[t * count + i] = NS_DOT8_BIASED ? vi_set1(zero) : vi_zero();
            }
            vi_dot8_rows(sum, quants, tiles, 4 * half, 4 * half + 4, q, count);
            for (int t = 0; t < tiles; t++)
                for (int i = 0; i < count; i++) {
                    vf scale = vf_mul(half ? m[t] : d[t], vf_set1(x->dx[lane + i]));
                    acc[t * count + i] = vf_fma(scale, vi_float(sum[t * count + i]), acc[t * count + i]);
                }
        }
        return;
    }
    for (int t = 0; t < tiles; t++)
        for (int i = 0; i < count; i++) sum[t * count + i] = ns_sum_start(x, lane + i, kind);
    if (ns_is_4bit(kind))
        vi_dot4_rows(sum, quants, tiles, q, count);
    else
        vi_dot8_rows(sum, quants, tiles, 0, 8, q, count);
    for (int t = 0; t < tiles; t++)
        for (int i = 0; i < count; i++) {
            vf *a = acc + t * count + i;
            *a = vf_fma(vf_mul(d[t], vf_set1(x->dx[lane + i])), vi_float(sum[t * count + i]), *a);
            if (ns_has_min(kind)) *a = vf_fma(m[t], vf_set1(x->sx[lane + i]), *a);
        }
}

/* A pass: `count` rows from `lane` on against `tiles` tiles: out[tile][row][16]. Each group fetches `fetch` bytes, from
 * `ahead` of the tile's start on. */
NS_INLINE void ns_quant_pass(const ns_linear_plan *plan, const uint8_t *const *tile, const int tiles, int64_t ahead,
                             const int fetch, const ns_qgroup *x, int lane, float (*out)[NS_TILE_FLOATS],
                             const int count, const int kind)
{
    vf acc[NS_TILES * NS_TILE_ROWS];
    for (int i = 0; i < tiles * count; i++) acc[i] = vf_set1(0.0f);
    for (int32_t g = 0; g < plan->groups; g++) {
        const uint8_t *quants[NS_TILES];
        vf d[NS_TILES], m[NS_TILES];
        for (int t = 0; t < tiles; t++) {
            const uint8_t *scales = tile[t] + ns_scales_at(kind, g);
            quants[t] = tile[t] + ns_quants_at(kind, g);
            ns_fetch_ahead(tile[t] + ahead + (int64_t)g * fetch, fetch, count);
            m[t] = d[t] = ns_scales(scales, kind, 0);
            if (ns_has_min(kind) || kind == NS_Q8G) m[t] = ns_scales(scales, kind, 1);
        }
        ns_group_rows(acc, quants, d, m, tiles, x + g, lane, count, kind);
    }
    for (int t = 0; t < tiles; t++)
        for (int i = 0; i < count; i++) vf_store(out[t] + 16 * (lane + i), acc[t * count + i]);
}

/* Rows `lane` to `rows` against one tile: the fewest passes. */
NS_INLINE void ns_quant_rows(const ns_linear_plan *plan, const uint8_t *tile, const ns_qgroup *x, int lane, int rows,
                             float (*out)[NS_TILE_FLOATS], const int kind)
{
    const int bytes = ns_group_bytes(kind);
#if NS_TILE_ROWS >= 4
    for (; lane + 4 <= rows; lane += 4) ns_quant_pass(plan, &tile, 1, NS_PREFETCH, bytes, x, lane, out, 4, kind);
#endif
#if NS_TILE_ROWS >= 2
    for (; lane + 2 <= rows; lane += 2) ns_quant_pass(plan, &tile, 1, NS_PREFETCH, bytes, x, lane, out, 2, kind);
#endif
    for (; lane < rows; lane++) ns_quant_pass(plan, &tile, 1, NS_PREFETCH, bytes, x, lane, out, 1, kind);
}

/* All rows of a block. Tiles together where there are rows enough: the first two passes then fetch the tiles after
 * them, a half each, so that memory and multipliers are busy at once. Few rows take one tile after the other, as memory
 * lies. */
NS_INLINE void ns_quant_block(const ns_linear_plan *plan, const uint8_t *const *tile, int tiles, const ns_qgroup *x,
                              int rows, float (*out)[NS_TILE_FLOATS], const int kind)
{
    int lane = 0;
#if NS_TILES > 1
    const int bytes = ns_group_bytes(kind), half = (bytes / 2 + 63) / 64 * 64;
    const int passes = tiles == NS_TILES ? rows / NS_TILE_ROWS : 0;
    for (int pass = 0; pass < passes; pass++, lane += NS_TILE_ROWS) {
        const int64_t next = (tile[1] - tile[0] == plan->tile_bytes ? NS_TILES : 1) * plan->tile_bytes;
        const int64_t share = next + (int64_t)pass * plan->groups * half;
        if (passes == 1)
            ns_quant_pass(plan, tile, NS_TILES, next, bytes, x, lane, out, NS_TILE_ROWS, kind);
        else if (pass < 2)
            ns_quant_pass(plan, tile, NS_TILES, share, half, x, lane, out, NS_TILE_ROWS, kind);
        else
            ns_quant_pass(plan, tile, NS_TILES, 0, 0, x, lane, out, NS_TILE_ROWS, kind);
    }
#endif
    for (int t = 0; t < tiles; t++) ns_quant_rows(plan, tile[t], x, lane, rows, out + t, kind);
}

/* Out of line per kind: each is one copy of its loops. */
#define NS_QUANT_BLOCK(kind_)                                                                                         \
    static __attribute__((noinline)) void ns_block_##kind_(const ns_linear_plan *plan, const uint8_t *const *tile,    \
                                                           int tiles, const ns_qgroup *x, int rows,                   \
                                                           float (*out)[NS_TILE_FLOATS])                              \
    {                                                                                                                 \
        ns_quant_block(plan, tile, tiles, x, rows, out, kind_);                                                       \
    }
NS_QUANT_BLOCK(NS_Q4Z)
NS_QUANT_BLOCK(NS_Q4M)
NS_QUANT_BLOCK(NS_Q4MF)
NS_QUANT_BLOCK(NS_Q8Z)
NS_QUANT_BLOCK(NS_Q8M)
NS_QUANT_BLOCK(NS_Q8MF)
NS_QUANT_BLOCK(NS_Q8G)

/* Dense: inputs one by one (pair by pair in bf16), in ascending order. `x` points at the block's first row. */
NS_INLINE void ns_dense_tile(const ns_linear_rec *r, const uint8_t *tile, int64_t row, float *out, const int count,
                             const int kind)
{
    const int32_t cols = r->w.cols, pitch = cols + cols % 2;
    vf acc[4];
    for (int i = 0; i < count; i++) acc[i] = vf_set1(0.0f);
    if (kind == NS_BF16) {
        for (int32_t k = 0; k < pitch; k += 2) {
            vw w = vw_load(tile + (int64_t)k * 32);
            for (int i = 0; i < count; i++) {
                uint32_t pair;
                memcpy(&pair, r->halves + (row + i) * pitch + k, sizeof pair);
                acc[i] = vf_dot_bf16(acc[i], w, pair);
            }
        }
    } else {
        for (int32_t k = 0; k < cols; k++) {
            vf w = kind == NS_F32 ? vf_load((const float *)tile + (int64_t)k * 16)
                                  : vf_load_f16((const uint16_t *)tile + (int64_t)k * 16);
            for (int i = 0; i < count; i++) acc[i] = vf_fma(w, vf_set1(r->x[(row + i) * r->x_ld + k]), acc[i]);
        }
    }
    for (int i = 0; i < count; i++) vf_store(out + 16 * i, acc[i]);
}

#define NS_DENSE_BLOCK(kind_)                                                                                         \
    static __attribute__((noinline)) void ns_block_##kind_(const ns_linear_rec *r, const uint8_t *const *tile,        \
                                                           int tiles, int64_t row, int rows,                          \
                                                           float (*out)[NS_TILE_FLOATS])                              \
    {                                                                                                                 \
        for (int t = 0; t < tiles; t++) {                                                                             \
            int lane = 0;                                                                                             \
            for (; lane + 4 <= rows; lane += 4) ns_dense_tile(r, tile[t], row + lane, out[t] + 16 * lane, 4, kind_);  \
            for (; lane < rows; lane++) ns_dense_tile(r, tile[t], row + lane, out[t] + 16 * lane, 1, kind_);          \
        }                                                                                                             \
    }
NS_DENSE_BLOCK(NS_F32)
NS_DENSE_BLOCK(NS_F16)
NS_DENSE_BLOCK(NS_BF16)

/* The products of up to 16 rows from `row` (a multiple of 16) with `tiles` tiles, `apart` from each other:
 * out[tile][row][16]. */
NS_INLINE void ns_tile_products(const ns_linear_plan *plan, int32_t first, int32_t apart, int tiles, int64_t row,
                                int rows, float (*out)[NS_TILE_FLOATS])
{
    const ns_linear_rec *r = plan->r;
    const uint8_t *tile[NS_TILES_A_JOB];
    for (int t = 0; t < tiles; t++) tile[t] = (const uint8_t *)r->w.data + (first + t * apart) * plan->tile_bytes;
    const ns_qgroup *x = r->quants ? r->quants + row / NS_ROWS * plan->groups : NULL;
    switch ((ns_kind)r->w.kind) {
    case NS_F32: ns_block_NS_F32(r, tile, tiles, row, rows, out); break;
    case NS_F16: ns_block_NS_F16(r, tile, tiles, row, rows, out); break;
    case NS_BF16: ns_block_NS_BF16(r, tile, tiles, row, rows, out); break;
    case NS_Q4Z: ns_block_NS_Q4Z(plan, tile, tiles, x, rows, out); break;
    case NS_Q4M: ns_block_NS_Q4M(plan, tile, tiles, x, rows, out); break;
    case NS_Q4MF: ns_block_NS_Q4MF(plan, tile, tiles, x, rows, out); break;
    case NS_Q8Z: ns_block_NS_Q8Z(plan, tile, tiles, x, rows, out); break;
    case NS_Q8M: ns_block_NS_Q8M(plan, tile, tiles, x, rows, out); break;
    case NS_Q8MF: ns_block_NS_Q8MF(plan, tile, tiles, x, rows, out); break;
    case NS_Q8G: ns_block_NS_Q8G(plan, tile, tiles, x, rows, out); break;
    case NS_KIND_COUNT: break;
    }
}
