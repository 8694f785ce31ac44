// y = x W^T + bias: W as packed codes, whose products are summed in integers, or in float32.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace lightserve {
namespace {

constexpr int64_t GROUP = 32;        // numbers of x with a scale of their own
constexpr int64_t BLOCK = 8;         // rows of a packed weight that are computed together
constexpr int64_t X_ROWS = 256;      // of x at a time, so that they stay in the L2 cache
constexpr int64_t PANEL = 16;         // rows of x that stay in the L1 cache, in float32
constexpr int64_t GRAIN = 32 * 1024; // products of a chunk, at least: 1 to 3 us
constexpr int64_t CHUNKS = 6;        // for each thread, so that the last ones end together

// x in 8 bits, a scale for each group of 32 numbers
struct QuantizedRows {
    std::vector<int8_t> codes;
    std::vector<float> scales;
    std::vector<float> sums, half_sums;  // after rounding, of a group and of its halves
    int64_t columns, groups;

    void resize(int64_t count, int64_t width) {
        columns = width;
        groups = width / GROUP;
        codes.resize(count * columns);
        scales.resize(count * groups);
        sums.resize(count * groups);
        half_sums.resize(2 * count * groups);
    }

    void quantize(int64_t row, const float* x) {
        for (int64_t g = 0; g < groups; g++, x += GROUP) {
            F8 most_of_four = max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24))));
            float most = max_of(most_of_four);
            F8 inverse = all(most > 0 ? 127.0f / most : 0.0f);
            int8_t* to = codes.data() + row * columns + g * GROUP;
            int32_t totals[4];
            for (int i = 0; i < 4; i++) totals[i] = store_bytes(to + 8 * i, round_to_int(load(x + 8 * i) * inverse));
            float scale = most / 127.0f;
            int64_t at = row * groups + g;
            scales[at] = scale;
            half_sums[2 * at] = scale * static_cast<float>(totals[0] + totals[1]);
            half_sums[2 * at + 1] = scale * static_cast<float>(totals[2] + totals[3]);
            sums[at] = scale * static_cast<float>(totals[0] + totals[1] + totals[2] + totals[3]);
        }
    }
};

inline int64_t grain_of(int64_t count, int64_t products) {  // `products` of one of `count` units
    int64_t least = std::max<int64_t>(GRAIN / std::max<int64_t>(products, 1), 1);
    return std::max(least, count / (num_threads() * CHUNKS));
}

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

inline void gate_row(const float* gate_up, int64_t columns, float* out) {
    const float* up = gate_up + columns;
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8) {
        F8 gate = load(gate_up + i);
        store(out + i, gate / (all(1) + exp(all(0) - gate)) * load(up + i));
    }
    for (; i < columns; i++) out[i] = gate_up[i] / (1 + std::exp(-gate_up[i])) * up[i];
}

struct Output {
    float* data;        // [count, rows]
    const float* bias;  // [rows] or nullptr
    int64_t rows;
};

