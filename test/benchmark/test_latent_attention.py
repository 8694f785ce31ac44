from __future__ import annotations

import pytest
import torch

from benchmark.kernels import latent_attention
from lightserve.bench.kernel_cases import InputFactory

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [[], ["--kv_dtype", "fp8"]])
def test_the_table_has_a_row_for_each_case(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    latent_attention.main(["--device", "cpu", *flags])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("float32 on cpu; copy ")
    assert [line.split("  ")[0] for line in lines[2:]] == ["decode op", "write_latent"] * 2 + ["prompt"] * 2
    assert all(line.endswith("%") for line in lines[2:])


def test_64_requests_of_4096_tokens_read_their_latents_once() -> None:
    cases = latent_attention.cases_of(latent_attention.deepseek(16), 2, has_kernels=True)

    found = next(case for case in cases if (case.op, case.load) == ("decode", "64 x 4096"))

    assert 64 * 4096 * 576 * 2 < found.num_bytes < 1.01 * 64 * 4096 * 576 * 2


def test_a_mixed_step_has_decodes() -> None:
    (*_, case) = latent_attention.cases_of(latent_attention.TINY, 4, has_kernels=False)

    q, _, _, _, batch, _ = case.inputs(InputFactory(CPU, torch.float32))

    assert len(q) == 7
    assert batch.has_decodes
