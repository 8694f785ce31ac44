"""Gated DeltaNet, Kimi Delta Attention and Mamba2, by the definition and by every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from lightserve.common import ops
from lightserve.conformance.inputs.state import (
    DECODES,
    MIXED,
    NO_ROW,
    SMALL_DELTA,
    SMALL_MAMBA,
    SNAPSHOTS,
    DeltaShape,
    MambaShape,
    Request,
    delta_args,
    mamba_args,
    state_batch,
)
from test.ops.cases import TOLERANCE, assert_close, device_of, each_backend_and_dtype, wide

CLOSE = TOLERANCE[torch.float32]
ONE: list[Request] = [(37, 0, 1)]
BATCHES = {"mixed": MIXED, "decodes": DECODES, "snapshots": SNAPSHOTS}
each_batch = pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)


def wide_inputs(inputs: Any) -> Any:
    """With the tensors in float32."""
    return inputs._make(wide(value) if isinstance(value, Tensor) else value for value in inputs)


def slice_of(inputs: Any, tokens: slice) -> Any:
    return inputs._make(value[tokens] if isinstance(value, Tensor) else value for value in inputs)


def assert_states_close(states: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(states, expected, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_gated_delta_rule_is_that_of_transformers(has_norm: bool, by_channel: bool, is_chunked: bool) -> None:
    inputs, states, batch = delta_args(ONE, SMALL_DELTA, torch.float32, "cpu", by_channel)
    inputs = inputs._replace(has_norm=has_norm, k=inputs.k if has_norm else inputs.k / 8)
    functions: Any = {
        (False, False): qwen.torch_recurrent_gated_delta_rule,
        (False, True): qwen.torch_chunk_gated_delta_rule,
        (True, False): kimi.recurrent_kimi_delta_attention,
        (True, True): kimi.chunk_kimi_delta_attention,
    }
    tensors = [inputs.q.repeat_interleave(2, 1), inputs.k.repeat_interleave(2, 1), *inputs[2:5]]
    expected, final = functions[by_channel, is_chunked](
        *(tensor[None] for tensor in tensors),
        initial_state=states[0].mT[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=has_norm,
    )

    out = ops.gated_delta_rule(inputs, states, batch)

    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1], final[0].mT, rtol=1e-4, atol=1e-4)


def test_mamba_scan_is_that_of_transformers() -> None:
    inputs, params, states, batch = mamba_args(ONE, SMALL_MAMBA, torch.float32, "cpu")
    params = params._replace(dt_limits=(0.1, 0.6))
    scanned = [tensor[None] for tensor in (inputs.x, inputs.dt)], [tensor[None] for tensor in (inputs.b, inputs.c)]
    expected, final = mamba2_chunk_scan(
        *scanned[0],
        params.a,
        *scanned[1],
        16,
        D=params.d,
        dt_bias=params.dt_bias,
        initial_states=states[:1],
        dt_softplus=True,
        dt_limit=params.dt_limits,
        return_final_states=True,
    )

    out = ops.mamba_scan(inputs, params, states, batch)

    torch.testing.assert_close(out, expected[0], **CLOSE)
    torch.testing.assert_close(states[1], final[0], **CLOSE)


def test_a_decode_of_mamba_is_the_state_update_of_transformers() -> None:
    inputs, params, states, batch = mamba_args([(1, 0, 0), (1, 1, 1)], SMALL_MAMBA, torch.float32, "cpu")
    expected_states = states[:2].clone()
    heads = (6, 20)
    expected = mamba2_selective_state_update(
        expected_states,
        inputs.x,
        inputs.dt[..., None].expand(-1, *heads),
        params.a[:, None, None].expand(*heads, 48),
        inputs.b,
        inputs.c,
        params.d[:, None].expand(heads),
        dt_bias=params.dt_bias[:, None].expand(heads),
        dt_softplus=True,
    )

    out = ops.mamba_scan(inputs, params, states, batch)

    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(states[:2], expected_states, **CLOSE)


@each_backend_and_dtype(ops.gated_delta_rule)
@each_batch
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("shape", [SMALL_DELTA, (1, 1, 64, 16)], ids=str)
def test_gated_delta_rule_matches_its_definition(
    backend: str, dtype: torch.dtype, requests: list[Request], by_channel: bool, shape: DeltaShape
) -> None:
    inputs, states, batch = delta_args(requests, shape, dtype, device_of(backend), by_channel)
    expected_states = states.clone()
    expected = ops.gated_delta_rule(wide_inputs(inputs), expected_states, batch)

    out = ops.gated_delta_rule.impls[backend](inputs, states, batch)

    assert_close(out, expected, dtype)
    assert_states_close(states, expected_states, dtype)


@each_backend_and_dtype(ops.mamba_scan)
@each_batch
@pytest.mark.parametrize("shape", [SMALL_MAMBA, (1, 2, 64, 16)], ids=str)
def test_mamba_scan_matches_its_definition(
    backend: str, dtype: torch.dtype, requests: list[Request], shape: MambaShape
) -> None:
    inputs, params, states, batch = mamba_args(requests, shape, dtype, device_of(backend))
    expected_states = states.clone()
    expected = ops.mamba_scan(wide_inputs(inputs), params, expected_states, batch)

    out = ops.mamba_scan.impls[backend](inputs, params, states, batch)

    assert_close(out, expected, dtype)
    assert_states_close(states, expected_states, dtype)


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("requests", [[*MIXED, (1, 8, 8)], SNAPSHOTS], ids=["mixed", "snapshots"])
def test_states_in_bfloat16_are_rounded_when_they_are_stored(backend: str, requests: list[Request]) -> None:
    inputs, states, batch = delta_args(requests, SMALL_DELTA, torch.float32, device_of(backend))
    stored = states.bfloat16()
    exact = stored.float()
    expected = ops.gated_delta_rule(inputs, exact, batch)

    out = ops.gated_delta_rule.impls[backend](inputs, stored, batch)

    # of the definition, which goes on behind a snapshot with the rounded state
    tolerance = CLOSE if batch.snapshots is None else TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(stored, exact.bfloat16(), equal_nan=True, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("cut", [1, 5, 16, 31])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_request_may_be_cut_anywhere(backend: str, cut: int, by_channel: bool) -> None:
    device = device_of(backend)
    inputs, states, batch = delta_args([(37, 0, 1)], SMALL_DELTA, torch.float32, device, by_channel)
    gated_delta_rule = ops.gated_delta_rule.impls[backend]
    whole = gated_delta_rule(inputs, states, batch)

    first = gated_delta_rule(slice_of(inputs, slice(cut)), states, state_batch([(cut, 0, 2)], device))
    second = gated_delta_rule(slice_of(inputs, slice(cut, None)), states, state_batch([(37 - cut, 2, 2)], device))

    torch.testing.assert_close(torch.cat((first, second)), whole, **CLOSE)
    torch.testing.assert_close(states[2], states[1], **CLOSE)


@pytest.mark.parametrize("count", [1, 5, 36])
def test_a_snapshot_is_the_state_after_the_tokens_before_it(count: int) -> None:
    inputs, states, batch = delta_args([(37, 0, 1)], SMALL_DELTA, torch.float32, "cpu")
    whole = ops.gated_delta_rule(inputs, states, batch)
    ops.gated_delta_rule(slice_of(inputs, slice(count)), states, state_batch([(count, 0, 2)], "cpu"))

    out = ops.gated_delta_rule(inputs, states, state_batch([(37, 0, 3, 4, count)], "cpu"))

    torch.testing.assert_close(out, whole, **CLOSE)
    torch.testing.assert_close(states[3:5], states[1:3], **CLOSE)


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_state_that_decays_at_once_leaves_nothing_and_no_nan(backend: str, by_channel: bool) -> None:
    inputs, states, batch = delta_args([(40, 0, 1)], SMALL_DELTA, torch.float32, device_of(backend), by_channel)
    inputs = inputs._replace(log_decay=torch.full_like(inputs.log_decay, -90.0))

    out = ops.gated_delta_rule.impls[backend](inputs, states, batch)

    expected, fresh = states.clone(), replace(batch, b_read_row=torch.full_like(batch.b_read_row, NO_ROW), plans={})
    torch.testing.assert_close(out, ops.gated_delta_rule(inputs, expected, fresh), **CLOSE)
    torch.testing.assert_close(states[1], expected[1], **CLOSE)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_tokens_with_the_same_key_replace_one_another(backend: str) -> None:
    """Corrections of a chunk grow past float32 if they are computed from powers of the overlaps of its keys."""
    inputs, states, batch = delta_args([(64, NO_ROW, 0)], SMALL_DELTA, torch.float32, device_of(backend))
    inputs = inputs._replace(
        k=inputs.k[:1].expand_as(inputs.k).contiguous(),
        log_decay=torch.zeros_like(inputs.log_decay),
        beta=torch.ones_like(inputs.beta),
    )
    inputs = inputs._replace(q=inputs.k)

    out = ops.gated_delta_rule.impls[backend](inputs, states, batch)

    torch.testing.assert_close(out, inputs.v * 24**-0.5, **CLOSE)


def test_triton_refuses_a_state_in_half_precision() -> None:
    inputs, states, batch = delta_args(DECODES, SMALL_DELTA, torch.float16, device_of("triton"))

    with pytest.raises(ValueError, match=r"the states must be float32 or bfloat16, found torch\.float16"):
        ops.gated_delta_rule.impls["triton"](inputs, states.half(), batch)
