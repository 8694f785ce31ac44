// Tiles of AMX: their shapes, and what they need around them.
#pragma once

#include "simd.h"

#if LS_AMX

#include <algorithm>

namespace lightserve {
namespace {

constexpr int64_t TILE = 16;                 // rows of a tile, and of x
constexpr int64_t TILE_WORDS = TILE * TILE;  // of 32 bits: two numbers of x, or a sum

// Tiles 0 to 3 hold sums. The others are operands: 4 and 5 the left ones, 6 and 7 the right ones.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int left_bytes) {  // of a row: all numbers whose products are summed at once
        std::fill(row_bytes, row_bytes + 8, 64);
        std::fill(rows, rows + 8, TILE);
        row_bytes[4] = row_bytes[5] = left_bytes;
        rows[6] = rows[7] = left_bytes / 4;
    }
};

// Tiles of the calling thread, for as long as this lives.
template <int LEFT_BYTES>
struct Tiles {
    Tiles() {
        static const TileShapes shapes(LEFT_BYTES);
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};

inline void transpose(__m512i (&rows)[TILE]) {
    __m512i other[TILE];
    LS_UNROLL_16
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    LS_UNROLL_16
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
    LS_UNROLL_16
    for (int i = 0; i < 4; i++) {
        other[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        other[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        other[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        other[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    LS_UNROLL_16
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

}  // namespace
}  // namespace lightserve

#endif
