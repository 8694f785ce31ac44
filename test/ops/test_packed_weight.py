"""Products of the C library with packed weights, against the definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, library
from lightserve.common.cpu_kernel.packed_weight import Packed, empty_packed, pack
from lightserve.common.ops import Int4Weight, Int8Weight, QuantizedWeight
from test.ops.cases import randn

pytestmark = pytest.mark.skipif(library is None, reason="the C library was not built")

PRODUCTS = {Int4Weight: "linear_int4", Int8Weight: "linear_int8"}
ROWS, COLUMNS = 20, 128  # rows: two blocks of 8 and a half
FORMATS = [
    pytest.param(kind, group, has_offsets, id=f"{kind.__name__}-{group}-{'offsets' if has_offsets else 'plain'}")
    for kind, groups in ((Int4Weight, (16, 32, 64)), (Int8Weight, (16, 32, COLUMNS)))
    for group in groups
    for has_offsets in (False, True)
]


def quantized(kind: type[QuantizedWeight], group: int, has_offsets: bool, spread: float = 1.0) -> QuantizedWeight:
    """Random codes; ``spread``: the largest scale over the smallest."""
    weight = kind.empty((ROWS, COLUMNS), group, torch.device("cpu"), has_offsets=has_offsets)
    weight.randomize_(torch.Generator().manual_seed(group), 0.05)
    weight.scales.mul_(randn(*weight.scales.shape).abs().add(0.5))
    weight.scales[0] /= spread
    if weight.offsets is not None:
        weight.offsets.copy_(randn(*weight.offsets.shape, seed=3) * 0.05)
    return weight


def multiply(weight: QuantizedWeight, x: Tensor, bias: Tensor | None = None, backend: str = BACKEND) -> Tensor:
    name = next(name for kind, name in PRODUCTS.items() if isinstance(weight, kind))
    out: Tensor = ops.OPS[name].impls[backend](x, weight, bias)
    return out


@pytest.mark.parametrize(("kind", "group", "has_offsets"), FORMATS)
def test_a_packed_product_is_that_of_the_definition_up_to_the_rounding_of_x(
    variant: str, kind: type[QuantizedWeight], group: int, has_offsets: bool
) -> None:
    weight, x, bias = quantized(kind, group, has_offsets), randn(5, COLUMNS), randn(ROWS, seed=4)
    packed = pack(weight)

    out = multiply(packed, x, bias)

    expected = torch.nn.functional.linear(x, weight.dequantize(), bias)
    assert isinstance(packed, Packed)
    assert (out - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("kind", "group", "has_offsets"), FORMATS)
def test_a_packed_product_of_numbers_that_need_no_rounding_is_exact(
    variant: str, kind: type[QuantizedWeight], group: int, has_offsets: bool
) -> None:
    weight = pack(quantized(kind, group, has_offsets))
    x = torch.randint(-127, 128, (18, COLUMNS), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127  # the largest number of each group becomes the code 127, so the scale is 1

    out = multiply(weight, x)

    torch.testing.assert_close(out, x @ weight.dequantize().T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("kind", "group", "has_offsets"), FORMATS)
def test_inputs_of_15_bits_make_a_packed_product_nearly_exact(
    variant: str, kind: type[QuantizedWeight], group: int, has_offsets: bool
) -> None:
    weight, x = pack(quantized(kind, group, has_offsets), input_bits=15), randn(5, COLUMNS)

    out = multiply(weight, x)

    expected = torch.nn.functional.linear(x, weight.dequantize())
    assert (out - expected).norm() < 2e-4 * expected.norm()  # 8 bits: up to 0.01


@pytest.mark.parametrize("input_bits", [8, 15])
@pytest.mark.parametrize(("kind", "group", "has_offsets"), FORMATS)
def test_a_packed_product_of_a_row_does_not_depend_on_the_rows_beside_it(
    variant: str, kind: type[QuantizedWeight], group: int, has_offsets: bool, input_bits: int
) -> None:
    weight, x = pack(quantized(kind, group, has_offsets), input_bits), randn(19, COLUMNS)
    alone = torch.cat([multiply(weight, row[None]) for row in x])

    for rows in (2, 3, 4, 7, 16, 19):
        assert torch.equal(multiply(weight, x[:rows]), alone[:rows])


@pytest.mark.parametrize(("kind", "group", "has_offsets"), FORMATS)
def test_rows_of_a_packed_weight_are_those_of_the_weight(
    kind: type[QuantizedWeight], group: int, has_offsets: bool
) -> None:
    weight, rows = quantized(kind, group, has_offsets), torch.tensor([19, 0, 9, 9])

    packed = pack(weight)

    torch.testing.assert_close(packed.rows(rows).dequantize(), weight.dequantize()[rows], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(packed.dequantize(), weight.dequantize(), rtol=1e-3, atol=1e-3)
    assert packed.shape == weight.shape


def test_scales_beyond_float16_are_stored_in_float32() -> None:
    weight = quantized(Int8Weight, 32, has_offsets=False, spread=1e8)
    packed = pack(weight)

    assert isinstance(packed, Packed)
    assert packed.descriptor.scale_bytes == 4
    torch.testing.assert_close(packed.dequantize(), weight.dequantize())


def test_a_weight_that_the_library_cannot_read_stays_as_it_is() -> None:
    weight = Int8Weight.empty((8, 40), 40, torch.device("cpu"))
    experts = Int8Weight.empty((2, 8, 64), 64, torch.device("cpu"))

    assert pack(weight) is weight
    assert pack(experts) is experts


def test_threads_that_share_a_product_do_not_change_it() -> None:
    assert library is not None
    weight = Int4Weight.empty((512, 512), 32, torch.device("cpu"), has_offsets=True)
    weight.randomize_(torch.Generator().manual_seed(1), 0.05)
    packed, x = pack(weight), randn(9, 512)
    library.ls_set_threads(1)
    alone = multiply(packed, x)

    try:
        library.ls_set_threads(3)
        with ThreadPoolExecutor(2) as callers:  # loops of two callers at once
            outs = list(callers.map(lambda _: multiply(packed, x), range(40)))
    finally:
        library.ls_set_threads(torch.get_num_threads())

    assert all(torch.equal(out, alone) for out in outs)


def test_an_empty_input_gives_an_empty_product() -> None:
    assert multiply(pack(quantized(Int4Weight, 32, has_offsets=True)), randn(0, COLUMNS)).shape == (0, ROWS)


def test_another_weight_is_packed_into_the_same_memory() -> None:
    first, second = (quantized(Int4Weight, 32, has_offsets=True, spread=spread) for spread in (1.0, 2.0))
    packed = empty_packed(first)
    assert packed is not None
    address = packed.codes.data_ptr()

    for weight in (first, second, first):
        packed.store_(weight)

        assert torch.equal(packed.dequantize(), pack(weight).dequantize())
        assert packed.descriptor.data == packed.codes.data_ptr() == address


def test_memory_grows_for_scales_that_need_float32_and_the_descriptor_knows_it() -> None:
    narrow, wide = (quantized(Int8Weight, 32, has_offsets=False, spread=spread) for spread in (1.0, 1e8))
    packed, x = empty_packed(narrow), randn(3, COLUMNS)
    assert packed is not None

    for weight in (narrow, wide, narrow, wide):
        packed.store_(weight)

        assert torch.equal(multiply(packed, x), multiply(pack(weight), x))
        assert packed.nbytes == pack(weight).nbytes
