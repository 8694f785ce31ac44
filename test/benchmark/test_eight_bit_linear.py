from __future__ import annotations

import pytest
import torch

from benchmark.kernels import eight_bit_linear
from lightserve.errors import ServerError


def test_the_table_has_a_time_for_each_kind_of_weight(capsys: pytest.CaptureFixture[str]) -> None:
    eight_bit_linear.main(["--device", "cpu", "--rows", "1", "5"])

    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["weight", "rows", "bf16"]
    assert [row.split()[:2] for row in rows] == [["tiny", "1"], ["tiny", "5"]]
    assert all(len(row.split()) == 3 + len(eight_bit_linear.columns()) for row in rows)


def test_each_configuration_has_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(eight_bit_linear, "CONFIGS", ((16, 128, 1, 3),))
    monkeypatch.setattr(eight_bit_linear, "seconds_per_call", lambda calls, device: calls[0]() is None or 1.0)

    eight_bit_linear.main(["--device", "cpu", "--rows", "20", "--configs"])

    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(eight_bit_linear.KINDS) + 4
    assert any("fp8 tensorwise" in row for row in rows)


def test_a_machine_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ServerError, match="needs a GPU; --device cpu"):
        eight_bit_linear.main([])
