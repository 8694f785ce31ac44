// y = x W^T + bias: W as packed codes, whose products are summed in integers, or in float32.
#pragma once

#include <algorithm>
#include <vector>

#include "activation.h"
#include "amx.h"
#include "kernels.h"
#include "products.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

constexpr int64_t GROUP = 32;        // numbers of x with a scale of their own
constexpr int64_t BLOCK = 8;         // rows of a packed weight that are computed together
constexpr int64_t X_ROWS = 256;      // of x at a time, so that they stay in the L2 cache
constexpr int64_t PANEL = TILE_ROWS == 6 ? 12 : 16;  // rows of x at a time in float32: whole tiles
constexpr int64_t L1_FLOATS = (TILE_ROWS == 6 ? 8 : 10) * 1024;  // of these rows: more columns are multiplied in parts
constexpr int64_t L2_FLOATS = 64 * 1024;  // of the weight at a time
constexpr int64_t MAX_AHEAD = 8 * 1024;   // floats that are read ahead; 4 rows of 8,960 are too many

// x in codes, with a scale for each group of 32 numbers: 8 bits, or 15 bits in two parts of which the first counts 128
struct QuantizedRows {
    std::vector<int8_t> codes;  // [row, part, column]
    std::vector<float> scales;
    std::vector<float> sums, half_sums;  // after rounding, of a group and of its halves
    int64_t columns, groups, parts;

    void resize(int64_t count, int64_t width, int64_t num_parts) {
        columns = width;
        groups = width / GROUP;
        parts = num_parts;
        codes.resize(count * parts * columns);
        scales.resize(count * groups);
        sums.resize(count * groups);
        half_sums.resize(2 * count * groups);
    }

    void quantize(int64_t row, const float* x) {
        float largest_code = parts == 1 ? 127.0f : 127.0f * 128;
        for (int64_t g = 0; g < groups; g++, x += GROUP) {
            F8 most_of_four = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
            float most = max_of(most_of_four), scale = most / largest_code;
            F8 inverse = all(most > 0 ? largest_code / most : 0.0f);
            int32_t totals[4];
            for (int i = 0; i < 4; i++)
                totals[i] = write(row, g * GROUP + 8 * i, round_to_int(load(x + 8 * i) * inverse));
            int64_t at = row * groups + g;
            scales[at] = scale;
            half_sums[2 * at] = scale * static_cast<float>(totals[0] + totals[1]);
            half_sums[2 * at + 1] = scale * static_cast<float>(totals[2] + totals[3]);
            sums[at] = scale * static_cast<float>(totals[0] + totals[1] + totals[2] + totals[3]);
        }
    }

    int32_t write(int64_t row, int64_t column, I8 numbers) {  // returns their sum
        int8_t* to = codes.data() + row * parts * columns + column;
        if (parts == 1) return store_bytes(to, numbers);
        I8 high = rounded_128th(numbers);
        return 128 * store_bytes(to, high) + store_bytes(to + columns, minus_128_times(numbers, high));
    }
};

// The sum of x and the residual, and its norm, for one row.
inline void norm_row(float* x, const RmsNorm& norm, int64_t row, float* out) {
    int64_t columns = norm.columns, i = 0;
    float* base = x;
    if (norm.residual != nullptr) {
        base = norm.residual + row * columns;
        for (; i + 8 <= columns; i += 8) store(base + i, load(base + i) + load(x + i));
        for (; i < columns; i++) base[i] += x[i];
    }
    F8 squares = all(0);
    for (i = 0; i + 8 <= columns; i += 8) squares = fma(load(base + i), load(base + i), squares);
    float total = sum(squares);
    for (; i < columns; i++) total += base[i] * base[i];
    float scale = 1.0f / std::sqrt(total / static_cast<float>(columns) + norm.eps);
    for (i = 0; i + 8 <= columns; i += 8) store(out + i, load(base + i) * all(scale) * load(norm.weight + i));
    for (; i < columns; i++) out[i] = base[i] * scale * norm.weight[i];
}

