/* Where the parts of a packed weight tile lie (ns_abi.h, ns_kind), and one row of a matrix as floats. */
#ifndef NS_WEIGHTS_H
#define NS_WEIGHTS_H

#include "kernels.h"
#include "vec.h"

NS_INLINE int ns_is_dense(int kind) { return kind <= NS_BF16; }
NS_INLINE int ns_is_4bit(int kind) { return kind >= NS_Q4Z && kind <= NS_Q4MF; }
NS_INLINE int ns_has_min(int kind) { return kind == NS_Q4M || kind == NS_Q4MF || kind == NS_Q8M || kind == NS_Q8MF; }
NS_INLINE int ns_has_wide_scales(int kind) { return kind == NS_Q4MF || kind == NS_Q8MF || kind == NS_Q8G; }
NS_INLINE int ns_quant_bytes(int kind) { return ns_is_4bit(kind) ? 256 : 512; }

NS_INLINE int ns_scale_bytes(int kind)
{
    return NS_LANES * (ns_has_wide_scales(kind) ? 4 : 2) * (ns_has_min(kind) || kind == NS_Q8G ? 2 : 1);
}

NS_INLINE int ns_group_bytes(int kind) { return ns_quant_bytes(kind) + ns_scale_bytes(kind); }

NS_INLINE int64_t ns_tile_bytes(int kind, int32_t cols)
{
    if (kind == NS_F32) return (int64_t)cols * NS_LANES * 4;
    if (ns_is_dense(kind)) return (int64_t)(cols + (kind == NS_BF16 ? cols % 2 : 0)) * NS_LANES * 2;
    return (int64_t)((cols / NS_GROUP + 1) / 2) * 2 * ns_group_bytes(kind);
}

/* Where the quants, or the scales, of group `g` lie in a tile. */
NS_INLINE int64_t ns_quants_at(int kind, int32_t g)
{
    return (int64_t)g * ns_quant_bytes(kind) + (int64_t)(g / 2) * 2 * ns_scale_bytes(kind);
}

NS_INLINE int64_t ns_scales_at(int kind, int32_t g)
{
    return (int64_t)g * ns_scale_bytes(kind) + (int64_t)(g / 2 + 1) * 2 * ns_quant_bytes(kind);
}

/* The first (which = 0) or second 16 scales of a group. */
NS_INLINE vf ns_scales(const uint8_t *scales, int kind, int which)
{
    return ns_has_wide_scales(kind) ? vf_load((const float *)scales + 16 * which)
                                    : vf_load_f16((const uint16_t *)scales + 16 * which);
}

NS_INLINE void ns_dense_row(const ns_matrix *table, int64_t row, float *out)
{
    const int32_t cols = table->cols;
    const uint16_t *halves = (const uint16_t *)table->data + row * cols;
    if (table->kind == NS_F32) {
        memcpy(out, (const float *)table->data + row * cols, (size_t)cols * sizeof *out);
        return;
    }
    for (int32_t i = 0; i < cols; i += 16) {
        uint16_t lanes[16] = {0};
        int n = cols - i < 16 ? cols - i : 16;
        memcpy(lanes, halves + i, (size_t)n * sizeof *lanes);
        vf_store_n(out + i, table->kind == NS_BF16 ? vf_load_bf16(lanes) : vf_load_f16(lanes), n);
    }
}

/* One output row of a packed matrix: q * d + m, or (q - zero) * d. A plain row-major table where it is dense. */
NS_INLINE void ns_weight_row(const ns_matrix *table, int64_t row, float *out)
{
    const int kind = table->kind, lane = (int)(row % NS_LANES);
    if (ns_is_dense(kind)) {
        ns_dense_row(table, row, out);
        return;
    }
    const int32_t groups = table->cols / NS_GROUP;
    const uint8_t *tile = (const uint8_t *)table->data + row / NS_LANES * ns_tile_bytes(kind, table->cols);
    const float zero = ns_has_min(kind) ? 0.0f : kind == NS_Q4Z ? 8.0f : 128.0f;
    for (int32_t g = 0; g < groups; g++) {
        const uint8_t *quants = tile + ns_quants_at(kind, g), *scales = tile + ns_scales_at(kind, g);
        float first[16], second[16] = {0};
        vf_store(first, ns_scales(scales, kind, 0));
        if (ns_has_min(kind) || kind == NS_Q8G) vf_store(second, ns_scales(scales, kind, 1));
        const float minimum = ns_has_min(kind) ? second[lane] : 0.0f;
        for (int i = 0; i < NS_GROUP; i++) {
            int q;
            if (ns_is_4bit(kind))
                q = quants[i % 16 / 4 * 64 + lane * 4 + i % 4] >> (i < 16 ? 0 : 4) & 15;
            else
                q = quants[i / 4 * 64 + lane * 4 + i % 4];
            const float scale = kind == NS_Q8G && i >= 16 ? second[lane] : first[lane];
            out[g * NS_GROUP + i] = ((float)q - zero) * scale + minimum;
        }
    }
}

#endif
