"""The result of a row has the same bits in every batch, chunk and thread, for all instructions of the C library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, library
from test.ops.cases import (
    EPS,
    alibi_slopes,
    attention_args,
    batch_of,
    context_attention_args,
    ints,
    needs_bf16,
    needs_library,
    randn,
)

pytestmark = [needs_library, pytest.mark.usefixtures("variant")]

SLICES = [(0, 1), (1, 3), (3, 6), (6, 10), (5, 21), (69, 70), (0, 70)]
LENGTH, HEADS, DIM = 300, (6, 2), 64  # three splits of 128 keys
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "wide window": {"window": 200},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": alibi_slopes(HEADS[0], "cpu")},
    "sinks": {"sinks": randn(HEADS[0], seed=8)},
}


@pytest.fixture(autouse=True)
def _native_backend(_reference_backend: None) -> None:
    ops.use_backend(BACKEND, "cpu")


def assert_rows_are_alike(compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = compute(x.clone())
    for begin, end in SLICES:
        assert torch.equal(compute(x[begin:end].clone()), whole[begin:end])


@pytest.mark.parametrize(("wide_in", "wide_out"), [(33, 20), (96, 40), (576, 101), (2100, 12), (1536, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
def test_a_product_does_not_depend_on_the_other_rows(
    wide_in: int, wide_out: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = randn(wide_out, wide_in, seed=1, dtype=dtype), randn(wide_out, seed=2) if has_bias else None

    assert_rows_are_alike(lambda x: ops.linear(x, weight, bias), randn(70, wide_in))


@pytest.mark.parametrize("name", ["add_rms_norm_linear", "add_rms_norm_gate_up"])
@pytest.mark.parametrize("width", [40, 576])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
def test_a_fused_norm_and_product_do_not_depend_on_the_other_rows(name: str, width: int, dtype: torch.dtype) -> None:
    weight, norm, op = randn(24, width, seed=1, dtype=dtype), randn(width, seed=2), ops.OPS[name]

    def compute(rows: Tensor) -> Tensor:
        out, residual = op(rows[0].clone(), rows[1].clone(), norm, EPS, weight)
        return torch.cat((out, residual), dim=1)

    both = randn(2, 70, width)
    whole = compute(both)
    for begin, end in SLICES:
        assert torch.equal(compute(both[:, begin:end]), whole[begin:end])


@pytest.mark.parametrize("width", [20, 33, 576])
def test_a_norm_does_not_depend_on_the_other_rows(width: int) -> None:
    weight = randn(width, seed=1)

    assert_rows_are_alike(lambda x: ops.rms_norm(x, weight, EPS), randn(70, width))
    assert_rows_are_alike(lambda x: ops.add_rms_norm(x, x.clone(), weight, EPS), randn(70, width))


@pytest.mark.parametrize("width", [28, 33, 128])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_an_activation_does_not_depend_on_the_other_rows(name: str, width: int) -> None:
    assert_rows_are_alike(ops.OPS[name], randn(70, 2 * width) * 4)


@pytest.mark.parametrize("dim", [64, 80])
def test_rotary_positions_do_not_depend_on_the_other_rows(dim: int) -> None:
    q, kv = randn(70, 4, dim), randn(70, 4, dim, seed=1)
    angles = torch.arange(70)[:, None] * randn(dim // 2, seed=2)

    def compute(begin: int, end: int) -> tuple[Tensor, Tensor]:
        rotated, cache = q[begin:end].clone(), torch.zeros(70, 4, dim)
        cos, sin = angles[begin:end].cos(), angles[begin:end].sin()
        slots = torch.arange(begin, end, dtype=torch.int32)
        ops.rotary_write_kv(rotated, kv[begin:end].clone(), cos, sin, slots, cache)
        return rotated, cache[begin:end]

    whole = compute(0, 70)
    for begin, end in SLICES:
        for part, of_all in zip(compute(begin, end), whole, strict=True):
            assert torch.equal(part, of_all[begin:end])


class Prompt:
    """A request whose queries are computed in any chunks."""

    def __init__(self, **options: Any) -> None:
        self.q, self.kv, self.cache, self.batch, plain = context_attention_args(
            [(0, LENGTH)], HEADS, DIM, torch.float32, "cpu"
        )
        self.options = replace(plain, **options)

    def attend(self, ready: int, end: int) -> Tensor:
        part = replace(self.batch, b_seq_len=ints([end], "cpu"), b_ready_cache_len=ints([ready], "cpu"), plans={})
        if end - ready == 1:
            return ops.token_attention(self.q[ready:end], self.cache, part, self.options)
        return ops.context_attention(self.q[ready:end], self.kv[ready:end], self.cache, part, self.options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_does_not_depend_on_the_chunks_of_a_prompt(options: dict[str, Any]) -> None:
    prompt = Prompt(**options)
    whole = prompt.attend(0, LENGTH)

    for ready, end in [(0, 64), (64, 128), (128, 300), (1, 299), (37, 99), (127, 129), (255, 257), (7, 9), (100, 203)]:
        assert torch.equal(prompt.attend(ready, end), whole[ready:end])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_decoded_token_has_the_attention_of_one_in_a_prompt(options: dict[str, Any]) -> None:
    prompt = Prompt(**options)
    whole = prompt.attend(0, LENGTH)

    for position in (0, 1, 49, 50, 127, 128, 200, 255, 256, 299):
        assert torch.equal(prompt.attend(position, position + 1), whole[position : position + 1])


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    assert library is not None
    yield library.ls_set_threads
    library.ls_set_threads(torch.get_num_threads())


def test_the_number_of_threads_does_not_change_attention(set_threads: Callable[[int], None]) -> None:
    prompt, chunks = Prompt(), ((0, LENGTH), (100, 180), (LENGTH - 1, LENGTH))
    set_threads(1)
    alone = [prompt.attend(*chunk) for chunk in chunks]

    set_threads(3)
    shared = [prompt.attend(*chunk) for chunk in chunks]

    assert all(map(torch.equal, alone, shared))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_does_not_depend_on_the_other_requests(options: dict[str, Any]) -> None:
    lens = [(5, 1), (200, 1), (64, 30), (0, 1), (33, 140), (290, 2)]
    q, cache, batch, plain = attention_args(lens, HEADS, DIM, torch.float32, "cpu")
    options_of_all = replace(plain, **options)
    together = ops.context_attention(q, q, cache, batch, options_of_all)

    for i, (ready, new) in enumerate(lens):
        row = int(batch.b_start_loc[i])
        alone = batch_of([(ready, new)], batch.req_to_token, [int(batch.b_req_idx[i])])
        own = q[row : row + new]
        assert torch.equal(ops.context_attention(own, own, cache, alone, options_of_all), together[row : row + new])