struct Output {
    float* data;        // [count, rows]
    const float* bias;  // [rows] or nullptr
    int64_t rows;
};

template <bool INT4, int SCALED, class Scale, bool HAS_MIN, int PARTS>
struct Format {
    using Wide = Format<false, SCALED, float, true, PARTS>;
    static constexpr int64_t SCALES = GROUP / SCALED;  // of a row and group
    static constexpr int64_t CODE_BYTES = INT4 ? 128 : 256;
    static constexpr int64_t BYTES = BLOCK * sizeof(Scale) * SCALES * (1 + HAS_MIN) + CODE_BYTES;

    // The minima of 8 rows. Codes of 4 bits without minima stand for -8 to 7.
    static F8 minima(const Scale* scales, int part, F8 scale) {
        if (HAS_MIN) return load(scales + (SCALES + part) * BLOCK);
        return scale * all(-8);
    }

    // 8 rows of the weight times M rows of x. The sums have the same order for every M.
    template <int M>
    static void tile(const uint8_t* block, const QuantizedRows& x, int64_t first, F8 (&out)[M]) {
        F8 totals[M];
        const int8_t* numbers[PARTS * M];  // the first parts of all rows, then the others
        LS_UNROLL
        for (int m = 0; m < M; m++) totals[m] = all(0);
        const int8_t* first_row = x.codes.data() + first * PARTS * x.columns;
        LS_UNROLL
        for (int i = 0; i < PARTS * M; i++) numbers[i] = first_row + (i % M * PARTS + i / M) * x.columns;
        const int64_t groups = x.groups;
        const float* x_scales = x.scales.data() + first * groups;
        const float* x_sums = (SCALES == 2 ? x.half_sums.data() : x.sums.data()) + first * groups * SCALES;
        for (int64_t g = 0; g < groups; g++, block += BYTES) {
            const Scale* scales = reinterpret_cast<const Scale*>(block);
            const uint8_t* codes = block + BYTES - CODE_BYTES;
            if constexpr (M == 1 && PREFETCHED > 0) {
                for (int64_t at = 0; at < BYTES; at += 64) __builtin_prefetch(block + PREFETCHED + at);
            }
            LS_UNROLL
            for (int part = 0; part < SCALES; part++) {
                I8 acc[PARTS * M];
                const uint8_t* own = codes + part * CODE_BYTES / SCALES;
                if constexpr (INT4) {
                    dot_int4<PARTS * M, SCALED / 4>(acc, own, numbers, part * SCALED);
                } else {
                    dot_int8<PARTS * M, SCALED / 4>(acc, reinterpret_cast<const int8_t*>(own), numbers, part * SCALED);
                }
                F8 scale = load(scales + part * BLOCK);
                LS_UNROLL
                for (int m = 0; m < M; m++) {
                    F8 product = sum_to_float(acc[m]);
                    if constexpr (PARTS == 2) product = fma(product, 128.0f, sum_to_float(acc[M + m]));
                    totals[m] = fma(scale_by(product, x_scales[m * groups + g]), scale, totals[m]);
                }
                if constexpr (INT4 || HAS_MIN) {
                    F8 least = minima(scales, part, scale);
                    LS_UNROLL
                    for (int m = 0; m < M; m++) {
                        totals[m] = fma(least, x_sums[(m * groups + g) * SCALES + part], totals[m]);
                    }
                }
            }
            LS_UNROLL
            for (int i = 0; i < PARTS * M; i++) numbers[i] += GROUP;
        }
        LS_UNROLL
        for (int m = 0; m < M; m++) out[m] = totals[m];
    }

    // 8 rows of 4 bits as 8 bits with scales in float32. The sums stay the same.
    static void widen_block(const uint8_t* block, int64_t groups, uint8_t* to) {
        for (int64_t g = 0; g < groups; g++, block += BYTES, to += Wide::BYTES) {
            const Scale* scales = reinterpret_cast<const Scale*>(block);
            float* floats = reinterpret_cast<float*>(to);
            for (int part = 0; part < SCALES; part++) {
                F8 scale = load(scales + part * BLOCK);
                store(floats + part * BLOCK, scale);
                store(floats + (SCALES + part) * BLOCK, minima(scales, part, scale));
            }
            widen(block + BYTES - CODE_BYTES, reinterpret_cast<int8_t*>(floats + 2 * SCALES * BLOCK));
        }
    }

