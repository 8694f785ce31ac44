// Activations of rows, and of rows of gate and up.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

struct Silu {
    static F8 of(F8 x) { return x / (all(1) + exp(all(0) - x)); }
};

struct Gelu {
    static F8 of(F8 x) { return all(0.5f) * x * (all(1) + erf(x * all(0.70710678f))); }
};

struct GeluTanh {
    static F8 of(F8 x) {
        F8 inner = all(0.79788456f) * fma(all(0.044715f) * x * x, x, x);
        return x / (all(1) + exp(all(-2) * inner));  // x * sigmoid(2 * inner): no difference of close numbers
    }
};

template <class Activation>
inline F8 activated(const float* x, const float* up) {
    F8 gate = Activation::of(load(x));
    return up == nullptr ? gate : gate * load(up);
}

// A row [columns], or gate and up [2 * columns].
template <class Activation>
inline void activate_row(const float* x, int64_t columns, bool gated, float* out) {
    const float* up = gated ? x + columns : nullptr;
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8) store(out + i, activated<Activation>(x + i, gated ? up + i : nullptr));
    if (i == columns) return;
    float last[8] = {}, last_up[8] = {}, results[8];  // the last columns by the same formula
    std::copy(x + i, x + columns, last);
    if (gated) std::copy(up + i, up + columns, last_up);
    store(results, activated<Activation>(last, gated ? last_up : nullptr));
    std::copy(results, results + columns - i, out + i);
}

template <class Activation>
inline void activate_rows(Rows x, int64_t columns, bool gated, float* out) {
    parallel_for(x.count, grain_of(x.count, 8 * columns), [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++)
            activate_row<Activation>(x.data + m * x.stride, columns, gated, out + m * columns);
    });
}

void activate(Rows x, int64_t columns, int32_t activation, int32_t gated, float* out) {
    if (activation == SILU) activate_rows<Silu>(x, columns, gated, out);
    if (activation == GELU) activate_rows<Gelu>(x, columns, gated, out);
    if (activation == GELU_TANH) activate_rows<GeluTanh>(x, columns, gated, out);
}

}  // namespace
}  // namespace lightserve
