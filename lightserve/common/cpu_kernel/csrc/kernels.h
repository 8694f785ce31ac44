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
    int32_t has_min;      // value = scale * code + minimum; without: scale * (code - 8) with 4 bits, scale * code with 8
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

struct DecodeBatch {  // a query for each request
    const int32_t* req_to_token;
    int64_t stride;  // of a request
    const int32_t* b_req_idx;
    const int32_t* b_row;  // of q
    const int32_t* b_seq_len;
    int64_t count;
};

struct Kernels {
    void (*linear_packed)(const PackedWeight*, Rows x, const RmsNorm*, const float* bias, int32_t gated, float* out);
    void (*linear_float)(const float* weight, int64_t rows, int64_t columns, Rows x, const RmsNorm*, const float* bias,
                         int32_t gated, float* out);
    void (*rms_norm)(Rows x, const RmsNorm*, float* out);
    void (*silu_and_mul)(Rows gate_up, int64_t columns, float* out);
    void (*rotary_write_kv)(Heads q, Heads kv, int64_t tokens, const float* cos, const float* sin, int64_t half,
                            const int32_t* slots, Cache);
    // window: keys that a query sees; 0: all
    void (*token_attention)(Heads q, Cache, const DecodeBatch&, int64_t window, float scale, float* out);
};

}  // namespace lightserve