    static void multiply(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
#if LS_AMX
        if (count >= TILE) return multiply_tiles(weight, x, count, out);
#endif
        int64_t blocks = (weight.rows + BLOCK - 1) / BLOCK;
        parallel_for(blocks, grain_of(blocks, BLOCK * x.columns * count), [&](int64_t begin, int64_t end) {
            for (int64_t some = 0; some < count; some += X_ROWS) {
                int64_t stop = std::min(some + X_ROWS, count);
                for (int64_t block = begin; block < end; block++) {
                    const uint8_t* data = weight.data + block * x.groups * BYTES;
                    if constexpr (INT4) {
                        if (stop - some >= WIDEN_ROWS) {
                            thread_local std::vector<uint8_t> wide;
                            wide.resize(x.groups * Wide::BYTES);
                            widen_block(data, x.groups, wide.data());
                            Wide::write_rows(wide.data(), block * BLOCK, x, some, stop, out);
                            continue;
                        }
                    }
                    write_rows(data, block * BLOCK, x, some, stop, out);
                }
            }
        });
    }

#if LS_AMX

    // Two blocks of the weight: 16 rows as the right operands of tiles, with their scales and minima.
    struct Operands {
        std::vector<uint8_t> codes;       // [group, quad of columns, row, 4]
        std::vector<float> scales, least;  // [group, part, row]

        void fill(const PackedWeight& weight, int64_t groups, int64_t pair) {
            codes.assign(groups * 2 * BLOCK * GROUP, 0);
            scales.assign(groups * SCALES * TILE, 0);
            least.assign(groups * SCALES * TILE, 0);
            for (int64_t half = 0; half < 2 && (2 * pair + half) * BLOCK < weight.rows; half++) {
                const uint8_t* block = weight.data + (2 * pair + half) * groups * BYTES;
                for (int64_t g = 0; g < groups; g++, block += BYTES) fill_group(block, g, half);
            }
        }

