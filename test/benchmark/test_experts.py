from __future__ import annotations

import pytest
import torch

from benchmark.kernels import experts
from lightserve.bench.kernel_cases import InputFactory
from lightserve.errors import ServerError

CPU = torch.device("cpu")


def test_the_table_has_a_row_for_each_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(["--device", "cpu", "--tokens", "1", "5"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32 on cpu; copy ")
    assert [line.split()[:2] for line in lines[2:]] == [["tiny", "1"], ["tiny", "5"]]


def test_the_least_memory_is_that_of_the_chosen_experts() -> None:
    shape = experts.TINY["tiny"]

    layer = experts.Layer(shape, 1, InputFactory(CPU, torch.float32))

    weights = shape.top_k * 3 * shape.width * shape.hidden
    assert layer.num_bytes(4) == 4 * (weights + 2 * shape.hidden)


@pytest.mark.parametrize("weights", experts.WEIGHTS)
def test_quantised_weights_are_less_memory(weights: str) -> None:
    plain, quantised = (
        experts.Layer(experts.TINY["tiny"], 3, InputFactory(CPU, torch.float32), kind) for kind in (None, weights)
    )

    assert quantised.num_bytes(4) < plain.num_bytes(4) / 3.5
    assert all(bool(torch.as_tensor(call()).isfinite().all()) for call in quantised.calls())


def test_quantised_weights_have_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(["--device", "cpu", "--tokens", "1", "--weights", "int4", "mxfp4"])

    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["int4", "mxfp4"]


@pytest.mark.parametrize("tokens", [1, 90])
def test_each_configuration_has_a_row(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    layer = experts.Layer(experts.TINY["tiny"], tokens, InputFactory(CPU, torch.float32))

    plans = experts.plans_of(layer)

    assert any(name.startswith("sorted") for name in plans)
    assert ("grouped" in plans) is (tokens == 90)
    assert any(name.startswith("not sorted") for name in plans) is (tokens == 1)


def test_the_parts_are_those_of_the_whole() -> None:
    layer = experts.Layer(experts.TINY["tiny"], 3, InputFactory(CPU, torch.float32))

    parts = experts.parts_of(layer)

    whole = [call() for call in layer.calls()]
    for call, expected in zip(parts["sum"], whole, strict=True):
        torch.testing.assert_close(call(), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ServerError, match="needs a GPU"):
        experts.main([])
