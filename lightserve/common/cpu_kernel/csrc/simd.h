// Eight numbers at once, and the products of packed codes, for the instructions that this file is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define LS_NEON_DOT 1
#include <arm_neon.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LS_AVX2 1
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define LS_AVX512_VNNI 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define LS_AMX 1
#endif
#endif

#define LS_UNROLL _Pragma("GCC unroll 8")
#define LS_UNROLL_16 _Pragma("GCC unroll 16")

namespace lightserve {
namespace {  // each variant has its own copies: they must not be merged by the linker

#if LS_NEON_DOT

constexpr int64_t WIDEN_ROWS = 16;  // of x from which on it pays to unpack codes of 4 bits first
constexpr int64_t PREFETCHED = 0;   // bytes of a weight that are read ahead if it is read for one row of x

struct F8 {
    float32x4_t a, b;
};
struct I8 {
    int32x4_t a, b;
};
inline F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 load(const uint16_t* p) {
    uint16x8_t bits = vld1q_u16(p);
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(bits)))};
}
inline void store(float* p, F8 v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
}
inline F8 all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F8 fma(F8 x, F8 y, F8 sum) { return {vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b)}; }
inline F8 fma(F8 x, float y, F8 sum) { return {vfmaq_n_f32(sum.a, x.a, y), vfmaq_n_f32(sum.b, x.b, y)}; }
inline F8 scale_by(F8 x, float y) { return {vmulq_n_f32(x.a, y), vmulq_n_f32(x.b, y)}; }
inline F8 min(F8 x, F8 y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
inline F8 max(F8 x, F8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F8 abs(F8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F8 with_sign_of(F8 x, F8 y) {
    uint32x4_t sign = vdupq_n_u32(0x80000000);
    return {vbslq_f32(sign, x.a, y.a), vbslq_f32(sign, x.b, y.b)};
}
inline float sum(F8 x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
inline float max_of(F8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
// Sums start at the bits of 1.5 * 2^23. Their float value is then that number plus the sum, exact below 2^22, and a
// subtraction converts it: the conversion instruction has a quarter of the throughput on a Neoverse N1.
inline I8 zeros() { return {vdupq_n_s32(0x4b400000), vdupq_n_s32(0x4b400000)}; }
inline F8 sum_to_float(I8 x) {
    float32x4_t zero = vreinterpretq_f32_s32(vdupq_n_s32(0x4b400000));
    return {vsubq_f32(vreinterpretq_f32_s32(x.a), zero), vsubq_f32(vreinterpretq_f32_s32(x.b), zero)};
}
inline F8 to_float(I8 x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
inline I8 round_to_int(F8 x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
inline F8 times_power_of_2(F8 x, I8 n) {
    auto scale = [](int32x4_t e) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)); };
    return {vmulq_f32(x.a, scale(n.a)), vmulq_f32(x.b, scale(n.b))};
}
// Eight int32 to int8, and their sum.
inline int32_t store_bytes(int8_t* p, I8 x) {
    int16x8_t narrow = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    vst1_s8(p, vmovn_s16(narrow));
    return vaddvq_s32(vaddq_s32(x.a, x.b));
}

inline I8 rounded_128th(I8 x) {
    auto half = [](int32x4_t v) { return vrshrq_n_s32(v, 7); };
    return {half(x.a), half(x.b)};
}
inline I8 minus_128_times(I8 x, I8 y) {
    return {vsubq_s32(x.a, vshlq_n_s32(y.a, 7)), vsubq_s32(x.b, vshlq_n_s32(y.b, 7))};
}

// acc[m][row] = codes of 8 rows times 4 * QUADS numbers of x[m] from number `begin` on. Byte b of vector q holds number
// 4q + b % 4 of row b / 4 in its low half and of row 4 + b / 4 in its high half.
template <int M, int QUADS>
inline void dot_int4(I8 (&acc)[M], const uint8_t* codes, const int8_t* const (&x)[M], int begin) {
    int8x16_t numbers[M];
    LS_UNROLL
    for (int m = 0; m < M; m++) acc[m] = zeros();
#define LS_QUAD(Q, LANE)                                                         \
    {                                                                            \
        uint8x16_t both = vld1q_u8(codes + 16 * (Q));                            \
        int8x16_t first = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));   \
        int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));             \
        LS_UNROLL                                                                \
        for (int m = 0; m < M; m++) {                                            \
            acc[m].a = vdotq_laneq_s32(acc[m].a, first, numbers[m], LANE);       \
            acc[m].b = vdotq_laneq_s32(acc[m].b, second, numbers[m], LANE);      \
        }                                                                        \
    }
    LS_UNROLL
    for (int q = 0; q < QUADS; q += 4) {
        LS_UNROLL
        for (int m = 0; m < M; m++) numbers[m] = vld1q_s8(x[m] + begin + 4 * q);
        LS_QUAD(q, 0) LS_QUAD(q + 1, 1) LS_QUAD(q + 2, 2) LS_QUAD(q + 3, 3)
    }
#undef LS_QUAD
}

