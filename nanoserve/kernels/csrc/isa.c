/* The kernels by op, and the instruction set they were compiled for: every file gets the same flags. */
#include "kernels.h"

const ns_kernel ns_kernel_table[NS_OP_COUNT] = {
    [NS_OP_PLAN] = ns_run_plan,
    [NS_OP_EMBED] = ns_run_embed,
    [NS_OP_NORM] = ns_run_norm,
    [NS_OP_QUANT] = ns_run_quant,
    [NS_OP_LINEAR] = ns_run_linear,
    [NS_OP_GATE] = ns_run_gate,
    [NS_OP_ROPE] = ns_run_rope,
    [NS_OP_ATTENTION] = ns_run_attention,
    [NS_OP_GATHER] = ns_run_gather,
    [NS_OP_SAMPLE] = ns_run_sample,
    [NS_OP_REMEMBER] = ns_run_remember,
    [NS_OP_ADJUST] = ns_run_adjust,
    [NS_OP_LOGPROBS] = ns_run_logprobs,
    [NS_OP_APPEND] = ns_run_append,
    [NS_OP_COPY] = ns_run_copy,
};

#if defined(NS_ISA_AVX512_BF16)
static const char ns_isa[] = "avx512_bf16";
#elif defined(NS_ISA_AVX512)
static const char ns_isa[] = "avx512";
#elif defined(NS_ISA_AVX2)
static const char ns_isa[] = "avx2";
#else
static const char ns_isa[] = "generic";
#endif

int ns_isa_supported(void)
{
#if defined(NS_ISA_AVX512) || defined(NS_ISA_AVX2)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 0;
#endif
#if defined(NS_ISA_AVX512)
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512vnni")))
        return 0;
#endif
#if defined(NS_ISA_AVX512_BF16)
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
#endif
    return 1;
}

const char *ns_isa_name(void) { return ns_isa; }

/* Sizes that Python's mirror of ns_abi.h must agree with, in the order of native_lib.LAYOUT; -1 past the last. */
int64_t ns_layout(int32_t index)
{
    static const int64_t sizes[] = {
        sizeof(ns_record), sizeof(ns_plan_rec), sizeof(ns_embed_rec), sizeof(ns_norm_rec), sizeof(ns_quant_rec),
        sizeof(ns_linear_rec), sizeof(ns_gate_rec), sizeof(ns_rope_rec), sizeof(ns_attention_rec),
        sizeof(ns_gather_rec), sizeof(ns_sample_rec), sizeof(ns_remember_rec), sizeof(ns_adjust_rec),
        sizeof(ns_logprobs_rec), sizeof(ns_append_rec), sizeof(ns_copy_rec), sizeof(ns_matrix), sizeof(ns_qgroup), sizeof(ns_plan),
        sizeof(ns_row_group), NS_OP_COUNT, NS_KIND_COUNT, NS_PLAN_PARTIALS, NS_SPLIT, NS_MAX_TOP,
    };
    return index < 0 || index >= (int32_t)(sizeof sizes / sizeof *sizes) ? -1 : sizes[index];
}
