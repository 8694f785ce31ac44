"""How large the KV pool of layers with a sliding window is beside that of the others."""

from __future__ import annotations

MIN_SHARE = 1 / 8  # contexts of 8 windows: 4 k tokens with Gemma 3 1B, 8 k with Gemma 3 27B, 1.5 k with gpt-oss
LENGTHS_PER_CONTEXT = 4  # contexts are a quarter of the longest request or shorter
MIN_GAIN = 1.2  # a second pool must hold so many times the tokens of a single one


def windowed_share(retained: int, max_len: int) -> float:
    """Of the windowed pool, in tokens of the other pool. ``retained``: windowed slots that a running request keeps."""
    return max(MIN_SHARE, LENGTHS_PER_CONTEXT * retained / max_len)
