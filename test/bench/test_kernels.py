from __future__ import annotations

import time

import pytest
import torch

from lightserve.bench import kernels
from lightserve.bench.ceilings import Ceilings, seconds_per_call
from lightserve.bench.kernel_cases import LLAMA3_8B, TINY, Case, InputFactory, cases_of
from lightserve.bench.kv_dtype_cases import kv_dtype_cases
from lightserve.common import ops
from lightserve.errors import ServerError
from test.ops.cases import TOLERANCE

CPU = torch.device("cpu")
SAME = {"token_attention", "context_attention"}  # torch computes these from inputs of its own
CASES = {f"{case.op}-{case.load}": case for case in (*cases_of(TINY, torch.float32), *kv_dtype_cases(TINY, 4))}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_case_runs_as_the_op_and_in_torch(case: Case) -> None:
    ours = case.ours(*case.inputs(InputFactory(CPU, torch.float32)))
    inputs = case.torch_inputs or case.inputs
    theirs = None if case.torch is None else case.torch(*inputs(InputFactory(CPU, torch.float32)))

    if isinstance(theirs, torch.Tensor) and case.op.split()[0] not in SAME and "random" not in case.op:
        torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float32])


def test_every_op_of_a_step_has_a_case_at_the_shapes_of_the_loads() -> None:
    found = {case.op.split()[0] for case in cases_of(LLAMA3_8B, torch.bfloat16)}

    assert found <= set(ops.OPS)
    assert {"linear", "token_attention", "context_attention", "add_rms_norm", "silu_and_mul", "sample"} <= found


def test_attention_over_codes_has_a_case_beside_each_that_reads_a_cache() -> None:
    found = {case.op for case in kv_dtype_cases(LLAMA3_8B, 2)}

    reading = ("token_attention", "context_attention", "rotary_write_kv")
    assert found == {f"{op} {kv_dtype}" for op in reading for kv_dtype in ("fp8", "int8")}


def test_the_table_compares_an_op_with_the_limits_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--device", "cpu", "--ops", "silu"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32 on cpu; copy ")
    assert [line.split()[:2] for line in lines[2:]] == [
        ["silu_and_mul", "1"],
        ["silu_and_mul", "3"],
        ["silu_and_mul", "5"],
    ]
    assert all(line.endswith("x") for line in lines[2:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ServerError, match="needs a GPU"):
        kernels.main([])


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(bytes_per_s=10.0, flops_per_s=100.0)

    assert ceilings.floor_s(num_bytes=50, flops=100) == 5
    assert ceilings.floor_s(num_bytes=50, flops=1000) == 10


def test_the_time_of_a_call_is_the_time_of_one_of_them() -> None:
    calls: list[int] = []
    begin_s = time.perf_counter()

    seconds = seconds_per_call([lambda: calls.append(0), lambda: calls.append(1)], CPU, repeats=2)

    measured = len(calls) - 2 * 2  # the first two runs of both are not
    assert 0 < seconds * measured <= time.perf_counter() - begin_s
    assert calls.count(0) == calls.count(1)
