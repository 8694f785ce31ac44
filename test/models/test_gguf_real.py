"""Real GGUF files give the same greedy text packed and expanded.

LIGHTSERVE_TEST_GEMMA and LIGHTSERVE_TEST_TOOL_MODEL may name files beside the default model's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightserve.common.device.cpu import CpuDevice
from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from test.real_model import PROMPTS

NAMED = [os.environ.get(name) for name in ("LIGHTSERVE_TEST_GEMMA", "LIGHTSERVE_TEST_TOOL_MODEL")]
FILES = [None, *(path for path in NAMED if path is not None and path.endswith(".gguf"))]
NEW_TOKENS = 8
COUNT = 4

pytestmark = pytest.mark.long


def greedy(path: str | None, quantization: str) -> list[list[int]]:
    llm = LLM(path, device="cpu", quantization=quantization, max_total_token_num=2048, max_req_total_len=512)
    assert ("packed" in llm.worker.dtype_and_device) == (quantization == "gguf")
    params = GenerationParams.of(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, temperature=0)
    return [generation.token_ids for generation in llm.generate(PROMPTS[:COUNT], params)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: "default" if path is None else Path(path).stem)
def test_greedy_text_of_packed_weights_is_that_of_expanded_ones(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "uses_library", False)  # it rounds the inputs of products
    assert greedy(path, "gguf") == greedy(path, "none")
