/* Linear layers. A job is one tile of outputs (two gate and two up tiles where it is gated) for ns_row_span() rows.
 *
 * Integer sums are exact, so only the order of a row's float operations matters: group by group, scale times sum, then
 * the minimum's share. It is the same for every number of rows, and for every instruction set with fused multiply-add.
 */
#include "quantise.h"
#include "weights.h"

enum { NS_PREFETCH = 2560 }; /* bytes ahead: what a core has under way at the memory's bandwidth and latency */

typedef struct {
    const ns_linear_rec *r;
    int64_t tile_bytes;
    int32_t groups;
} ns_linear_plan;

/* Fetches what a pass of `count` rows will need. A pass of few rows is as fast as the memory: there the core's own
 * prefetcher runs ahead, and lines fetched into the first-level cache would take the few misses it can have under
 * way. */
NS_INLINE void ns_fetch_ahead(const uint8_t *from, int bytes, const int count)
{
    if (count < NS_FAR_BELOW)
        for (int at = 0; at < bytes; at += 128) ns_prefetch_far(from + at);
    else
        for (int at = 0; at < bytes; at += 64) ns_prefetch(from + at);
}

/* What an unsigned weight's zero point takes away, before anything is added. */
NS_INLINE vi ns_dot_start(const ns_qgroup *x, int lane, int kind)
{
    if (kind == NS_Q4Z) return vi_set1(x->z8[lane]);
    if (kind == NS_Q8Z && NS_DOT8_BIASED) return vi_set1(x->z128[lane]);
    return vi_zero();
}

/* An AVX2 dot8 reads stored weights as signed, so an unsigned 8-bit kind adds 128 per weight back. */
NS_INLINE vi ns_dot_unsigned_start(const ns_qgroup *x, int lane)
{
    return NS_DOT8_BIASED ? vi_zero() : vi_set1(-x->z128[lane]);
}

/* acc[i] += the products of one group of 16 outputs with row `lane` + i, for `count` rows. */
NS_INLINE void ns_group_rows(vf *acc, vq w, vf d, vf m, const ns_qgroup *x, int lane, const int count, const int kind)
{
    const int8_t(*q)[NS_GROUP] = x->q + lane;
    vi sum[NS_SUM_ROWS];
    if (kind == NS_Q8G) {
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < count; i++) {
                const int32_t first = x->z128_first[lane + i], zero = half ? x->z128[lane + i] - first : first;
                sum[i] = NS_DOT8_BIASED ? vi_set1(zero) : vi_zero();
            }
            vi_dot8_rows(sum, w, 4 * half, 4 * half + 4, q, count);
            for (int i = 0; i < count; i++)
                acc[i] = vf_fma(vf_mul(half ? m : d, vf_set1(x->dx[lane + i])), vi_float(sum[i]), acc[i]);
        }
        return;
    }
    for (int i = 0; i < count; i++)
        sum[i] = kind == NS_Q8M || kind == NS_Q8MF ? ns_dot_unsigned_start(x, lane + i)
                                                   : ns_dot_start(x, lane + i, kind);
    if (ns_is_4bit(kind))
        vi_dot4_rows(sum, w, q, count);
    else
        vi_dot8_rows(sum, w, 0, 8, q, count);
    for (int i = 0; i < count; i++) {
        acc[i] = vf_fma(vf_mul(d, vf_set1(x->dx[lane + i])), vi_float(sum[i]), acc[i]);
        if (ns_has_min(kind)) acc[i] = vf_fma(m, vf_set1(x->sx[lane + i]), acc[i]);
    }
}

/* `count` rows from `lane` on of one block of 16 rows against one tile: out[row][16]. */
NS_INLINE void ns_quant_tile(const ns_linear_plan *plan, const uint8_t *tile, const ns_qgroup *x, int lane, float *out,
                             const int count, const int kind)
{
    vf acc[NS_TILE_ROWS];
    for (int i = 0; i < count; i++) acc[i] = vf_set1(0.0f);
    for (int32_t g = 0; g < plan->groups; g++) {
        const uint8_t *quants = tile + ns_quants_at(kind, g), *scales = tile + ns_scales_at(kind, g);
        vq w = ns_is_4bit(kind) ? vq_open4(quants) : vq_open8(quants);
        ns_fetch_ahead(quants + NS_PREFETCH, ns_quant_bytes(kind) + ns_scale_bytes(kind), count);
        vf d = ns_scales(scales, kind, 0), m = d;
        if (ns_has_min(kind) || kind == NS_Q8G) m = ns_scales(scales, kind, 1);
#pragma GCC unroll 16
        for (int i = 0; i < count; i += NS_SUM_ROWS)
            ns_group_rows(acc + i, w, d, m, x + g, lane + i, count < NS_SUM_ROWS ? count : NS_SUM_ROWS, kind);
    }
    for (int i = 0; i < count; i++) vf_store(out + 16 * i, acc[i]);
}

