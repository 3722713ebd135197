/* Activations as int8 groups of 32. One definition for every kernel that ends in them. */
#ifndef NS_QUANTISE_H
#define NS_QUANTISE_H

#include "kernels.h"
#include "vec.h"

NS_INLINE ns_qgroup *ns_group_at(ns_qgroup *quants, int32_t groups, int32_t row, int32_t group)
{
    return quants + (int64_t)(row / NS_ROWS) * groups + group;
}

/* 32 values of one row. A group below 1e-30 is zero; a NaN or an infinity makes every product of the group NaN. */
NS_INLINE void ns_quantise(ns_qgroup *out, int32_t row, const float *x)
{
    float amax = ns_amax32(x), inverse = amax >= 1e-30f ? 127.0f / amax : 0.0f, scale = amax / 127.0f;
    int32_t lane = row % NS_ROWS, sums[2];
    ns_round32(x, inverse, out->q[lane], sums);
    out->dx[lane] = scale;
    out->sx[lane] = scale * (float)(sums[0] + sums[1]);
    out->z8[lane] = -8 * (sums[0] + sums[1]);
    out->z128[lane] = -128 * (sums[0] + sums[1]);
    out->z128_first[lane] = -128 * sums[0];
}

NS_INLINE void ns_quantise_row(ns_qgroup *quants, int32_t row, const float *x, int32_t cols)
{
    for (int32_t g = 0; g < cols / NS_GROUP; g++)
        ns_quantise(ns_group_at(quants, cols / NS_GROUP, row, g), row, x + g * NS_GROUP);
}

#endif
