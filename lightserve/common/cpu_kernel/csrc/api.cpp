// The C functions of the library. They choose the variant for this CPU once.

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(LS_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>
#include <utility>

#include "kernels.h"
#include "threads.h"

namespace lightserve {
extern const Kernels plain;
#if defined(LS_HAS_NEON_DOT)
extern const Kernels neon_dot;
#endif
#if defined(LS_HAS_AVX2)
extern const Kernels avx2;
#endif
#if defined(LS_HAS_AVX512_VNNI)
extern const Kernels avx512_vnni;
#endif

#if defined(LS_HAS_AMX)
extern const Kernels amx;
#endif

namespace {

#if defined(LS_HAS_AMX)

// Whether the CPU has tiles and AVX512-BF16, and the system lets this process use them.
bool may_use_amx() {
    constexpr unsigned TILES_OF_BF16 = 1u << 22 | 1u << 24 | 1u << 25, AVX512_BF16 = 1u << 5;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512vl")) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES_OF_BF16) != TILES_OF_BF16) return false;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & AVX512_BF16) == 0) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

#endif

struct Variant {
    const char* name;
    const Kernels* kernels;
};

// The variants that this CPU can run, the best one first.
struct Variants {
    Variant all[5];
    int count = 0;

    Variants() {
#if defined(LS_HAS_NEON_DOT) && defined(__linux__)
        if (getauxval(AT_HWCAP) & (1 << 20)) add("neon_dot", &neon_dot);  // HWCAP_ASIMDDP
#elif defined(LS_HAS_NEON_DOT)
        add("neon_dot", &neon_dot);  // every ARM Mac has it
#endif
#if defined(LS_HAS_AMX)
        if (may_use_amx()) add("amx", &amx);
#endif
#if defined(LS_HAS_AVX512_VNNI)
        if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")) add("avx512_vnni", &avx512_vnni);
#endif
#if defined(LS_HAS_AVX2)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
            add("avx2", &avx2);
#endif
        add("plain", &plain);
    }

    void add(const char* name, const Kernels* kernels) { all[count++] = {name, kernels}; }
};

const Variants variants;
Variant active = variants.all[0];

}  // namespace
}  // namespace lightserve

using namespace lightserve;

#define LS_EXPORT __attribute__((visibility("default")))

extern "C" {

LS_EXPORT const char* ls_variant() { return active.name; }

LS_EXPORT int ls_num_variants() { return variants.count; }

// For tests: 0 is the best one, and the last one needs no special instructions.
LS_EXPORT void ls_use_variant(int number) { active = variants.all[number]; }

LS_EXPORT void ls_set_threads(int count) { set_threads(count); }

LS_EXPORT void ls_linear_packed(const PackedWeight* weight, float* x, int64_t count, int64_t stride, const float* bias,
                                float* out) {
    active.kernels->linear_packed(weight, {x, count, stride}, nullptr, bias, 0, out);
}

// The linear of the norm of residual + x, which becomes the residual; `gated`: its rows are gate and up.
LS_EXPORT void ls_add_norm_linear_packed(const PackedWeight* weight, float* x, int64_t count, int64_t stride,
                                         const float* bias, float* out, float* residual, const float* norm, float eps,
                                         int32_t gated) {
    RmsNorm rms_norm{norm, residual, eps, weight->columns};
    active.kernels->linear_packed(weight, {x, count, stride}, &rms_norm, bias, gated, out);
}

LS_EXPORT void ls_linear_float(const float* weight, int64_t rows, int64_t columns, float* x, int64_t count,
                               int64_t stride, const float* bias, float* out) {
    active.kernels->linear_float(weight, rows, columns, {x, count, stride}, nullptr, bias, 0, out);
}

LS_EXPORT void ls_add_norm_linear_float(const float* weight, int64_t rows, int64_t columns, float* x, int64_t count,
                                        int64_t stride, const float* bias, float* out, float* residual,
                                        const float* norm, float eps, int32_t gated) {
    RmsNorm rms_norm{norm, residual, eps, columns};
    active.kernels->linear_float(weight, rows, columns, {x, count, stride}, &rms_norm, bias, gated, out);
}

LS_EXPORT void ls_linear_bf16(const Bf16* weight, int64_t rows, int64_t columns, float* x, int64_t count,
                              int64_t stride, const float* bias, float* out) {
    active.kernels->linear_bf16(weight, rows, columns, {x, count, stride}, nullptr, bias, 0, out);
}

LS_EXPORT void ls_add_norm_linear_bf16(const Bf16* weight, int64_t rows, int64_t columns, float* x, int64_t count,
                                       int64_t stride, const float* bias, float* out, float* residual,
                                       const float* norm, float eps, int32_t gated) {
    RmsNorm rms_norm{norm, residual, eps, columns};
    active.kernels->linear_bf16(weight, rows, columns, {x, count, stride}, &rms_norm, bias, gated, out);
}

LS_EXPORT void ls_rms_norm(float* x, int64_t count, int64_t stride, int64_t columns, const float* weight, float eps,
                           float* residual, float* out) {
    RmsNorm rms_norm{weight, residual, eps, columns};
    active.kernels->rms_norm({x, count, stride}, &rms_norm, out);
}

LS_EXPORT void ls_activate(float* x, int64_t count, int64_t stride, int64_t columns, int32_t activation,
                           int32_t gated, float* out) {
    active.kernels->activate({x, count, stride}, columns, activation, gated, out);
}

LS_EXPORT void ls_rotary_write_kv(float* q, int64_t q_stride, int64_t q_heads, float* kv, int64_t kv_stride,
                                  int64_t tokens, const float* cos, const float* sin, int64_t half,
                                  const int32_t* slots, float* cache, int64_t cache_stride, int64_t kv_heads,
                                  int64_t dim) {
    active.kernels->rotary_write_kv({q, q_stride, q_heads}, {kv, kv_stride, 2 * kv_heads}, tokens, cos, sin, half,
                                    slots, {cache, cache_stride, kv_heads, dim});
}

LS_EXPORT void ls_attention(float* q, int64_t q_stride, int64_t q_heads, float* cache, int64_t cache_stride,
                            int64_t kv_heads, int64_t dim, const AttentionBatch* batch, float scale, float softcap,
                            int64_t window, int32_t causal, const float* alibi_slopes, const float* sinks,
                            float* out) {
    AttentionOptions options{scale, softcap, window, causal, alibi_slopes, sinks};
    active.kernels->attention({q, q_stride, q_heads}, {cache, cache_stride, kv_heads, dim}, *batch, options, out);
}

}  // extern "C"

// Calls that Python recorded. Each is a row of 64-bit words: the address of its `Call`, how many arguments it has, and
// these; a float is in the lower half of its word.
namespace {

using Call = void (*)(const uint64_t* arguments);

template <class T>
T from_word(uint64_t word) {
    static_assert(sizeof(T) <= sizeof(word));
    T value;
    std::memcpy(&value, &word, sizeof(T));  // of a little-endian CPU
    return value;
}

template <class... T, size_t... I>
void call_with(void (*function)(T...), const uint64_t* arguments, std::index_sequence<I...>) {
    function(from_word<T>(arguments[I])...);
}

template <class... T>
void call_with_words(void (*function)(T...), const uint64_t* arguments) {
    call_with(function, arguments, std::index_sequence_for<T...>{});
}

template <auto FUNCTION>
void call(const uint64_t* arguments) {
    call_with_words(FUNCTION, arguments);
}

struct NamedCall {
    const char* name;
    Call call;
};

#define LS_NAMED(FUNCTION) {#FUNCTION, call<FUNCTION>}
const NamedCall CALLS[] = {
    LS_NAMED(ls_linear_packed), LS_NAMED(ls_add_norm_linear_packed), LS_NAMED(ls_linear_float),
    LS_NAMED(ls_add_norm_linear_float), LS_NAMED(ls_linear_bf16), LS_NAMED(ls_add_norm_linear_bf16),
    LS_NAMED(ls_rms_norm), LS_NAMED(ls_activate), LS_NAMED(ls_rotary_write_kv), LS_NAMED(ls_attention),
};
#undef LS_NAMED

}  // namespace

extern "C" {

// What a row begins with; 0: calls of this function cannot be recorded.
LS_EXPORT uint64_t ls_call_of(const char* name) {
    for (const NamedCall& named : CALLS) {
        if (std::strcmp(named.name, name) == 0) return reinterpret_cast<uint64_t>(named.call);
    }
    return 0;
}

LS_EXPORT void ls_repeat(const uint64_t* words, int64_t count) {
    for (const uint64_t* end = words + count; words < end; words += 2 + words[1]) {
        reinterpret_cast<Call>(words[0])(words + 2);
    }
}

}  // extern "C"
