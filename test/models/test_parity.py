"""Every model gives the logits of transformers, for any split of the tokens into steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightserve.common import (
    cpu_kernel,  # noqa: F401  registers its backend
    ops,
    triton_kernel,  # noqa: F401  registers its backend
)
from lightserve.common.basemodel import LogitRows
from lightserve.parity.compare import compare_logits
from test.models.session import Session
from test.models.tiny import HF_CONFIGS, LLAMA, build_hf, build_ours, hf_logits

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# relative to the largest logit; rounding through two layers was measured at about a third of this
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PROMPTS = [[5, 17, 3, 99, 42, 8, 1, 77, 23, 64, 11, 9, 30], [77, 2, 130], [64], [1, 2, 3, 4, 5, 6, 7, 8]]


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert ours.isfinite().all()
    assert compare_logits(ours, theirs).relative <= TOLERANCE[dtype]


@pytest.fixture(params=["triton"] if ON_GPU else ["torch", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.use_backend(request.param)
    yield request.param
    ops.use_backend(ops.REFERENCE)


@pytest.fixture(params=HF_CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    model_name: str = request.param
    return model_name


def test_ragged_prompts_prefill_into_scattered_slots(name: str) -> None:
    hf = build_hf(name)

    ours = Session(build_ours(hf, device=DEVICE)).step(dict(enumerate(PROMPTS)))

    assert_same(ours, hf_logits(hf, PROMPTS))


def test_every_position_of_a_prompt_has_its_logits(name: str) -> None:
    hf = build_hf(name)

    ours = Session(build_ours(hf, device=DEVICE)).step({0: PROMPTS[0], 1: PROMPTS[1]}, logit_rows=LogitRows.ALL)

    with torch.inference_mode():
        theirs = [hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS[:2]]
    assert_same(ours, torch.cat(theirs))


@pytest.mark.parametrize("rows", [[0], [4, 1, 1, 15], []])
def test_any_rows_of_a_step_can_have_logits(rows: list[int]) -> None:
    hf = build_hf("llama-gqa")
    model = build_ours(hf, device=DEVICE)

    ours = Session(model).step({0: PROMPTS[0], 1: PROMPTS[1]}, logit_rows=torch.tensor(rows, device=DEVICE).long())

    with torch.inference_mode():
        theirs = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS[:2]])[rows]
    assert ours.shape == theirs.shape
    if rows:
        assert_same(ours, theirs)


def test_a_decode_step_can_have_the_logits_of_some_requests() -> None:
    hf = build_hf("llama-gqa")
    session = Session(build_ours(hf, device=DEVICE))
    session.step(dict(enumerate(PROMPTS)))

    ours = session.step({i: [40 + i] for i in range(4)}, logit_rows=torch.tensor([2, 0], device=DEVICE))

    assert_same(ours, hf_logits(hf, [[*PROMPTS[2], 42], [*PROMPTS[0], 40]]))


def test_logits_can_be_computed_a_few_rows_at_a_time() -> None:
    hf = build_hf("llama-gqa")
    session = Session(build_ours(hf, device=DEVICE))
    step = session.input_of({0: PROMPTS[0], 1: PROMPTS[1]})
    hidden = session.model.hidden_states(step)

    pieces = [session.model.logits(hidden, torch.arange(i, i + 4, device=DEVICE)) for i in range(0, 16, 4)]
    last = session.model.logits(hidden)

    with torch.inference_mode():
        theirs = torch.cat([hf(torch.tensor([prompt])).logits[0] for prompt in PROMPTS[:2]])
    assert_same(torch.cat(pieces).cpu(), theirs)
    assert_same(last.cpu(), theirs[[12, 15]])


def test_uneven_chunks_mixed_with_decode_rows(name: str) -> None:
    hf = build_hf(name)
    session = Session(build_ours(hf, device=DEVICE))
    session.step({0: PROMPTS[0][:5], 3: PROMPTS[3][:1]})
    session.step({0: PROMPTS[0][5:6], 1: PROMPTS[1], 3: PROMPTS[3][1:4]})

    ours = session.step({3: PROMPTS[3][4:], 1: [9], 0: PROMPTS[0][6:]})

    assert_same(ours, hf_logits(hf, [PROMPTS[3], [*PROMPTS[1], 9], PROMPTS[0]]))


def test_prefill_continues_a_prefix_that_another_request_computed(name: str) -> None:
    hf = build_hf(name)
    session = Session(build_ours(hf, device=DEVICE))
    session.step({0: PROMPTS[0]})
    session.share_prefix(0, 5, length=7)

    ours = session.step({5: [31, 32, 33], 1: PROMPTS[1]})

    assert_same(ours, hf_logits(hf, [[*PROMPTS[0][:7], 31, 32, 33], PROMPTS[1]]))


def test_decode_after_prefill(name: str) -> None:
    hf = build_hf(name)
    session = Session(build_ours(hf, device=DEVICE))
    session.step(dict(enumerate(PROMPTS)))
    grown = [list(prompt) for prompt in PROMPTS]

    for token in (11, 50, 7):
        ours = session.step({i: [token + i] for i in range(len(PROMPTS))})
        for i, ids in enumerate(grown):
            ids.append(token + i)

        assert_same(ours, hf_logits(hf, grown))


def test_decode_after_slots_were_freed_and_reused(name: str) -> None:
    hf = build_hf(name)
    session = Session(build_ours(hf, device=DEVICE))
    session.step(dict(enumerate(PROMPTS)))
    session.finish(0)
    session.finish(2)
    session.step({4: PROMPTS[3][::-1], 0: PROMPTS[1]})

    ours = session.step({3: [21], 4: [22], 0: [23], 1: [24]})

    theirs = [[*PROMPTS[3], 21], [*PROMPTS[3][::-1], 22], [*PROMPTS[1], 23], [*PROMPTS[1], 24]]
    assert_same(ours, hf_logits(hf, theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_within_its_tolerance(name: str, dtype: torch.dtype) -> None:
    hf = build_hf(name, dtype)
    session = Session(build_ours(hf, dtype=dtype, device=DEVICE))

    prefill = session.step(dict(enumerate(PROMPTS)))
    decode = session.step({i: [40 + i] for i in range(len(PROMPTS))})

    assert_same(prefill, hf_logits(hf, PROMPTS), dtype)
    assert_same(decode, hf_logits(hf, [[*p, 40 + i] for i, p in enumerate(PROMPTS)]), dtype)


def test_dynamic_rope_decodes_past_the_trained_length_as_transformers_does() -> None:
    HF_CONFIGS["llama-dynamic-rope"] = lambda: LLAMA(
        max_position_embeddings=8, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    )
    try:
        hf = build_hf("llama-dynamic-rope")
    finally:
        del HF_CONFIGS["llama-dynamic-rope"]
    session = Session(build_ours(hf, device=DEVICE, max_len=32))
    tokens = [5, 17, 3, 99, 42, 8, 1, 77, 23, 64, 11, 9]
    with torch.inference_mode():
        theirs = hf(torch.tensor([tokens[:6]]), use_cache=True)

    assert_same(session.step({0: tokens[:6]}), theirs.logits[:, -1])

    for token in tokens[6:]:
        with torch.inference_mode():
            theirs = hf(torch.tensor([[token]]), past_key_values=theirs.past_key_values, use_cache=True)
        assert_same(session.step({0: [token]}), theirs.logits[:, -1])
