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

#if defined(NS_ISA_AVX512)
#include "quantise_avx512.h"

/* The most of `count` rows that are worth taking at once; how many those are. */
NS_INLINE int ns_quantise_some(ns_qgroup *out, int lane, int count, const float *x, int64_t stride)
{
    if (count >= 16) return ns_quantise_lanes(out, lane, x, stride, 16) ? 16 : 0;
    if (count >= 8) return ns_quantise_lanes(out, lane, x, stride, 8) ? 8 : 0;
    if (count >= 4) return ns_quantise_lanes(out, lane, x, stride, 4) ? 4 : 0;
    return 0;
}
#else
NS_INLINE int ns_quantise_some(ns_qgroup *out, int lane, int count, const float *x, int64_t stride)
{
    (void)out, (void)lane, (void)count, (void)x, (void)stride;
    return 0;
}
#endif

/* Group `group` of `count` rows from `row` on, `stride` floats apart. */
NS_INLINE void ns_quantise_group(ns_qgroup *quants, int32_t groups, int32_t group, int32_t row, int count,
                                 const float *x, int64_t stride)
{
    for (int i = 0; i < count;) {
        ns_qgroup *out = ns_group_at(quants, groups, row + i, group);
        const int lane = (row + i) % NS_ROWS, rest = NS_ROWS - lane < count - i ? NS_ROWS - lane : count - i;
        int taken = ns_quantise_some(out, lane, rest, x + i * stride, stride);
        if (!taken) ns_quantise(out, row + i, x + i * stride), taken = 1;
        i += taken;
    }
}

NS_INLINE void ns_quantise_rows(ns_qgroup *quants, int32_t row, int count, const float *x, int64_t stride, int32_t cols)
{
    for (int32_t g = 0; g < cols / NS_GROUP; g++)
        ns_quantise_group(quants, cols / NS_GROUP, g, row, count, x + g * NS_GROUP, stride);
}

#endif
