"""Fused operators give what the ops of their names define."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lightserve.ops
from lightserve.common import ops
from lightserve.common.device import base
from test.aten.devices import each_device, on
from test.ops.cases import ARGS, FLOATS, TOLERANCE, attention_args, randn

ROWS, WIDTH = 5, 64
WITH_ARGUMENTS_OF_THEIR_OWN = {"context_attention", "route", "token_attention"}
OF_THE_OP = [name for name in lightserve.ops.FUSED if name not in WITH_ARGUMENTS_OF_THEIR_OWN]
IN_PLACE = ["add_rms_norm", "rotary", "write_kv", "top_k_top_p_min_p"]
FUSED = torch.ops.lightserve


def args_of(name: str, device: str) -> list[Any]:
    return list(ARGS[name](ROWS, torch.float32, on(device))[:4])  # without the masks of sample


def copy(arg: Any) -> Any:
    return arg.clone() if isinstance(arg, Tensor) else arg


def is_float(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point()


@each_device
@pytest.mark.parametrize("name", OF_THE_OP)
@pytest.mark.parametrize("spacing", [1, 2], ids=["rows", "gaps"])
def test_a_fused_operator_is_the_op_of_its_name(device: str, name: str, spacing: int) -> None:
    lightserve.ops.enable(device=device)
    wanted_args = args_of(name, device)
    spaced = [is_float(arg) and (name, number) != ("write_kv", 2) for number, arg in enumerate(wanted_args)]
    args = [
        arg.repeat_interleave(spacing, -1)[..., ::spacing] if is_spaced else copy(arg)
        for arg, is_spaced in zip(wanted_args, spaced, strict=True)
    ]
    expected = ops.OPS[name].impls[ops.REFERENCE](*wanted_args)

    out = getattr(FUSED, name)(*args)

    if expected is not None:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for after, wanted in zip(args, wanted_args, strict=True):
        torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-5)


@each_device
def test_the_sum_reaches_a_residual_that_is_no_matrix(device: str) -> None:
    lightserve.ops.enable(device=device)
    residual = randn(2, 2 * ROWS, WIDTH, device=on(device))[:, :ROWS]
    x, weight = randn(2, ROWS, WIDTH, device=on(device), seed=1), randn(WIDTH, device=on(device), seed=2)
    expected = residual + x

    out = FUSED.add_rms_norm(x, residual, weight, 1e-5)

    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(out, F.rms_norm(expected, (WIDTH,), weight, 1e-5), rtol=1e-5, atol=1e-5)


def packed(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values, of texts of 3, 1 and 7 tokens, 4 and 2 heads."""
    q, kv = (randn(11, 4, 64, dtype=dtype, device=on(device), seed=seed) for seed in (1, 2))
    return q, kv, torch.tensor([0, 3, 4, 11], device=on(device))


def by_torch(q: Tensor, kv: Tensor, is_causal: bool) -> Tensor:
    k, v = kv.transpose(0, 1).chunk(2)
    return F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=is_causal, scale=0.125, enable_gqa=True
    )[0].transpose(0, 1)


@each_device
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_of_packed_texts_is_that_of_torch_for_each(device: str, is_causal: bool, dtype: torch.dtype) -> None:
    if device == "interpreted" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's dot is wrong in bfloat16")
    lightserve.ops.enable(device=device)
    q, kv, starts = packed(dtype, device)

    out = FUSED.context_attention(q, kv, starts, 7, 0.125, is_causal)

    assert out.dtype == dtype
    for begin, end in ((0, 3), (3, 4), (4, 11)):
        expected = by_torch(q[begin:end].float(), kv[begin:end].float(), is_causal)
        torch.testing.assert_close(out[begin:end].float(), expected, **TOLERANCE[dtype])


@each_device
@pytest.mark.parametrize("window", [None, 4])
def test_decode_attention_reads_the_slots_of_each_request(device: str, window: int | None) -> None:
    lightserve.ops.enable(device=device)
    q, cache, batch, options = attention_args([(9, 1), (3, 1)], (4, 2), 64, torch.float32, on(device))
    table = batch.req_to_token[batch.b_req_idx.long()]

    out = FUSED.token_attention(q, cache, table, batch.b_seq_len, options.scale, window)

    for row, seq_len in enumerate(batch.b_seq_len.tolist()):
        first = 0 if window is None else max(seq_len - window, 0)
        kv = cache[table[row, first:seq_len].long()]
        torch.testing.assert_close(out[row : row + 1], by_torch(q[row : row + 1], kv, False), rtol=1e-5, atol=1e-5)


@each_device
@pytest.mark.parametrize("renormalizes", [False, True])
def test_experts_are_those_of_the_largest_probabilities(device: str, renormalizes: bool) -> None:
    lightserve.ops.enable(device=device)
    logits = randn(ROWS, 20, device=on(device))
    expected, expected_ids = logits.softmax(-1).topk(3)
    expected = expected / expected.sum(-1, keepdim=True) if renormalizes else expected

    ids, weights = FUSED.route(logits, 3, renormalize=renormalizes)

    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="score is 'relu'; there are softmax and sigmoid"):
        FUSED.route(logits, 3, score="relu")


@pytest.mark.parametrize("name", IN_PLACE)
def test_one_that_writes_in_place_refuses_tensors_that_require_a_gradient(name: str) -> None:
    args, expected = args_of(name, "cpu"), args_of(name, "cpu")
    number = 2 if name == "write_kv" else 0
    args[number] = args[number].requires_grad_() * 1

    with pytest.raises(RuntimeError, match=rf"lightserve::{name} writes into its arguments and has no backward pass"):
        getattr(FUSED, name)(*args)
    with torch.no_grad():
        getattr(FUSED, name)(*args)

    ops.OPS[name].impls[ops.REFERENCE](*expected)
    torch.testing.assert_close(args[number], expected[number], rtol=1e-5, atol=1e-5)


def test_tensors_of_another_device_than_the_enabled_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_bound", SimpleNamespace(name="npu", torch_type="npu"))

    with pytest.raises(ValueError, match=r"rms_norm: the tensors are on cpu, .* the current device of npu; move"):
        FUSED.rms_norm(randn(ROWS, WIDTH), randn(WIDTH), 1e-5)


def test_a_fused_operator_says_that_it_has_no_backward_pass() -> None:
    x = randn(ROWS, WIDTH).requires_grad_()

    with pytest.raises(RuntimeError, match=r"backward through lightserve.silu_and_mul.* but no autograd formula"):
        torch.ops.lightserve.silu_and_mul(x).sum().backward()


COMPILED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "silu_and_mul": lambda: (randn(ROWS, WIDTH),),
    "add_rms_norm": lambda: (randn(ROWS, WIDTH), randn(ROWS, WIDTH, seed=1), randn(WIDTH, seed=2), 1e-5),
    "context_attention": lambda: (*packed(torch.float32, "cpu"), 7, 0.125),
    "route": lambda: (randn(ROWS, 20), 3),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_fused_operator_is_compiled_in_a_graph(name: str) -> None:
    call = getattr(FUSED, name)
    compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
    args, expected_args = COMPILED[name](), COMPILED[name]()

    torch.testing.assert_close(compiled(*args), call(*expected_args))
    torch.testing.assert_close(args, expected_args)
