"""What the ops over a row of logits share: one program walks the row in blocks."""

BLOCK = 4096  # 16 floats a lane of WARPS warps, four 16-byte loads in flight
WARPS = 8
