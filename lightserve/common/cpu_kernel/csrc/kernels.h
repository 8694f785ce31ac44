// The functions that Python calls. Each variant, compiled for other instructions, has a table of them.
#pragma once

#include <cstdint>

namespace lightserve {

// A weight [rows, columns] of codes. Blocks of 8 rows follow each other, in a block groups of 32 columns. A group has
// its scales, its minima and its codes, in the order in which the kernels read them.
struct PackedWeight {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;      // a multiple of 32
    int32_t bits;         // of a code: 4 (unsigned) or 8 (signed)
    int32_t group;        // columns of a scale: 16 or 32
    int32_t scale_bytes;  // 2: float16, 4: float32
    int32_t input_parts;  // of 8 bits, to which a number of x is rounded: 1 or 2
    int32_t has_min;      // value = scale * code + minimum; without: scale * (code - 8) with 4 bits, scale * code with 8
};

struct Bf16 {  // the upper half of a float32
    uint16_t bits;
};

struct Rows {  // float32 [count, columns]
    float* data;
    int64_t count;
    int64_t stride;
};

struct RmsNorm {
    const float* weight;
    float* residual;      // contiguous; becomes the sum with x. nullptr: the norm of x alone
    float eps;
    int64_t columns;
};

// [tokens, count, dim]; the heads of a token are contiguous
struct Heads {
    float* data;
    int64_t stride;  // of a token
    int64_t count;
};

struct Cache {
    float* data;     // [slots, 2 * kv_heads, dim], keys first
    int64_t stride;  // of a slot
    int64_t kv_heads;
    int64_t dim;
};

struct AttentionBatch {  // the last tokens of each request are queries
    const int32_t* req_to_token;
    int64_t stride;  // of a request
    const int32_t* b_req_idx;
    const int32_t* b_start_loc;  // the first row of q
    const int32_t* b_seq_len;
    const int32_t* b_ready_cache_len;
    int64_t count;
};

struct AttentionOptions {
    float scale;
    float softcap;   // 0: none
    int64_t window;  // keys that a query sees; 0: all
    int32_t causal;
    const float* alibi_slopes;  // [heads] or nullptr
    const float* sinks;         // [heads] or nullptr
};

enum Activation : int32_t { SILU, GELU, GELU_TANH };

struct Kernels {
    void (*linear_packed)(const PackedWeight*, Rows x, const RmsNorm*, const float* bias, int32_t gated, float* out);
    void (*linear_float)(const float* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm*, const float* bias,
                         int32_t gated, float* out);
    void (*linear_bf16)(const Bf16* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm*, const float* bias,
                        int32_t gated, float* out);
    void (*rms_norm)(Rows x, const RmsNorm*, float* out);
    // gated: the rows are gate and up, [2 * columns]
    void (*activate)(Rows x, int64_t columns, int32_t activation, int32_t gated, float* out);
    void (*rotary_write_kv)(Heads q, Heads kv, int64_t tokens, const float* cos, const float* sin, int64_t half,
                            const int32_t* slots, Cache);
    void (*attention)(Heads q, Cache, const AttentionBatch&, const AttentionOptions&, float* out);
};

}  // namespace lightserve
