// A loop over chunks, shared with helper threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lightserve {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Number of threads of parallel loops, the calling one included.
void set_threads(int count);
int num_threads();

// Call fn on parts of [0, count) of about `grain`, on the calling thread and on helpers that are free.
void parallel_ranges(int64_t count, int64_t grain, RangeFn fn, void* context);

template <class Fn>
void parallel_for(int64_t count, int64_t grain, Fn fn) {
    parallel_ranges(
        count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Fn*>(context))(begin, end); }, &fn);
}

constexpr int64_t GRAIN = 32 * 1024;  // products of a chunk, at least: 1 to 3 us
constexpr int64_t CHUNKS = 6;         // for each thread, so that the last ones end together

inline int64_t grain_of(int64_t count, int64_t products) {  // `products` of one of `count` units
    int64_t least = std::max<int64_t>(GRAIN / std::max<int64_t>(products, 1), 1);
    return std::max(least, count / (num_threads() * CHUNKS));
}

}  // namespace lightserve
