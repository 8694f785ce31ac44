from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from benchmark.engine.gguf_file import SHAPES, quantize_q4_k, save
from lightserve.offline.llm import LLM

Q4_K = GGMLQuantizationType.Q4_K


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_blocks_of_q4_k_hold_their_numbers_up_to_half_a_step(shift: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32) + np.float32(shift)
    groups = x.reshape(-1, 32)
    step = (groups.max(-1).clip(0) - groups.min(-1).clip(max=0)) / 15

    found = quants.dequantize(quantize_q4_k(x), Q4_K).reshape(-1, 32)

    assert np.all(np.abs(found - groups).max(-1) <= 1.2 * step)  # scales and minima are rounded too
    assert np.abs(found - groups).mean() < 0.35 * step.mean()


def test_zeros_stay_zeros() -> None:
    assert not quants.dequantize(quantize_q4_k(np.zeros((1, 256), dtype=np.float32)), Q4_K).any()


def test_a_file_of_a_shape_is_served_packed_as_expanded(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    save(path, Q4_K, SHAPES["tiny"])

    logprobs = []
    for quantization in ("gguf", "none"):
        llm = LLM(str(path), device="cpu", quantization=quantization, max_total_token_num=256, max_req_total_len=64)
        (result,) = llm.generate([[5, 6, 7]], max_new_tokens=4, temperature=0.0, logprobs=0)
        logprobs.append(result.logprobs)

    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-2)
