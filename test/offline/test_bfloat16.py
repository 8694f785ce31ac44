"""``--data_type bfloat16`` on a CPU: weights in half the memory, and float32 between the products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightserve.common.cpu_kernel._library import library
from lightserve.offline.llm import LLM
from test.ops.cases import needs_bf16

pytestmark = needs_bf16

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are numbers in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, initializer_range=0.2, **sizes))
    folder = tmp_path_factory.mktemp("model")
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def widens() -> Iterator[None]:
    """As on a CPU without instructions for bfloat16."""
    assert library is not None
    library.ls_use_variant(library.ls_num_variants() - 1)
    yield
    library.ls_use_variant(0)


def opened(folder: Path, data_type: str) -> LLM:
    return LLM(str(folder), device="cpu", data_type=data_type, max_total_token_num=512, max_req_total_len=128)


def logprobs(llm: LLM) -> list[float]:
    (result,) = llm.generate([PROMPT], max_new_tokens=1, temperature=0.0, prompt_logprobs=1)
    assert result.prompt_logprobs is not None
    return [token.logprob for token in result.prompt_logprobs if token is not None and token.logprob is not None]


def test_weights_take_half_the_memory_and_logprobs_are_close(folder: Path) -> None:
    narrow, wide = opened(folder, "bfloat16"), opened(folder, "float32")

    assert narrow.worker.model.args.dtype == torch.float32
    head = narrow.worker.model.pre_post_weight.lm_head.method
    assert getattr(head, "weight").dtype == torch.bfloat16  # noqa: B009  methods without one have no such field
    assert logprobs(narrow) == pytest.approx(logprobs(wide), abs=0.1)


def test_a_cpu_without_instructions_says_so_and_loses_nothing(folder: Path, widens: None) -> None:
    narrow = opened(folder, "bfloat16")

    assert narrow.worker.dtype_and_device == "in bfloat16 (computed in float32: this CPU has no AMX) on cpu"
    assert logprobs(narrow) == pytest.approx(logprobs(opened(folder, "float32")), abs=1e-5)
