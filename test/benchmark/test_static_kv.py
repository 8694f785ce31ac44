from __future__ import annotations

import pytest
import torch

from benchmark.kernels import static_kv
from lightserve.bench.kernel_cases import TINY, InputFactory

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", static_kv.LAYOUTS)
def test_each_token_has_a_slot_of_its_own(layout: str) -> None:
    slots = static_kv.slots_of(layout, 3, 16, CPU)

    assert sorted(slots.flatten().tolist()) == list(range(48))
    is_in_one_piece = torch.equal(slots - slots[:, :1], torch.arange(16).expand(3, 16))
    assert is_in_one_piece == (layout == "static")
    if layout == "assigned":
        assert slots[:, -2:].tolist() == [[42, 45], [43, 46], [44, 47]]


def test_a_static_cache_is_attended_to_as_torch_does() -> None:
    (*_, case) = static_kv.cases_of(TINY, [2], [16], 4)
    q, cache, batch, options = case.inputs(InputFactory(CPU, torch.float32))
    key, value = cache[:-1].view(2, 16, 2, TINY.kv_heads, TINY.dim).permute(2, 0, 3, 1, 4)

    expected = static_kv._sdpa(q[:, :, None], key, value)

    torch.testing.assert_close(case.ours(q, cache, batch, options), expected[:, :, 0], rtol=1e-4, atol=1e-4)


def test_the_table_has_a_row_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    static_kv.main(["--device", "cpu", "--requests", "1", "--contexts", "16"])

    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[1] for row in rows] == list(static_kv.LAYOUTS)
    assert rows[-1].endswith("x")
