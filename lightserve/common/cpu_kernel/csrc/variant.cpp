// All kernels for one set of instructions. setup.py compiles this file once for each, with its name in LS_VARIANT.

#include "activation.h"
#include "attention.h"
#include "bf16.h"
#include "kernels.h"
#include "linear.h"
#include "rotary.h"

namespace lightserve {

extern const Kernels LS_VARIANT;
const Kernels LS_VARIANT = {linear_packed, linear_float, linear_bf16, rms_norm, activate, rotary_write_kv, attention};

}  // namespace lightserve
