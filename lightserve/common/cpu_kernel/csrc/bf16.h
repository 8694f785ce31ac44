// y = x W^T + bias for W in bfloat16. With AMX the inputs are rounded to bfloat16 too, and tiles sum the products in
// float32; without, W is widened to float32, which is exact.
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "kernels.h"
#include "linear.h"
#include "threads.h"

namespace lightserve {
namespace {

#if LS_AMX

constexpr int64_t TILE_COLUMNS = 32;        // numbers in bfloat16 of a row of a tile
constexpr int64_t L2_NUMBERS = 256 * 1024;  // of x at a time
constexpr int64_t FEW_ROWS = 16;            // of x, for which products wait for the weight, which is read ahead

// x in bfloat16 [block of 16 rows, tile of 32 columns, pair of columns, row]: the operand of a tile's product. Rows
// behind the last one are zeros.
struct TiledRows {
    std::vector<uint32_t> words;
    int64_t columns, tiles;

    void fill(Rows x, int64_t width) {
        columns = width;
        tiles = width / TILE_COLUMNS;
        int64_t blocks = (x.count + TILE - 1) / TILE;
        words.resize(blocks * tiles * TILE_WORDS);
        parallel_for(blocks, grain_of(blocks, 4 * TILE * width), [&](int64_t begin, int64_t end) {
            for (int64_t block = begin; block < end; block++) fill_block(x, block);
        });
    }

    const uint32_t* tile(int64_t block, int64_t number) const {
        return words.data() + (block * tiles + number) * TILE_WORDS;
    }

private:
    void fill_block(Rows x, int64_t block) {
        int64_t first = block * TILE, count = std::min(TILE, x.count - first);
        for (int64_t number = 0; number < tiles; number++) {
            __m512i rows[TILE];
            for (int64_t m = 0; m < TILE; m++) {
                const float* from = x.data + (first + std::min(m, count - 1)) * x.stride + number * TILE_COLUMNS;
                __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
                rows[m] = m < count ? (__m512i)both : _mm512_setzero_si512();
            }
            transpose(rows);
            uint32_t* to = words.data() + (block * tiles + number) * TILE_WORDS;
            for (int64_t m = 0; m < TILE; m++) _mm512_storeu_si512(to + m * TILE, rows[m]);
        }
    }
};

// Whole tiles of the weight's columns.
struct TileProduct {
    const Bf16* weight;
    int64_t rows;
    const TiledRows& x;
    int64_t count;  // rows of x
    const float* bias;
    float* out;

    void run() const {
        int64_t blocks = (rows + 2 * TILE - 1) / (2 * TILE);
        int64_t products = 2 * TILE * x.columns * (count + TILE) / TILE;  // as many as others compute in that time
        parallel_for(blocks, grain_of(blocks, products), [&](int64_t begin, int64_t end) {
            Tiles<64> tiles;
            int64_t at_once = std::max(L2_NUMBERS / x.columns / (2 * TILE), int64_t{1}) * 2;  // blocks of x
            int64_t x_blocks = (count + TILE - 1) / TILE;
            for (int64_t first = 0; first < x_blocks; first += at_once)
                for (int64_t block = begin; block < end; block++)
                    multiply(2 * TILE * block, first, std::min(first + at_once, x_blocks));
        });
    }

    // 32 rows of the weight, as two tiles above each other.
    struct Strip {
        const Bf16* data;
        int64_t stride;    // of a row, in bytes
        int64_t step;      // to the next columns, in numbers
        int64_t to_lower;  // tile
    };

    Strip strip_at(int64_t row, bool is_read_often) const {
        const Bf16* from = weight + row * x.columns;
        if (row + 2 * TILE <= rows && !is_read_often)
            return {from, x.columns * static_cast<int64_t>(sizeof(Bf16)), TILE_COLUMNS, TILE * x.columns};
        // Tile by tile, since rows that are a power of 2 apart push each other out of the caches; zeros at the end
        thread_local std::vector<Bf16> copy;
        copy.assign(2 * TILE * x.columns, Bf16{0});
        for (int64_t i = 0; i < std::min(2 * TILE, rows - row); i++)
            for (int64_t tile = 0; tile < x.tiles; tile++)
                std::copy_n(from + i * x.columns + tile * TILE_COLUMNS, TILE_COLUMNS,
                            copy.data() + (tile * 2 * TILE + i) * TILE_COLUMNS);
        return {copy.data(), TILE_COLUMNS * sizeof(Bf16), 2 * TILE * TILE_COLUMNS, TILE * TILE_COLUMNS};
    }