// The codes of dot_int4 in the layout of dot_int8.
inline void widen(const uint8_t* codes, int8_t* to) {
    for (int q = 0; q < 8; q++) {
        uint8x16_t both = vld1q_u8(codes + 16 * q);
        vst1q_s8(to + 32 * q, vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))));
        vst1q_s8(to + 32 * q + 16, vreinterpretq_s8_u8(vshrq_n_u8(both, 4)));
    }
}

// The same for codes of 8 bits: vectors 2q and 2q + 1 hold numbers 4q to 4q + 3 of the first and of the last four rows.
template <int M, int QUADS>
inline void dot_int8(I8 (&acc)[M], const int8_t* codes, const int8_t* const (&x)[M], int begin) {
    int8x16_t numbers[M];
    LS_UNROLL
    for (int m = 0; m < M; m++) acc[m] = zeros();
#define LS_QUAD(Q, LANE)                                                                        \
    {                                                                                           \
        int8x16_t first = vld1q_s8(codes + 32 * (Q)), second = vld1q_s8(codes + 32 * (Q) + 16); \
        LS_UNROLL                                                                               \
        for (int m = 0; m < M; m++) {                                                           \
            acc[m].a = vdotq_laneq_s32(acc[m].a, first, numbers[m], LANE);                      \
            acc[m].b = vdotq_laneq_s32(acc[m].b, second, numbers[m], LANE);                     \
        }                                                                                       \
    }
    LS_UNROLL
    for (int q = 0; q < QUADS; q += 4) {
        LS_UNROLL
        for (int m = 0; m < M; m++) numbers[m] = vld1q_s8(x[m] + begin + 4 * q);
        LS_QUAD(q, 0) LS_QUAD(q + 1, 1) LS_QUAD(q + 2, 2) LS_QUAD(q + 3, 3)
    }
#undef LS_QUAD
}

#elif LS_AVX2

constexpr int64_t WIDEN_ROWS = INT64_MAX;  // unpacking is two instructions, whatever the number of rows
constexpr int64_t PREFETCHED = 8192;  // a Xeon reads 4-bit weights in 110 us instead of 175; 512 bytes: 132