template <bool INT4, int SCALED, class Scale, bool HAS_MIN>
struct Format {
    using Wide = Format<false, SCALED, float, true>;
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
        const int8_t* numbers[M];
        LS_UNROLL
        for (int m = 0; m < M; m++) {
            totals[m] = all(0);
            numbers[m] = x.codes.data() + (first + m) * x.columns;
        }
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
                I8 acc[M];
                const uint8_t* own = codes + part * CODE_BYTES / SCALES;
                if constexpr (INT4) {
                    dot_int4<M, SCALED / 4>(acc, own, numbers, part * SCALED);
                } else {
                    dot_int8<M, SCALED / 4>(acc, reinterpret_cast<const int8_t*>(own), numbers, part * SCALED);
                }
                F8 scale = load(scales + part * BLOCK);
                LS_UNROLL
                for (int m = 0; m < M; m++) {
                    totals[m] = fma(scale_by(sum_to_float(acc[m]), x_scales[m * groups + g]), scale, totals[m]);
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
            for (int m = 0; m < M; m++) numbers[m] += GROUP;
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

template <bool INT4, int SCALED, bool HAS_MIN>
inline void multiply_scaled(const PackedWeight& weight, const QuantizedRows& x, int64_t count, Output out) {
    weight.scale_bytes == 2 ? Format<INT4, SCALED, uint16_t, HAS_MIN>::multiply(weight, x, count, out)
                            : Format<INT4, SCALED, float, HAS_MIN>::multiply(weight, x, count, out);
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

void silu_and_mul(Rows gate_up, int64_t columns, float* out) {
    parallel_for(gate_up.count, grain_of(gate_up.count, 8 * columns), [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) gate_row(gate_up.data + m * gate_up.stride, columns, out + m * columns);
    });
}

// Call multiply(out), and activate what it writes if the rows are gate and up.
template <class Fn>
inline void with_activation(int64_t count, int64_t rows, bool gated, float* out, Fn multiply) {
    if (!gated) return multiply(out);
    thread_local std::vector<float> gate_up;
    gate_up.resize(count * rows);
    multiply(gate_up.data());
    silu_and_mul({gate_up.data(), count, rows}, rows / 2, out);
}

void linear_packed(const PackedWeight* weight, Rows x, const RmsNorm* norm, const float* bias, int32_t gated,
                   float* out) {
    thread_local QuantizedRows quantized_of_thread;
    QuantizedRows& quantized = quantized_of_thread;  // the helpers' loops see the caller's
    quantized.resize(x.count, weight->columns);
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

// N rows of the weight times M rows of x.
template <int M, int N>
inline void dot_float(const float* weight, int64_t columns, const float* x, int64_t x_stride, float (&out)[M][N]) {
    F8 acc[M][N];
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        LS_UNROLL
        for (int n = 0; n < N; n++) acc[m][n] = all(0);
    }
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8) {
        F8 w[N];
        LS_UNROLL
        for (int n = 0; n < N; n++) w[n] = load(weight + n * columns + i);
        LS_UNROLL
        for (int m = 0; m < M; m++) {
            F8 numbers = load(x + m * x_stride + i);
            LS_UNROLL
            for (int n = 0; n < N; n++) acc[m][n] = fma(w[n], numbers, acc[m][n]);
        }
    }
    LS_UNROLL
    for (int m = 0; m < M; m++) {
        LS_UNROLL
        for (int n = 0; n < N; n++) out[m][n] = sum(acc[m][n]);
    }
    for (; i < columns; i++) {
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) out[m][n] += weight[n * columns + i] * x[m * x_stride + i];
    }
}

struct FloatProduct {
    const float* weight;
    int64_t rows, columns;
    Rows x;
    const float* bias;
    float* out;

    template <int M, int N>
    void write(int64_t row, int64_t first) const {
        float results[M][N];
        dot_float<M, N>(weight + row * columns, columns, x.data + first * x.stride, x.stride, results);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                out[(first + m) * rows + row + n] = results[m][n] + (bias == nullptr ? 0 : bias[row + n]);
    }

    template <int N>
    void write_rows(int64_t row, int64_t first, int64_t stop) const {
        for (; first + 4 <= stop; first += 4) write<4, N>(row, first);
        for (; first < stop; first++) write<1, N>(row, first);
    }

    void run(int64_t begin, int64_t end) const {
        for (int64_t first = 0; first < x.count; first += PANEL) {
            int64_t stop = std::min(first + PANEL, x.count), row = begin;
            if (x.count == 1) {
                for (; row + 4 <= end; row += 4) write<1, 4>(row, 0);
            }
            for (; row + 2 <= end; row += 2) write_rows<2>(row, first, stop);
            for (; row < end; row++) write_rows<1>(row, first, stop);
        }
    }
};

void linear_float(const float* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm* norm, const float* bias,
                  int32_t gated, float* out) {
    thread_local std::vector<float> normed;
    if (norm != nullptr) {
        normed.resize(x.count * columns);
        rms_norm(x, norm, normed.data());
        x = {normed.data(), x.count, columns};
    }
    with_activation(x.count, rows, gated, out, [&](float* to) {
        FloatProduct product{weight, rows, columns, x, bias, to};
        int64_t fours = (rows + 3) / 4;
        parallel_for(fours, grain_of(fours, 4 * columns * x.count),
                     [&](int64_t begin, int64_t end) { product.run(4 * begin, std::min(4 * end, rows)); });
    });
}

}  // namespace
}  // namespace lightserve
