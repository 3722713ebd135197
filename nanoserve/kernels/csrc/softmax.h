/* A row of logits as unnormalised probabilities. */
#ifndef NS_SOFTMAX_H
#define NS_SOFTMAX_H

#include "vec.h"

/* The first of the largest entries. */
NS_INLINE int32_t ns_argmax(const float *x, int32_t n)
{
    vf top = vf_set1(-INFINITY);
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) top = vf_max(vf_load(x + i), top);
    float best = vf_hmax(top);
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    for (i = 0; i + 16 <= n && !vf_any_ge(vf_load(x + i), best); i += 16) continue;
    for (; i < n; i++)
        if (x[i] == best) return i;
    return 0;
}

/* p = 2^((x - top) / temperature * log2(e)), 0 at the end of the vector; returns their sum. */
NS_INLINE double ns_soft_row(const float *x, int32_t n, float top, float temperature, float *p)
{
    const vf shift = vf_set1(top), scale = vf_set1(1.4426950408889634f / temperature);
    double sum = 0.0;
    for (int32_t i = 0; i < n; i += 512) {
        const int32_t stop = n - i < 512 ? n : i + 512;
        vf part = vf_set1(0.0f);
        for (int32_t j = i; j < stop; j += 16) {
            const int count = n - j < 16 ? n - j : 16;
            vf e = vf_exp2(vf_mul(vf_sub(vf_load_n(x + j, count), shift), scale));
            if (count < 16) e = vf_keep(e, 0, count, 0.0f);
            vf_store(p + j, e);
            part = vf_add(part, e);
        }
        sum += (double)vf_hadd(part);
    }
    return sum;
}

#endif