struct F8 {
    __m256 v;
};
struct I8 {
    __m256i v;
};
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline void store(float* p, F8 x) { _mm256_storeu_ps(p, x.v); }
inline F8 all(float x) { return {_mm256_set1_ps(x)}; }
inline F8 operator+(F8 x, F8 y) { return {_mm256_add_ps(x.v, y.v)}; }
inline F8 operator-(F8 x, F8 y) { return {_mm256_sub_ps(x.v, y.v)}; }
inline F8 operator*(F8 x, F8 y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline F8 operator/(F8 x, F8 y) { return {_mm256_div_ps(x.v, y.v)}; }
inline F8 fma(F8 x, F8 y, F8 sum) { return {_mm256_fmadd_ps(x.v, y.v, sum.v)}; }
inline F8 fma(F8 x, float y, F8 sum) { return {_mm256_fmadd_ps(x.v, _mm256_set1_ps(y), sum.v)}; }
inline F8 scale_by(F8 x, float y) { return {_mm256_mul_ps(x.v, _mm256_set1_ps(y))}; }
inline F8 min(F8 x, F8 y) { return {_mm256_min_ps(x.v, y.v)}; }
inline F8 max(F8 x, F8 y) { return {_mm256_max_ps(x.v, y.v)}; }
inline F8 abs(F8 x) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v)}; }
inline F8 with_sign_of(F8 x, F8 y) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_and_ps(sign, x.v), _mm256_andnot_ps(sign, y.v))};
}
inline float sum(F8 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float max_of(F8 x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline I8 zeros() { return {_mm256_setzero_si256()}; }
inline F8 to_float(I8 x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline F8 sum_to_float(I8 x) { return to_float(x); }
inline I8 round_to_int(F8 x) { return {_mm256_cvtps_epi32(x.v)}; }  // to nearest, ties to even
inline F8 times_power_of_2(F8 x, I8 n) {
    __m256i scale = _mm256_slli_epi32(_mm256_add_epi32(n.v, _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(scale))};
}
inline int32_t store_bytes(int8_t* p, I8 x) {
    __m128i low = _mm256_castsi256_si128(x.v), high = _mm256_extracti128_si256(x.v, 1);
    __m128i narrow = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(narrow, narrow));
    __m128i s = _mm_add_epi32(low, high);
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

inline I8 rounded_128th(I8 x) { return {_mm256_srai_epi32(_mm256_add_epi32(x.v, _mm256_set1_epi32(64)), 7)}; }
inline I8 minus_128_times(I8 x, I8 y) { return {_mm256_sub_epi32(x.v, _mm256_slli_epi32(y.v, 7))}; }

inline __m256i four(const int8_t* x) {  // numbers, in every row
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return _mm256_set1_epi32(bits);
}

inline __m256i unpacked(const uint8_t* codes) {  // four codes of eight rows, as bytes
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    __m256i shifted = _mm256_srlv_epi32(twice, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
}

#if LS_AVX512_VNNI

template <int M, int QUADS>
inline void dot_int4(I8 (&acc)[M], const uint8_t* codes, const int8_t* const (&x)[M], int begin) {
    for (int m = 0; m < M; m++) acc[m] = zeros();
    LS_UNROLL
    for (int q = 0; q < QUADS; q++) {
        __m256i rows = unpacked(codes + 16 * q);
        for (int m = 0; m < M; m++) acc[m].v = _mm256_dpbusd_epi32(acc[m].v, rows, four(x[m] + begin + 4 * q));
    }
}

#else

template <int M, int QUADS>
inline void dot_int4(I8 (&acc)[M], const uint8_t* codes, const int8_t* const (&x)[M], int begin) {
    __m256i pairs[M];  // sums of two products: at most 8 * 2 * 15 * 127 < 2^15
    for (int m = 0; m < M; m++) pairs[m] = _mm256_setzero_si256();
    LS_UNROLL
    for (int q = 0; q < QUADS; q++) {
        __m256i rows = unpacked(codes + 16 * q);
        for (int m = 0; m < M; m++) {
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(rows, four(x[m] + begin + 4 * q)));
        }
    }
    for (int m = 0; m < M; m++) {
        acc[m].v = _mm256_madd_epi16(pairs[m], _mm256_set1_epi16(1));
    }
}

#endif

inline void widen(const uint8_t* codes, int8_t* to) {
    for (int i = 0; i < 128; i++) {
        to[i / 16 * 32 + i % 16] = static_cast<int8_t>(codes[i] & 15);
        to[i / 16 * 32 + 16 + i % 16] = static_cast<int8_t>(codes[i] >> 4);
    }
}

template <int M, int QUADS>
inline void dot_int8(I8 (&acc)[M], const int8_t* codes, const int8_t* const (&x)[M], int begin) {
    for (int m = 0; m < M; m++) acc[m] = zeros();
    LS_UNROLL
    for (int q = 0; q < QUADS; q++) {
        __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * q));
        __m256i size = _mm256_abs_epi8(rows);  // 128 for -128, read as unsigned
        LS_UNROLL
        for (int m = 0; m < M; m++) {
            __m256i signed_x = _mm256_sign_epi8(four(x[m] + begin + 4 * q), rows);
#if LS_AVX512_VNNI
            acc[m].v = _mm256_dpbusd_epi32(acc[m].v, size, signed_x);
#else
            __m256i pairs = _mm256_maddubs_epi16(size, signed_x);
            acc[m].v = _mm256_add_epi32(acc[m].v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
        }
    }
}

#else

constexpr int64_t WIDEN_ROWS = 16;
constexpr int64_t PREFETCHED = 0;

struct F8 {
    float v[8];
};
struct I8 {
    int32_t v[8];
};
template <class Fn>
inline F8 each(Fn fn) {
    F8 out;
    for (int i = 0; i < 8; i++) out.v[i] = fn(i);
    return out;
}
inline float from_half(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float out;
    if (rest < 0x400) {  // subnormal
        out = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -out : out;
    }
    wide = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest + 0x1c000) << 13);
    std::memcpy(&out, &wide, 4);
    return out;
}
inline F8 load(const float* p) { return each([&](int i) { return p[i]; }); }
inline F8 load(const uint16_t* p) { return each([&](int i) { return from_half(p[i]); }); }
inline void store(float* p, F8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F8 all(float x) { return each([&](int) { return x; }); }
inline F8 operator+(F8 x, F8 y) { return each([&](int i) { return x.v[i] + y.v[i]; }); }
inline F8 operator-(F8 x, F8 y) { return each([&](int i) { return x.v[i] - y.v[i]; }); }
inline F8 operator*(F8 x, F8 y) { return each([&](int i) { return x.v[i] * y.v[i]; }); }
inline F8 operator/(F8 x, F8 y) { return each([&](int i) { return x.v[i] / y.v[i]; }); }
inline F8 fma(F8 x, F8 y, F8 sum) { return each([&](int i) { return x.v[i] * y.v[i] + sum.v[i]; }); }
inline F8 fma(F8 x, float y, F8 sum) { return each([&](int i) { return x.v[i] * y + sum.v[i]; }); }
inline F8 scale_by(F8 x, float y) { return each([&](int i) { return x.v[i] * y; }); }
inline F8 min(F8 x, F8 y) { return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; }); }
inline F8 max(F8 x, F8 y) { return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
inline F8 abs(F8 x) { return each([&](int i) { return std::fabs(x.v[i]); }); }
inline F8 with_sign_of(F8 x, F8 y) { return each([&](int i) { return std::copysign(y.v[i], x.v[i]); }); }
inline float sum(F8 x) {
    float halves[4];
    for (int i = 0; i < 4; i++) halves[i] = x.v[i] + x.v[i + 4];
    return (halves[0] + halves[1]) + (halves[2] + halves[3]);
}
inline float max_of(F8 x) {
    float most = x.v[0];
    for (int i = 1; i < 8; i++) most = most > x.v[i] ? most : x.v[i];
    return most;
}
inline I8 zeros() { return {}; }
inline F8 to_float(I8 x) { return each([&](int i) { return static_cast<float>(x.v[i]); }); }
inline F8 sum_to_float(I8 x) { return to_float(x); }
inline I8 round_to_int(F8 x) {
    I8 out;
    for (int i = 0; i < 8; i++) out.v[i] = static_cast<int32_t>(std::nearbyintf(x.v[i]));
    return out;
}
inline F8 times_power_of_2(F8 x, I8 n) { return each([&](int i) { return std::ldexp(x.v[i], n.v[i]); }); }
inline int32_t store_bytes(int8_t* p, I8 x) {
    int32_t total = 0;
    for (int i = 0; i < 8; i++) {
        p[i] = static_cast<int8_t>(x.v[i]);
        total += x.v[i];
    }
    return total;
}

inline I8 rounded_128th(I8 x) {
    for (int32_t& v : x.v) v = (v + 64) >> 7;
    return x;
}
inline I8 minus_128_times(I8 x, I8 y) {
    for (int i = 0; i < 8; i++) x.v[i] -= 128 * y.v[i];
    return x;
}

template <int M, int QUADS>
inline void dot_int4(I8 (&acc)[M], const uint8_t* codes, const int8_t* const (&x)[M], int begin) {
    for (int m = 0; m < M; m++) {
        acc[m] = zeros();
        for (int i = 0; i < 16 * QUADS; i++) {
            int number = x[m][begin + i / 16 * 4 + i % 4];
            acc[m].v[i % 16 / 4] += (codes[i] & 15) * number;
            acc[m].v[4 + i % 16 / 4] += (codes[i] >> 4) * number;
        }
    }
}

inline void widen(const uint8_t* codes, int8_t* to) {
    for (int i = 0; i < 128; i++) {
        to[i / 16 * 32 + i % 16] = static_cast<int8_t>(codes[i] & 15);
        to[i / 16 * 32 + 16 + i % 16] = static_cast<int8_t>(codes[i] >> 4);
    }
}

template <int M, int QUADS>
inline void dot_int8(I8 (&acc)[M], const int8_t* codes, const int8_t* const (&x)[M], int begin) {
    for (int m = 0; m < M; m++) {
        acc[m] = zeros();
        for (int i = 0; i < 32 * QUADS; i++) acc[m].v[i % 32 / 4] += codes[i] * x[m][begin + i / 32 * 4 + i % 4];
    }
}

#endif

// Lanes sum products of float32 numbers; TILE_ROWS rows times four are as many sums as there are registers for.
#if LS_NEON_DOT

struct Lanes {
    float32x4_t v;
};
constexpr int64_t LANES = 4;
constexpr int TILE_ROWS = 4;
inline Lanes no_lanes() { return {vdupq_n_f32(0)}; }
inline Lanes load_lanes(const float* p) { return {vld1q_f32(p)}; }
inline Lanes load_lanes(const Bf16* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))};
}
inline void store_lanes(float* p, Lanes x) { vst1q_f32(p, x.v); }
inline Lanes fma(Lanes x, Lanes y, Lanes sum) { return {vfmaq_f32(sum.v, x.v, y.v)}; }
inline void store_sums(float* p, Lanes x0, Lanes x1, Lanes x2, Lanes x3) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(x0.v, x1.v), vpaddq_f32(x2.v, x3.v)));
}

