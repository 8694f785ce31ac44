// Rotary positions, the KV cache, and attention of one new token for each request.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

constexpr int64_t SPLIT = 256;  // keys that a chunk attends to; more are merged afterwards

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

// The queries of a KV head over some keys: the largest score, the sum of the weights, and the weighted values.
struct Partial {
    float* most;   // [queries]
    float* total;  // [queries]
    float* out;    // [queries, dim]
};

inline float dot(const float* a, const float* b, int64_t dim) {
    F8 even = all(0), odd = all(0);
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        even = fma(load(a + d), load(b + d), even);
        odd = fma(load(a + d + 8), load(b + d + 8), odd);
    }
    if (d < dim) even = fma(load(a + d), load(b + d), even);
    return sum(even + odd);
}

// e^(score - largest score) in place, `count` scores and zeros up to `width`.
inline void softmax_terms(float* scores, int64_t count, int64_t width, float& largest, float& total) {
    F8 most = all(-INFINITY), sums = all(0);
    for (int64_t i = count; i < width; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < width; i += 8) most = max(most, load(scores + i));
    largest = max_of(most);
    for (int64_t i = 0; i < width; i += 8) store(scores + i, exp(load(scores + i) - all(largest)));
    for (int64_t i = count; i < width; i++) scores[i] = 0;
    for (int64_t i = 0; i < width; i += 8) sums = sums + load(scores + i);
    total = sum(sums);
}

// N queries: their weights [N, width] times the values, 8 columns at a time.
template <int N>
inline void weigh(const float* weights, int64_t width, const float* values, int64_t stride, const int32_t* slots,
                  int64_t count, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += 8) {
        F8 acc[N];
        LS_UNROLL
        for (int h = 0; h < N; h++) acc[h] = all(0);
        for (int64_t i = 0; i < count; i++) {
            F8 value = load(values + slots[i] * stride + d);
            LS_UNROLL
            for (int h = 0; h < N; h++) acc[h] = fma(value, weights[h * width + i], acc[h]);
        }
        LS_UNROLL
        for (int h = 0; h < N; h++) store(out + h * dim + d, acc[h]);
    }
}

inline void attend(const float* q, int64_t queries, const Cache& cache, int64_t kv_head, const int32_t* slots,
                   int64_t count, float scale, Partial to) {
    thread_local std::vector<float> scores_of_thread;
    int64_t dim = cache.dim, width = (count + 7) / 8 * 8;
    scores_of_thread.resize(queries * width);
    float* scores = scores_of_thread.data();
    const float* keys = cache.data + kv_head * dim;
    for (int64_t i = 0; i < count; i++) {
        const float* key = keys + slots[i] * cache.stride;
        for (int64_t h = 0; h < queries; h++) scores[h * width + i] = dot(q + h * dim, key, dim) * scale;
    }
    for (int64_t h = 0; h < queries; h++) softmax_terms(scores + h * width, count, width, to.most[h], to.total[h]);
    const float* values = keys + cache.kv_heads * dim;
    int64_t h = 0;
    for (; h + 4 <= queries; h += 4)
        weigh<4>(scores + h * width, width, values, cache.stride, slots, count, dim, to.out + h * dim);
    for (; h + 3 <= queries; h += 3)
        weigh<3>(scores + h * width, width, values, cache.stride, slots, count, dim, to.out + h * dim);
    for (; h < queries; h++)
        weigh<1>(scores + h * width, width, values, cache.stride, slots, count, dim, to.out + h * dim);
}

inline void merge(const Partial* parts, int64_t count, int64_t queries, int64_t dim, float* out) {
    for (int64_t h = 0; h < queries; h++) {
        float most = -INFINITY, total = 0;
        for (int64_t i = 0; i < count; i++) most = std::max(most, parts[i].most[h]);
        std::fill(out + h * dim, out + (h + 1) * dim, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            float weight = std::exp(parts[i].most[h] - most);
            total += weight * parts[i].total[h];
            for (int64_t d = 0; d < dim; d++) out[h * dim + d] += weight * parts[i].out[h * dim + d];
        }
        for (int64_t d = 0; d < dim; d++) out[h * dim + d] /= total;
    }
}

void token_attention(Heads q, Cache cache, const DecodeBatch& batch, int64_t window, float scale, float* out) {
    struct Item {
        int64_t request, kv_head, first, count;
    };
    int64_t queries = q.count / cache.kv_heads, dim = cache.dim;
    std::vector<Item> items;
    for (int64_t b = 0; b < batch.count; b++) {
        int64_t length = batch.b_seq_len[b];
        int64_t begin = window > 0 ? std::max<int64_t>(length - window, 0) : 0;
        for (int64_t kv_head = 0; kv_head < cache.kv_heads; kv_head++)
            for (int64_t first = begin; first < length; first += SPLIT)
                items.push_back({b, kv_head, first, std::min(SPLIT, length - first)});
    }
    int64_t size = queries * (dim + 2);
    std::vector<float> memory(items.size() * size);
    std::vector<Partial> parts(items.size());
    for (size_t i = 0; i < items.size(); i++) {
        float* own = memory.data() + i * size;
        parts[i] = {own, own + queries, own + 2 * queries};
    }
    int64_t count = static_cast<int64_t>(items.size());
    int64_t products = count == 0 ? 0 : 2 * items[0].count * queries * dim;
    parallel_for(count, std::max<int64_t>(1, GRAIN / 4 / std::max<int64_t>(products, 1)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const Item& item = items[i];
            const float* own = q.data + batch.b_row[item.request] * q.stride + item.kv_head * queries * dim;
            const int32_t* slots = batch.req_to_token + batch.b_req_idx[item.request] * batch.stride + item.first;
            attend(own, queries, cache, item.kv_head, slots, item.count, scale, parts[i]);
        }
    });
    for (int64_t i = 0; i < count;) {
        int64_t end = i + 1;
        while (end < count && items[end].request == items[i].request && items[end].kv_head == items[i].kv_head) end++;
        int64_t row = batch.b_row[items[i].request];
        merge(&parts[i], end - i, queries, dim, out + (row * q.count + items[i].kv_head * queries) * dim);
        i = end;
    }
}

}  // namespace
}  // namespace lightserve
