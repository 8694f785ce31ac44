// Rotary positions, and the keys and values that are stored in the KV cache.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "linear.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

// Element i is paired with element i + half.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        F8 low = load(x + i), high = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, low * c - high * s);
        store(x + half + i, high * c + low * s);
    }
    for (; i < half; i++) {
        float low = x[i], high = x[half + i];
        x[i] = low * cos[i] - high * sin[i];
        x[half + i] = high * cos[i] + low * sin[i];
    }
}

void rotary_write_kv(Heads q, Heads kv, int64_t tokens, const float* cos, const float* sin, int64_t half,
                     const int32_t* slots, Cache cache) {
    int64_t heads = q.count + 2 * cache.kv_heads;
    parallel_for(tokens, grain_of(tokens, 4 * heads * cache.dim), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float *c = cos + t * half, *s = sin + t * half;
            float* own = kv.data + t * kv.stride;
            for (int64_t h = 0; h < q.count; h++) rotate(q.data + t * q.stride + h * cache.dim, c, s, half);
            for (int64_t h = 0; h < cache.kv_heads; h++) rotate(own + h * cache.dim, c, s, half);
            float* to = cache.data + slots[t] * cache.stride;
            std::copy(own, own + 2 * cache.kv_heads * cache.dim, to);
        }
    });
}

}  // namespace
}  // namespace lightserve