#elif LS_AVX512_VNNI

struct Lanes {
    __m512 v;
};
constexpr int64_t LANES = 16;
constexpr int TILE_ROWS = 6;
inline Lanes no_lanes() { return {_mm512_setzero_ps()}; }
inline Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load_lanes(const Bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_lanes(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
inline Lanes fma(Lanes x, Lanes y, Lanes sum) { return {_mm512_fmadd_ps(x.v, y.v, sum.v)}; }
// Sums of four columns, still in four quarters.
inline __m512 quarters(Lanes x0, Lanes x1, Lanes x2, Lanes x3) {
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(x0.v, x1.v), _mm512_unpackhi_ps(x0.v, x1.v));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(x2.v, x3.v), _mm512_unpackhi_ps(x2.v, x3.v));
    __m512d first = _mm512_castps_pd(low), second = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
}
inline void store_sums(float* p, Lanes x0, Lanes x1, Lanes x2, Lanes x3) {
    __m512 x = quarters(x0, x1, x2, x3);
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(x),
                                  _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

#elif LS_AVX2

struct Lanes {
    __m256 v;
};
constexpr int64_t LANES = 8;
constexpr int TILE_ROWS = 3;
inline Lanes no_lanes() { return {_mm256_setzero_ps()}; }
inline Lanes load_lanes(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Lanes load_lanes(const Bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store_lanes(float* p, Lanes x) { _mm256_storeu_ps(p, x.v); }
inline Lanes fma(Lanes x, Lanes y, Lanes sum) { return {_mm256_fmadd_ps(x.v, y.v, sum.v)}; }
inline __m128 folded(Lanes x) { return _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1)); }
inline void store_sums(float* p, Lanes x0, Lanes x1, Lanes x2, Lanes x3) {
    __m128 low = _mm_hadd_ps(folded(x0), folded(x1)), high = _mm_hadd_ps(folded(x2), folded(x3));
    _mm_storeu_ps(p, _mm_hadd_ps(low, high));
}

#else

using Lanes = F8;
constexpr int64_t LANES = 8;
constexpr int TILE_ROWS = 2;
inline Lanes no_lanes() { return all(0); }
inline Lanes load_lanes(const float* p) { return load(p); }
inline Lanes load_lanes(const Bf16* p) {
    return each([&](int i) {
        uint32_t bits = static_cast<uint32_t>(p[i].bits) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    });
}
inline void store_lanes(float* p, Lanes x) { store(p, x); }
inline void store_sums(float* p, Lanes x0, Lanes x1, Lanes x2, Lanes x3) {
    const Lanes all_four[] = {x0, x1, x2, x3};
    for (int i = 0; i < 4; i++) p[i] = sum(all_four[i]);
}

#endif

template <class W>
inline Lanes load_lanes(const W* p, int64_t count) {  // the first `count`, then zeros
    W values[LANES] = {};
    std::memcpy(values, p, count * sizeof(W));
    return load_lanes(values);
}

// e^x with a relative error below 2e-7; results below e^-87 are 0 or close to it.
inline F8 exp(F8 x) {
    x = min(max(x, all(-87.0f)), all(88.0f));
    I8 power = round_to_int(x * all(1.44269504f));
    F8 n = to_float(power);
    F8 rest = fma(n, -0.693359375f, x);  // ln 2 in two parts
    rest = fma(n, 2.12194440e-4f, rest);
    F8 poly = all(1.9875691500e-4f);
    poly = fma(poly, rest, all(1.3981999507e-3f));
    poly = fma(poly, rest, all(8.3334519073e-3f));
    poly = fma(poly, rest, all(4.1665795894e-2f));
    poly = fma(poly, rest, all(1.6666665459e-1f));
    poly = fma(poly, rest, all(5.0000001201e-1f));
    return times_power_of_2(fma(poly, rest * rest, rest + all(1.0f)), power);
}

// With an absolute error below 2e-7; Abramowitz and Stegun, 7.1.26.
inline F8 erf(F8 x) {
    F8 t = all(1) / fma(abs(x), 0.3275911f, all(1));
    F8 poly = all(1.061405429f);
    poly = fma(poly, t, all(-1.453152027f));
    poly = fma(poly, t, all(1.421413741f));
    poly = fma(poly, t, all(-0.284496736f));
    poly = fma(poly, t, all(0.254829592f));
    return with_sign_of(x, all(1) - poly * t * exp(all(0) - x * x));
}

inline F8 tanh(F8 x) {
    F8 e = exp(all(2) * x);  // at most e^88
    return all(1) - all(2) / (e + all(1));
}

}  // namespace
}  // namespace lightserve
