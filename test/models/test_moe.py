"""Whole models with experts: on the Triton kernels, with fixed sums, with padding, and kind by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import LoraArgs, ModelInput
from lightserve.models.registry import get_model_class
from test.models.architectures.case import Tiny, build, hf_logits
from test.models.architectures.moe import CASES
from test.models.session import Session
from test.models.test_architectures import ON_GPU, TOLERANCE
from test.models.tiny import ONE_RANK, build_model, model_args

PROMPT = [5, 17, 3, 99, 42, 8, 1, 77, 2]
OTHER = [64, 7, 11]


@pytest.fixture(autouse=True)
def _definitions() -> Iterator[None]:
    yield
    ops.use_backend(ops.REFERENCE)


def session_of(tiny: Tiny) -> Session:
    return Session(build_model(tiny.config_json, tiny.checkpoint()))


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="test_architectures.py runs the kernels there")
def test_kernels_in_the_interpreter_give_the_logits_of_transformers() -> None:
    tiny = build(CASES["gpt_oss"])
    ops.use_backend("triton")
    session = session_of(tiny)

    prefill = session.step({0: OTHER})
    decode = session.step({0: [8]})

    for ours, prompts in ((prefill, [OTHER]), (decode, [[*OTHER, 8]])):
        theirs = torch.stack([hf_logits(tiny.hf, ids)[-1] for ids in prompts])
        assert (ours - theirs).abs().max() <= TOLERANCE[torch.float32] * theirs.abs().max()


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "gpt_oss"])
def test_a_request_gets_the_same_bits_alone_and_beside_others(name: str) -> None:
    tiny = build(CASES[name])
    ops.use_backend(ops.batch_invariant("cpu"), "cpu")
    alone, together = session_of(tiny), session_of(tiny)

    expected = [alone.step({0: PROMPT}), alone.step({0: [7]})]
    both = [together.step({1: OTHER, 0: PROMPT}), together.step({1: [1], 0: [7]})]

    for one, two in zip(expected, both, strict=True):
        assert torch.equal(one[-1], two[-1])


def test_a_shared_expert_with_a_gate_is_one_of_the_experts_unless_it_takes_adapters() -> None:
    tiny = build(CASES["qwen2_moe-norm"])
    args = [model_args(tiny.config_json, tiny.checkpoint(), ONE_RANK) for _ in range(2)]
    args[1] = replace(args[1], lora=LoraArgs(1, 8))

    alone, apart = (get_model_class("qwen2_moe")(each).layer_weights[1].ffn for each in args)  # type: ignore[attr-defined]

    assert alone.shared is alone.shared_gate is None
    assert alone.experts.method.params.num_experts == tiny.hf.config.num_experts + 1
    assert apart.shared is not None
    assert apart.experts.method.params.num_experts == tiny.hf.config.num_experts


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss"])
def test_padding_rows_are_routed_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding of a captured graph writes to a slot of its own."""
    tiny = build(CASES[name])
    ops.use_backend("cpu")
    chosen: list[Tensor] = []
    compute = ops.experts.impls["cpu"]

    def spy(x: Tensor, ids: Tensor, weights: Tensor, params: ops.ExpertsParams) -> Tensor:
        chosen.append(ids)
        return compute(x, ids, weights, params)

    monkeypatch.setattr(ops.experts, "_active", spy)
    plain, padded = session_of(tiny), session_of(tiny)
    expected = [plain.step({0: PROMPT}), plain.step({0: [7]})]

    prefill = padded.step({0: PROMPT})
    step = padded.input_of({0: [7]})
    decode = padded.model.forward(with_padding(step, padded, rows=3))

    assert (chosen[-1][1:] == ops.NO_EXPERT).all()
    assert (chosen[-1][:1] != ops.NO_EXPERT).all()
    assert torch.equal(prefill, expected[0])
    torch.testing.assert_close(decode[:1], expected[1], rtol=1e-5, atol=1e-5)


def with_padding(step: ModelInput, session: Session, rows: int) -> ModelInput:
    """A decode step with padding behind its only request, as ``InferBatch`` packs it."""
    slot = session.model.mem_manager.padding_slot
    for buffer in session.model.mem_manager.buffers:
        buffer[:, slot] = 0
    row = session.model.req_manager.padding_row
    session.model.req_manager.req_to_token[row] = slot

    def extended(column: Tensor, value: int) -> Tensor:
        return torch.cat((column, column.new_full((rows,), value)))

    attn = step.attn
    starts = torch.arange(1 + rows, dtype=torch.int32)
    batch = ops.AttnBatch(
        attn.req_to_token,
        extended(attn.b_req_idx, row),
        starts,
        extended(attn.b_seq_len, 1),
        extended(attn.b_ready_cache_len, 0),
    )
    ids, positions = extended(step.input_ids, 0), extended(step.position_ids, 0)
    return ModelInput(ids, positions, extended(step.mem_index, slot), batch, is_prefill=False)


@pytest.mark.parametrize(("name", "kinds"), [("glm4_moe", 2), ("qwen2_moe", 2), ("mixtral", 1), ("gpt_oss", 2)])
def test_a_rehearsal_runs_dense_layers_and_layers_of_experts(name: str, kinds: int) -> None:
    tiny = build(CASES[name])
    model = session_of(tiny).model

    with model.distinct_layers_only():
        assert len(model.layers_infer) == kinds