        void fill_group(const uint8_t* block, int64_t g, int64_t half) {
            const Scale* from = reinterpret_cast<const Scale*>(block);
            for (int part = 0; part < SCALES; part++) {
                F8 scale = load(from + part * BLOCK);
                int64_t at = (g * SCALES + part) * TILE + half * BLOCK;
                store(scales.data() + at, scale);
                if constexpr (INT4 || HAS_MIN) store(least.data() + at, minima(from, part, scale));
            }
            const uint8_t* own = block + BYTES - CODE_BYTES;
            uint8_t* to = codes.data() + g * 2 * BLOCK * GROUP + half * 4 * BLOCK;
            for (int q = 0; q < GROUP / 4; q++, to += 4 * TILE) {
                __m256i four_of_eight = INT4 ? unpacked(own + 16 * q)
                                             : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(own + 32 * q));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), four_of_eight);
            }
        }
    };

    static void multiply_tiles(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
        int64_t pairs = (weight.rows + TILE - 1) / TILE, whole = count / TILE * TILE;
        parallel_for(pairs, grain_of(pairs, TILE * x.columns * count / 4), [&](int64_t begin, int64_t end) {
            thread_local Operands operands;
            for (int64_t pair = begin; pair < end; pair++) {
                operands.fill(weight, x.groups, pair);
                Tiles<SCALED> tiles;
                for (int64_t first = 0; first < whole; first += TILE) write_tile(operands, x, pair * TILE, first, out);
                for (int64_t row = pair * TILE; row < std::min((pair + 1) * TILE, weight.rows); row += BLOCK)
                    write_rows(weight.data + row / BLOCK * x.groups * BYTES, row, x, whole, count, out);
            }
        });
    }

    // 16 rows of the weight times 16 rows of x. The sums have the order of `tile`.
    static void write_tile(const Operands& operands, const QuantizedRows& x, int64_t row, int64_t first, Output out) {
        __m512 totals[TILE];
        LS_UNROLL_16
        for (int m = 0; m < TILE; m++) totals[m] = _mm512_setzero_ps();
        const int8_t* numbers = x.codes.data() + first * PARTS * x.columns;
        const float* x_scales = x.scales.data() + first * x.groups;
        const float* x_sums = (SCALES == 2 ? x.half_sums.data() : x.sums.data()) + first * x.groups * SCALES;
        const uint8_t* codes = operands.codes.data();
        for (int64_t i = 0; i < x.groups * SCALES; i++, numbers += SCALED, codes += SCALED * TILE) {
            alignas(64) int32_t sums[PARTS][TILE_WORDS];
            dot_tiles(numbers, PARTS * x.columns, x.columns, codes, sums);
            __m512 scale = _mm512_loadu_ps(operands.scales.data() + i * TILE);
            __m512 least = _mm512_loadu_ps(operands.least.data() + i * TILE);
            LS_UNROLL_16
            for (int m = 0; m < TILE; m++) {
                __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(sums[0] + m * TILE));
                if constexpr (PARTS == 2) {
                    __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[1] + m * TILE));
                    product = _mm512_fmadd_ps(product, _mm512_set1_ps(128), low);
                }
                product = _mm512_mul_ps(product, _mm512_set1_ps(x_scales[m * x.groups + i / SCALES]));
                totals[m] = _mm512_fmadd_ps(product, scale, totals[m]);
                if constexpr (INT4 || HAS_MIN) {
                    totals[m] = _mm512_fmadd_ps(least, _mm512_set1_ps(x_sums[m * x.groups * SCALES + i]), totals[m]);
                }
            }
        }
        __mmask16 mask = out.rows - row >= TILE ? 0xffff : (1 << (out.rows - row)) - 1;
        float* to = out.data + first * out.rows + row;
        for (int m = 0; m < TILE; m++, to += out.rows) {
            if (out.bias != nullptr) totals[m] = _mm512_add_ps(totals[m], _mm512_maskz_loadu_ps(mask, out.bias + row));
            _mm512_mask_storeu_ps(to, mask, totals[m]);
        }
    }

    static void dot_tiles(const int8_t* numbers, int64_t stride, int64_t to_low, const uint8_t* codes,
                          int32_t (&sums)[PARTS][TILE_WORDS]) {
        _tile_loadd(6, codes, 64);
        _tile_zero(0);
        _tile_loadd(4, numbers, stride);
        if constexpr (INT4) {
            _tile_dpbsud(0, 4, 6);
        } else {
            _tile_dpbssd(0, 4, 6);
        }
        _tile_stored(0, sums[0], 64);
        if constexpr (PARTS == 2) {
            _tile_zero(1);
            _tile_loadd(5, numbers + to_low, stride);
            if constexpr (INT4) {
                _tile_dpbsud(1, 5, 6);
            } else {
                _tile_dpbssd(1, 5, 6);
            }
            _tile_stored(1, sums[1], 64);
        }
    }

#endif

    static void write_rows(const uint8_t* block, int64_t row, const QuantizedRows& x, int64_t first, int64_t stop,
                           const Output& out) {
        for (; first + 4 <= stop; first += 4) write<4>(block, row, x, first, out);
        for (; first + 2 <= stop; first += 2) write<2>(block, row, x, first, out);
        for (; first < stop; first++) write<1>(block, row, x, first, out);
    }

    template <int M>
    static void write(const uint8_t* block, int64_t row, const QuantizedRows& x, int64_t first, const Output& out) {
        F8 results[M];
        tile<M>(block, x, first, results);
        int64_t count = std::min(BLOCK, out.rows - row);
        for (int m = 0; m < M; m++) {
            float* to = out.data + (first + m) * out.rows + row;
            if (count == BLOCK) {
                store(to, out.bias == nullptr ? results[m] : results[m] + load(out.bias + row));
                continue;
            }
            float values[BLOCK];
            store(values, results[m]);
            for (int64_t i = 0; i < count; i++) to[i] = values[i] + (out.bias == nullptr ? 0 : out.bias[row + i]);
        }
    }
};

