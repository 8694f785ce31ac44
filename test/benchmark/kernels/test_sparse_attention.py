from __future__ import annotations

import pytest

from benchmark.kernels import sparse_attention


def test_the_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    sparse_attention.main(["--device", "cpu"])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["select", "chosen", "dense", "select", "chosen"]
    assert all(line.endswith("%") for line in lines[2:])


def test_64_requests_read_2048_latents_each() -> None:
    loads = sparse_attention.TINY._replace(top_k=2048, steps=sparse_attention.STEPS)

    cases = {(case.op, case.load): case for case in sparse_attention.cases_of(loads, 2)}

    assert cases["chosen", "64 x 8192"].num_bytes == 64 * 2048 * (32 + 16) * 2
    assert cases["dense", "64 x 8192"].num_bytes == 64 * 8192 * (32 + 16) * 2
