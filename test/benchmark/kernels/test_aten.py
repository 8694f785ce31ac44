from __future__ import annotations

import pytest

from benchmark.kernels import aten


def test_the_benchmark_of_replaced_operators_prints_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    aten.main(["--device", "cpu"])

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if line.endswith("x") and line.split()[0] in {"mm", "silu", "rms_norm"}]
    assert rows == ["silu", "rms_norm", "mm"] * 2
    assert "logits differ by" in lines[-3]
    assert lines[-1].startswith("decode step")
