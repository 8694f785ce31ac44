from __future__ import annotations

import pytest
import torch

from lightserve.common.device import KINDS, host_memory
from lightserve.errors import ServerError


@pytest.mark.parametrize(
    ("kind", "model_dtype", "wanted"),
    [
        ("cpu", "bfloat16", torch.float32),
        ("cpu", None, torch.float32),
        ("cuda", "float16", torch.float16),
        ("cuda", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.bfloat16),
        ("cuda", None, torch.bfloat16),
    ],
)
def test_a_gpu_keeps_the_dtype_of_a_half_precision_model(
    kind: str, model_dtype: str | None, wanted: torch.dtype
) -> None:
    assert KINDS[kind].dtype_for(model_dtype) is wanted


def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)

    assert KINDS["cuda"].dtype_for("bfloat16") is torch.float16
    assert not KINDS["cuda"].has_dtype(torch.bfloat16)
    assert KINDS["cpu"].has_dtype(torch.bfloat16)


def test_more_ranks_than_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert KINDS["cuda"].device(1).index == 1
    with pytest.raises(ServerError, match="rank 2 has no device of its own: 2 found; lower tp to 2"):
        KINDS["cuda"].device(2)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_copies_what_is_written_into_memory_of_the_host(name: str) -> None:
    device = torch.device(name)
    memory = host_memory((3, 5), torch.int32, device)

    memory.numpy()[:] = 7

    assert memory.is_pinned() == (name == "cuda")
    assert memory.to(device, non_blocking=True).tolist() == [[7] * 5] * 3