    // 32 rows of the weight, blocks [first, stop) of x.
    void multiply(int64_t row, int64_t first, int64_t stop) const {
        Strip from = strip_at(row, stop - first > 2);
        bool reads_ahead = count <= FEW_ROWS && row + 4 * TILE <= rows;
        for (; first + 2 <= stop; first += 2) {
            multiply_two(from, first);
            write(row, first, 0);
            write(row, first + 1, 1);
        }
        if (first < stop) {
            reads_ahead ? multiply_one<true>(from, first) : multiply_one<false>(from, first);
            write(row, first, 0);
        }
    }

    // Tiles 0 and 1 are the sums of a block of x, 2 and 3 of the next one.
    void multiply_two(Strip from, int64_t block) const {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < x.tiles; i++, from.data += from.step) {
            _tile_loadd(4, from.data, from.stride);
            _tile_loadd(6, x.tile(block, i), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, from.data + from.to_lower, from.stride);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(7, x.tile(block + 1, i), 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <bool READS_AHEAD>
    void multiply_one(Strip from, int64_t block) const {
        const Bf16* next = from.data + 2 * TILE * x.columns;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < x.tiles; i++, from.data += from.step) {
            if constexpr (READS_AHEAD) {
                for (int64_t line = 0; line < 2 * TILE; line++, next += TILE_COLUMNS) __builtin_prefetch(next, 0, 2);
            }
            _tile_loadd(6, x.tile(block, i), 64);
            _tile_loadd(4, from.data, from.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, from.data + from.to_lower, from.stride);
            _tile_dpbf16ps(1, 5, 6);
        }
    }

    // The sums of 32 rows of the weight and a block of x: in tiles 0 and 1, or 2 and 3.
    void write(int64_t row, int64_t block, int pair) const {
        alignas(64) float sums[2 * TILE_WORDS];
        if (pair == 0) {
            _tile_stored(0, sums, 64);
            _tile_stored(1, sums + TILE_WORDS, 64);
        } else {
            _tile_stored(2, sums, 64);
            _tile_stored(3, sums + TILE_WORDS, 64);
        }
        for (int half = 0; half < 2; half++, row += TILE) {
            if (row < rows) write_tile(sums + half * TILE_WORDS, row, block * TILE);
        }
    }

    void write_tile(const float* sums, int64_t row, int64_t first) const {
        __mmask16 mask = rows - row >= TILE ? 0xffff : (1 << (rows - row)) - 1;
        __m512 more = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, bias + row);
        int64_t wanted = std::min(TILE, count - first);
        float* to = out + first * rows + row;
        if (wanted == 1) {  // of a decode
            __m512i places = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
            return _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_i32gather_ps(places, sums, 4), more));
        }
        __m512i by_row[TILE];
        for (int64_t i = 0; i < TILE; i++) by_row[i] = _mm512_load_si512(sums + i * TILE);
        transpose(by_row);
        for (int64_t m = 0; m < wanted; m++, to += rows)
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_castsi512_ps(by_row[m]), more));
    }
};

#endif

void linear_bf16(const Bf16* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm* norm, const float* bias,
                 int32_t gated, float* out) {
#if LS_AMX
    if (columns % TILE_COLUMNS == 0) {
        thread_local TiledRows tiled_of_thread;
        TiledRows& tiled = tiled_of_thread;  // the helpers' loops see the caller's
        tiled.fill(normed_rows(x, norm, columns), columns);
        return with_activation(x.count, rows, gated, out, [&](float* to) {
            TileProduct{weight, rows, tiled, x.count, bias, to}.run();
        });
    }
#endif
    linear_of_floats(weight, rows, columns, x, norm, bias, gated, out);
}

}  // namespace
}  // namespace lightserve