/* All rows of a block: the fewest passes over the tile. */
NS_INLINE void ns_quant_block(const ns_linear_plan *plan, const uint8_t *tile, const ns_qgroup *x, int rows, float *out,
                              const int kind)
{
    int lane = 0;
#if NS_TILE_ROWS >= 16
    if (rows == 16) {
        ns_quant_tile(plan, tile, x, 0, out, 16, kind);
        return;
    }
#endif
#if NS_TILE_ROWS >= 8
    for (; lane + 8 <= rows; lane += 8) ns_quant_tile(plan, tile, x, lane, out + 16 * lane, 8, kind);
#endif
#if NS_TILE_ROWS >= 4
    for (; lane + 4 <= rows; lane += 4) ns_quant_tile(plan, tile, x, lane, out + 16 * lane, 4, kind);
#endif
#if NS_TILE_ROWS >= 2
    for (; lane + 2 <= rows; lane += 2) ns_quant_tile(plan, tile, x, lane, out + 16 * lane, 2, kind);
#endif
    for (; lane < rows; lane++) ns_quant_tile(plan, tile, x, lane, out + 16 * lane, 1, kind);
}

/* Out of line per kind: each is one copy of its loops. */
#define NS_QUANT_BLOCK(kind_)                                                                                         \
    static __attribute__((noinline)) void ns_block_##kind_(const ns_linear_plan *plan, const uint8_t *tile,           \
                                                           const ns_qgroup *x, int rows, float *out)                  \
    {                                                                                                                 \
        ns_quant_block(plan, tile, x, rows, out, kind_);                                                              \
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
    static __attribute__((noinline)) void ns_block_##kind_(const ns_linear_rec *r, const uint8_t *tile, int64_t row,  \
                                                           int rows, float *out)                                      \
    {                                                                                                                 \
        int lane = 0;                                                                                                 \
        for (; lane + 4 <= rows; lane += 4) ns_dense_tile(r, tile, row + lane, out + 16 * lane, 4, kind_);            \
        for (; lane < rows; lane++) ns_dense_tile(r, tile, row + lane, out + 16 * lane, 1, kind_);                    \
    }
NS_DENSE_BLOCK(NS_F32)
NS_DENSE_BLOCK(NS_F16)
NS_DENSE_BLOCK(NS_BF16)

/* The products of up to 16 rows from `row` (a multiple of 16) with one tile: out[row][16]. */
NS_INLINE void ns_tile_product(const ns_linear_plan *plan, int32_t tile_index, int64_t row, int rows, float *out)
{
    const ns_linear_rec *r = plan->r;
    const uint8_t *tile = (const uint8_t *)r->w.data + tile_index * plan->tile_bytes;
    const ns_qgroup *x = r->quants ? r->quants + row / NS_ROWS * plan->groups : NULL;
    switch ((ns_kind)r->w.kind) {
    case NS_F32: ns_block_NS_F32(r, tile, row, rows, out); break;
    case NS_F16: ns_block_NS_F16(r, tile, row, rows, out); break;
    case NS_BF16: ns_block_NS_BF16(r, tile, row, rows, out); break;
    case NS_Q4Z: ns_block_NS_Q4Z(plan, tile, x, rows, out); break;
    case NS_Q4M: ns_block_NS_Q4M(plan, tile, x, rows, out); break;
    case NS_Q4MF: ns_block_NS_Q4MF(plan, tile, x, rows, out); break;
    case NS_Q8Z: ns_block_NS_Q8Z(plan, tile, x, rows, out); break;
    case NS_Q8M: ns_block_NS_Q8M(plan, tile, x, rows, out); break;
    case NS_Q8MF: ns_block_NS_Q8MF(plan, tile, x, rows, out); break;
    case NS_Q8G: ns_block_NS_Q8G(plan, tile, x, rows, out); break;
    case NS_KIND_COUNT: break;
    }
}
