/* The activations of gated layers. */
#ifndef NS_GATE_H
#define NS_GATE_H

#include "ns_abi.h"
#include "vec.h"

/* silu(x) = x / (1 + e^-x); gelu(x) in its tanh form, x / (1 + e^-2y) with y = sqrt(2/pi)(x + 0.044715 x^3). */
NS_INLINE vf ns_gated(vf x, int32_t kind)
{
    vf y = x;
    if (kind == NS_GELU) {
        vf inner = vf_fma(vf_mul(vf_mul(x, x), x), vf_set1(0.044715f), x);
        y = vf_mul(inner, vf_set1(1.5957691216057308f));
    }
    vf e = vf_exp2(vf_mul(y, vf_set1(-1.4426950408889634f)));
    return vf_div(x, vf_add(vf_set1(1.0f), e));
}

#endif
