"""Block size of the ops that walk over a row of logits."""

BLOCK = 4096  # 16 floats in each lane of WARPS warps, four 16-byte loads in flight
WARPS = 8
