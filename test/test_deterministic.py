"""Logprobs are the same bits whatever else is computed, cached, or cut into chunks.

On a GPU they are with ``deterministic``; on a CPU with the C library also without it, in float32, bfloat16 and packed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.text.logprobs import PromptToken
from lightserve.worker.sampling.logprobs import ranked_logprobs
from test.ops.cases import needs_bf16, needs_library

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
FLAGS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "data_type": "float32"},
    "bfloat16": {"device": "cpu", "data_type": "bfloat16"},
    "packed": {"device": "cpu", "data_type": "float32", "quantization": "w4"},
    "packed, 8 bits": {"device": "cpu", "data_type": "float32", "quantization": "w4", "packed_input_bits": 8},
    "deterministic": {"device": "cpu", "data_type": "float32", "deterministic": True},
    "cuda": {"device": "cuda", "data_type": "bfloat16", "deterministic": True},
}
MARKS = {name: [needs_library] for name in ("cpu", "packed", "packed, 8 bits")} | {
    "bfloat16": [needs_bf16],
    "cuda": [pytest.mark.gpu],
}
each_kind = pytest.mark.parametrize(
    "flags", [pytest.param(flags, id=name, marks=MARKS.get(name, [])) for name, flags in FLAGS.items()]
)
LENGTH = 200
OUTPUT_LEN = 200
CONTINUED = 8  # tokens after a cut: other bits of the prompt's keys show in the first
GREEDY = GenerationParams.of(max_new_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)
WITH_PROMPT = GenerationParams.of(max_new_tokens=8, temperature=0.0, logprobs=5, prompt_logprobs=2, ignore_eos=True)
OTHER = GenerationParams.of(max_new_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
Bits = tuple[list[int], list[float], list[list[tuple[int, float]]]]


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 4096) for _ in range(length)]


def bits(generation: Generation) -> Bits:
    return generation.token_ids, generation.logprobs, generation.top_logprobs


def make(folder: Path, flags: dict[str, Any], **options: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return LLM(
        str(folder),
        load_format="dummy",
        **{"max_total_token_num": 6000, "batch_max_tokens": 2048} | flags | options,
    )


@each_kind
def test_a_request_continues_from_any_of_its_tokens_in_the_same_way(tmp_path: Path, flags: dict[str, Any]) -> None:
    """As after a worker was replaced: what was decoded token by token is computed as one prompt."""
    decoding, replaced = (make(tmp_path, flags) for _ in range(2))
    cuts = (1, 20, 63, 64, 65, 100, 190)
    prompts = [prompt(seed, 3) for seed in range(len(cuts))]
    decoded = decoding.generate(prompts, GREEDY.replace(max_new_tokens=OUTPUT_LEN))

    for given, whole, cut in zip(prompts, decoded, cuts, strict=True):
        rest = replaced.generate([given + whole.token_ids[:cut]], GREEDY.replace(max_new_tokens=CONTINUED))[0]

        assert rest.token_ids == whole.token_ids[cut : cut + CONTINUED]
        assert rest.logprobs == whole.logprobs[cut : cut + CONTINUED]


@each_kind
def test_no_other_request_changes_a_bit_of_a_requests_logprobs(tmp_path: Path, flags: dict[str, Any]) -> None:
    whole, in_chunks = (make(tmp_path, flags, batch_max_tokens=tokens) for tokens in (2048, 64))
    ids = prompt(0, LENGTH)
    others = [prompt(seed, 1 + seed * 3) for seed in range(1, 32)]
    first = whole.generate([ids], WITH_PROMPT)[0]  # computes all of its prompt, and leaves it in the cache
    alone: list[PromptToken] | None = first.prompt_logprobs

    cached = whole.generate([ids], GREEDY)[0]
    among_others = whole.generate([*others[:10], ids, *others[10:]], [*[OTHER] * 10, WITH_PROMPT, *[OTHER] * 21])[10]
    chunked = in_chunks.generate([ids], WITH_PROMPT)[0]
    chunked_among_others = in_chunks.generate([*others, ids], [*[OTHER] * 31, WITH_PROMPT])[31]

    assert len(first.logprobs) == 8
    assert alone is not None
    assert len(alone) == LENGTH
    for again in (cached, among_others, chunked, chunked_among_others):
        assert bits(again) == bits(first)
    for again in (among_others, chunked, chunked_among_others):
        assert again.prompt_logprobs == alone


@each_kind
def test_preemption_changes_no_bit_of_a_requests_logprobs(tmp_path: Path, flags: dict[str, Any]) -> None:
    small, large = (make(tmp_path, flags, max_total_token_num=tokens) for tokens in (500, 6000))
    small.generate([[5]] * 40, GREEDY.replace(max_new_tokens=2))  # so that it takes answers to be short
    prompts, params = [prompt(seed, 20) for seed in range(8)], GREEDY.replace(max_new_tokens=100)

    paused = small.generate(prompts, params)

    assert small._scheduler.num_preemptions > 0
    assert list(map(bits, paused)) == list(map(bits, large.generate(prompts, params)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_logprob_of_a_prompt_token_depends_on_no_other_row(device: str) -> None:
    logits = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16) * 3
    targets = torch.arange(200, device=device)
    together = ranked_logprobs(logits, targets, 2)

    for begin, end in ((0, 1), (1, 3), (3, 67), (67, 200)):
        apart = ranked_logprobs(logits[begin:end], targets[begin:end], 2)
        for part, whole in zip(apart, together, strict=True):
            torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=0)
