from __future__ import annotations

import pytest
import torch

from lightserve.common.checkpoint.upload import BUFFER_BYTES, Upload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(), (1,), (0, 8), (37, 129), (3 * BUFFER_BYTES // 4096, 1024), (2, BUFFER_BYTES // 4 + 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_all_tensors_are_copied_on_exit(device: str) -> None:
    tensors = [torch.arange(torch.Size(shape).numel()).float().view(shape) for shape in SHAPES * 5]
    targets = [torch.empty_like(tensor, device=device) for tensor in tensors]

    with Upload() as upload:
        for target, tensor in zip(targets, tensors, strict=True):
            upload.copy(target, tensor)

    assert all(torch.equal(target.cpu(), tensor) for target, tensor in zip(targets, tensors, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_part_of_a_tensor_in_another_dtype_is_copied_into_part_of_a_weight(device: str) -> None:
    tensor, weight = torch.arange(8000.0).view(80, 100), torch.zeros(120, 25, device=device, dtype=torch.bfloat16)

    with Upload() as upload:
        upload.copy(weight[40:], tensor[:, 25:50])

    assert torch.equal(weight[40:].cpu(), tensor[:, 25:50].bfloat16())
    assert not weight[:40].any()


@pytest.mark.gpu
def test_a_failed_copy_raises_on_exit() -> None:
    with pytest.raises(RuntimeError, match="size"), Upload() as upload:
        upload.copy(torch.empty(4, 5, device="cuda"), torch.empty(4, 6))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_the_reader_is_raised(device: str) -> None:
    def read() -> None:
        with Upload() as upload:
            upload.copy(torch.empty(4, device=device), torch.zeros(4))
            raise OSError("the file was deleted")

    with pytest.raises(OSError, match="deleted"):
        read()


@pytest.mark.parametrize("device", DEVICES)
def test_work_after_copies_sees_all_of_them(device: str) -> None:
    target, tensor = torch.zeros(1000, 1000, device=device), torch.ones(1000, 1000)
    sums: list[float] = []

    with Upload() as upload:
        upload.copy(target, tensor)
        upload.after_copies(lambda: sums.append(float(target.sum())))

    assert sums == [tensor.numel()]
