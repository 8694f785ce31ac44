from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmark.kernels import aten
from benchmark.kernels.aten_cases import TRIED, Case, cases
from lightserve.bench.kernel_cases import InputFactory


def test_the_benchmark_of_replaced_operators_prints_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    aten.main(["--device", "cpu"])

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if line.endswith("x") and line.split()[0] in {"mm", "silu", "rms_norm"}]
    assert rows == ["silu", "rms_norm", "mm"] * 2
    assert "logits differ by" in lines[-3]
    assert lines[-1].startswith("decode step")


def test_only_the_rows_that_were_asked_for_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    aten.main(["--device", "cpu", "--only", "context_attention", "sample"])

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if line.endswith("x")]
    assert rows == ["sample", "sample", "context_attention"]
    assert lines[-1].startswith("slower than torch by more than 5%: ")


FUSED = [case for case in cases(TRIED) if case.ours is not None and case.name != "sample"]  # which has other noise


@pytest.mark.parametrize("case", FUSED, ids=lambda case: f"{case.name}-{case.rows}")
def test_both_columns_compute_the_same(case: Case) -> None:
    assert case.ours is not None
    args, copied = (case.inputs(InputFactory(torch.device("cpu"), torch.float32)) for _ in range(2))

    expected: Any = case.by_torch(*args)
    out: Any = case.ours(*copied)

    if case.name == "route":
        expected = expected.indices.int(), expected.values
    elif case.name == "token_attention":
        expected = expected.squeeze(2)
    elif case.name == "context_attention":
        expected = expected[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copied, args, rtol=1e-5, atol=1e-5)
