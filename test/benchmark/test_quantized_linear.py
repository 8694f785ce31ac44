from __future__ import annotations

import pytest
import torch

from benchmark.kernels import quantized_linear
from lightserve.bench.kernel_cases import InputFactory
from lightserve.errors import ServerError


def test_the_table_has_a_row_for_each_kernel_and_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    quantized_linear.main(["--device", "cpu", "--kernels", "bf16", "op:int4-o", "--rows", "1", "3"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32; copy ")
    found = [(line.split()[0], line.split()[3]) for line in lines[2:]]
    assert found == [("bf16", "1"), ("op:int4-offsets", "1"), ("bf16", "3"), ("op:int4-offsets", "3")]


@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_sweep_has_other_tiles(is_sweep: bool) -> None:
    names = [kernel.name for kernel in quantized_linear.int4_kernels(is_sweep)]

    assert len(set(names)) == len(names)
    assert (len(names) > 30) is is_sweep
    assert {name.split(":")[1] for name in names} == {"few", "tiles", "dequantize"}


def test_the_ways_to_multiply_agree() -> None:
    factory = InputFactory(torch.device("cpu"), torch.float32)
    x = factory.randn(2, 256)
    expected = None

    for kernel in quantized_linear.int4_kernels(is_sweep=False):
        if kernel.name.startswith("int4:"):
            out = kernel.product(x, kernel.weight((32, 256), factory))
            assert isinstance(out, torch.Tensor)
            expected = out if expected is None else expected
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_it_needs_a_gpu_or_says_how_to_try_it() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    with pytest.raises(ServerError, match="--device cpu tries the program"):
        quantized_linear.main([])
