// All kernels for one set of instructions. setup.py compiles this file once for each, with its name in LS_VARIANT.

#include "attention.h"
#include "kernels.h"
#include "linear.h"

namespace lightserve {

extern const Kernels LS_VARIANT;
const Kernels LS_VARIANT = {linear_packed, linear_float, rms_norm, silu_and_mul, rotary_write_kv, token_attention};

}  // namespace lightserve
