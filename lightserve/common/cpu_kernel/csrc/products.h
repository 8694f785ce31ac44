// Products of float32 rows. The lanes of a vector take turns: lane i sums the products of columns i, i + LANES, ...
// The sums have this order in every tile, so a result does not depend on the rows that are computed with it.
#pragma once

#include "simd.h"

namespace lightserve {
namespace {

constexpr int N = 4;             // columns of the result in a tile: rows of a weight, or keys
constexpr int64_t CACHE_LINE = 16;  // floats

template <int M>
using Sums = Lanes[M][N];

template <int M>
inline void clear(Sums<M>& sums) {
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        LS_UNROLL
        for (int n = 0; n < N; n++) sums[m][n] = no_lanes();
    }
}

template <int M>
inline void load_sums(const float* from, Sums<M>& sums) {
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        LS_UNROLL
        for (int n = 0; n < N; n++) sums[m][n] = load_lanes(from + (m * N + n) * LANES);
    }
}

template <int M>
inline void save_sums(float* to, const Sums<M>& sums) {
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        LS_UNROLL
        for (int n = 0; n < N; n++) store_lanes(to + (m * N + n) * LANES, sums[m][n]);
    }
}

// sums[m][n] += x[m] * w[n], lane by lane, from column i on: LANES of them, or `count`. W: float or Bf16.
template <int M, class W, class... Count>
inline void add_step(const float* const (&x)[M], const W* const (&w)[N], int64_t i, Sums<M>& sums, Count... count) {
    Lanes operands[N];
    LS_UNROLL
    for (int n = 0; n < N; n++) operands[n] = load_lanes(w[n] + i, count...);
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        Lanes row = load_lanes(x[m] + i, count...);
        LS_UNROLL
        for (int n = 0; n < N; n++) sums[m][n] = fma(operands[n], row, sums[m][n]);
    }
}

template <int M, class W>
inline void add_products(const float* const (&x)[M], const W* const (&w)[N], int64_t columns, Sums<M>& sums,
                         int64_t i = 0) {
    _Pragma("GCC unroll 2")
    for (; i + LANES <= columns; i += LANES) add_step<M>(x, w, i, sums);
    if (i < columns) add_step<M>(x, w, i, sums, columns - i);
}

// The same, and what is `ahead` of w[n] is read into the L2 cache.
template <int M, class W>
inline void add_products_and_prefetch(const float* const (&x)[M], const W* const (&w)[N], int64_t columns,
                                      int64_t ahead, Sums<M>& sums) {
    int64_t i = 0;
    for (; i + CACHE_LINE <= columns; i += CACHE_LINE) {
        LS_UNROLL
        for (int n = 0; n < N; n++) __builtin_prefetch(w[n] + ahead + i, 0, 2);
        LS_UNROLL
        for (int64_t step = 0; step < CACHE_LINE; step += LANES) add_step<M>(x, w, i + step, sums);
    }
    add_products<M>(x, w, columns, sums, i);
}

template <int M>
inline void store_row_sums(float* to, const Sums<M>& sums, int m) {
    store_sums(to, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

// Call fn.template run<M>(first) for rows [first, stop) in tiles of TILE_ROWS and less.
template <int M = TILE_ROWS, class Fn>
inline void in_tiles(int64_t first, int64_t stop, const Fn& fn) {
    for (; first + M <= stop; first += M) fn.template run<M>(first);
    if constexpr (M > 1) in_tiles<M - 1>(first, stop, fn);
}

}  // namespace
}  // namespace lightserve