template <bool INT4, int SCALED, class Scale, bool HAS_MIN>
inline void multiply_parts(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
    x.parts == 1 ? Format<INT4, SCALED, Scale, HAS_MIN, 1>::multiply(weight, x, count, out)
                 : Format<INT4, SCALED, Scale, HAS_MIN, 2>::multiply(weight, x, count, out);
}

template <bool INT4, int SCALED, bool HAS_MIN>
inline void multiply_scaled(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
    weight.scale_bytes == 2 ? multiply_parts<INT4, SCALED, uint16_t, HAS_MIN>(weight, x, count, out)
                            : multiply_parts<INT4, SCALED, float, HAS_MIN>(weight, x, count, out);
}

template <bool INT4>
inline void multiply_codes(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
    if (weight.group == 16) {
        weight.has_min ? multiply_scaled<INT4, 16, true>(weight, x, count, out)
                       : multiply_scaled<INT4, 16, false>(weight, x, count, out);
    } else {
        weight.has_min ? multiply_scaled<INT4, 32, true>(weight, x, count, out)
                       : multiply_scaled<INT4, 32, false>(weight, x, count, out);
    }
}

inline void multiply_packed(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
    weight.bits == 4 ? multiply_codes<true>(weight, x, count, out) : multiply_codes<false>(weight, x, count, out);
}

// Call multiply(out), and activate what it writes if the rows are gate and up.
template <class Fn>
inline void with_activation(int64_t count, int64_t rows, bool gated, float* out, Fn multiply) {
    if (!gated) return multiply(out);
    thread_local std::vector<float> gate_up;
    gate_up.resize(count * rows);
    multiply(gate_up.data());
    activate_rows<Silu>({gate_up.data(), count, rows}, rows / 2, true, out);
}

void linear_packed(const PackedWeight* weight, Rows x, const RmsNorm* norm, const float* bias, int32_t gated,
                   float* out) {
    thread_local QuantizedRows quantized_of_thread;
    QuantizedRows& quantized = quantized_of_thread;  // the helpers' loops see the caller's
    quantized.resize(x.count, weight->columns, weight->input_parts);
    parallel_for(x.count, grain_of(x.count, 8 * weight->columns), [&](int64_t begin, int64_t end) {
        std::vector<float> normed(norm == nullptr ? 0 : weight->columns);
        for (int64_t m = begin; m < end; m++) {
            float* row = x.data + m * x.stride;
            if (norm != nullptr) norm_row(row, *norm, m, normed.data());
            quantized.quantize(m, norm == nullptr ? row : normed.data());
        }
    });
    with_activation(x.count, weight->rows, gated, out,
                    [&](float* to) { multiply_packed(*weight, quantized, x.count, {to, bias, weight->rows}); });
}

void rms_norm(Rows x, const RmsNorm* norm, float* out) {
    parallel_for(x.count, grain_of(x.count, 4 * norm->columns), [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) norm_row(x.data + m * x.stride, *norm, m, out + m * norm->columns);
    });
}

// Some rows of x times some rows of the weight at a time, as many as stay in the caches.
template <class W>
struct FloatProduct {
    const W* weight;
    int64_t rows, columns;
    Rows x;
    const float* bias;
    float* out;

    void run() const {
        int64_t tiles = (rows + N - 1) / N;
        parallel_for(tiles, grain_of(tiles, N * columns * x.count),
                     [&](int64_t begin, int64_t end) { multiply_rows(N * begin, std::min(N * end, rows)); });
    }

    void multiply_rows(int64_t begin, int64_t end) const {  // of the weight
        int64_t some = std::max<int64_t>(L2_FLOATS / columns_at_once() / N, 1) * N;
        for (int64_t first = 0; first < x.count; first += X_ROWS)
            for (int64_t row = begin; row < end; row += some)
                multiply(row, std::min(row + some, end), first, std::min(first + X_ROWS, x.count));
    }

