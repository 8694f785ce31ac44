from __future__ import annotations

import pytest

from benchmark.kernels import state


def test_the_table_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    state.main(["--device", "cpu"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32 on cpu; copy ")
    names = [line.split("  ")[0] for line in lines[2:]]
    assert [name.split()[0] for name in names[1::2]] == ["gated_delta_rule"] * 6 + ["mamba_scan"] * 3
    assert all(line.endswith("%") for line in lines[2:])


def test_a_decode_reads_and_writes_the_state_of_each_request_once() -> None:
    cases = state.cases_of(state.MODELS, 2)

    decode = next(case for case in cases if (case.op, case.load) == ("gated_delta_rule", "decode 64"))

    state_bytes = 2 * 64 * 48 * 128 * 128 * 4
    assert state_bytes < decode.num_bytes < 1.02 * state_bytes