    // Whether the next rows of the weight are read ahead: few rows of x leave no time to wait for them.
    bool prefetches() const { return x.count <= PANEL && N * columns <= MAX_AHEAD; }

    int64_t columns_at_once() const {
        if (x.count <= TILE_ROWS) return columns;
        int64_t parts = (std::min(PANEL, x.count) * columns + L1_FLOATS - 1) / L1_FLOATS;
        return (columns + parts * LANES - 1) / (parts * LANES) * LANES;
    }

    // Rows [begin, end) of the weight, rows [first, stop) of x.
    void multiply(int64_t begin, int64_t end, int64_t first, int64_t stop) const {
        thread_local std::vector<float> waiting;  // sums of the columns so far: [tile, row of x, N, LANES]
        int64_t tiles = (end - begin + N - 1) / N, width = columns_at_once();
        if (width < columns) waiting.resize(tiles * (stop - first) * N * LANES);
        for (int64_t column = 0; column < columns; column += width) {
            for (int64_t some = first; some < stop; some += PANEL) {
                for (int64_t tile = 0; tile < tiles; tile++) {
                    float* sums = waiting.data() + (tile * (stop - first) + some - first) * N * LANES;
                    Tile part{*this, begin + tile * N, some, column, std::min(width, columns - column), sums};
                    in_tiles(some, std::min(some + PANEL, stop), part);
                }
            }
        }
    }

    struct Tile {
        const FloatProduct& product;
        int64_t row, first, column, count;
        float* waiting;

        template <int M>
        void run(int64_t x_row) const {
            const FloatProduct& p = product;
            const float* x[M];
            const W* w[N];
            LS_UNROLL
            for (int m = 0; m < M; m++) x[m] = p.x.data + (x_row + m) * p.x.stride + column;
            LS_UNROLL
            for (int n = 0; n < N; n++) w[n] = p.weight + std::min(row + n, p.rows - 1) * p.columns + column;
            Sums<M> sums;
            float* place = waiting + (x_row - first) * N * LANES;
            column == 0 ? clear<M>(sums) : load_sums<M>(place, sums);
            if (x_row == 0 && p.prefetches()) {
                add_products_and_prefetch<M>(x, w, count, N * p.columns, sums);
            } else {
                add_products<M>(x, w, count, sums);
            }
            column + count == p.columns ? write<M>(x_row, sums) : save_sums<M>(place, sums);
        }

        template <int M>
        void write(int64_t x_row, const Sums<M>& sums) const {
            bool is_whole = row + N <= product.rows;
            LS_UNROLL
            for (int m = 0; m < M; m++) {
                float results[N];
                float* to = product.out + (x_row + m) * product.rows + row;
                store_row_sums<M>(is_whole ? to : results, sums, m);
                if (!is_whole) std::copy(results, results + product.rows - row, to);
                if (product.bias != nullptr) add_bias(to);
            }
        }

        void add_bias(float* to) const {
            int64_t width = std::min<int64_t>(N, product.rows - row);
            for (int64_t n = 0; n < width; n++) to[n] += product.bias[row + n];
        }
    };
};

// The norm of x, or x itself.
inline Rows normed_rows(Rows x, const RmsNorm* norm, int64_t columns) {
    if (norm == nullptr) return x;
    thread_local std::vector<float> normed;
    normed.resize(x.count * columns);
    rms_norm(x, norm, normed.data());
    return {normed.data(), x.count, columns};
}

template <class W>
inline void linear_of_floats(const W* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm* norm,
                             const float* bias, int32_t gated, float* out) {
    x = normed_rows(x, norm, columns);
    with_activation(x.count, rows, gated, out, [&](float* to) {
        FloatProduct<W>{weight, rows, columns, x, bias, to}.run();
    });
}

void linear_float(const float* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm* norm, const float* bias,
                  int32_t gated, float* out) {
    linear_of_floats(weight, rows, columns, x, norm, bias, gated, out);
}

}  // namespace
}  // namespace lightserve
