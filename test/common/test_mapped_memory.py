"""Memory that is given back while its addresses stay, and graphs that were captured before."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from lightserve.common.device import MappedMemory, device_named
from lightserve.common.device.cuda_graph import CudaGraphs
from lightserve.common.kv.layout import KvLayout
from lightserve.common.kv.mem_manager import MemoryManager

NUM_BYTES = 100_000_000  # not a multiple of pages
ADDED = (1, 2, 3)
IS_ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # otherwise other tests take and free memory of the GPU


def take(num_bytes: int) -> MappedMemory:
    mapper, device = device_named("cuda").memory_mapper, torch.device("cuda", 0)
    assert mapper is not None
    assert mapper.can_map(device), "this driver cannot map memory"
    return mapper.take(num_bytes, device)


def freed_since(before: int = 0) -> int:
    """In bytes, negative if there is less free memory now. Modules that torch loads take a little."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] - before


@pytest.mark.gpu
def test_captured_graphs_read_and_write_the_memory_that_is_taken_again() -> None:
    memory = take(NUM_BYTES)
    values = memory.tensor().view(torch.float32)
    address = values.data_ptr()

    def add(inputs: Tensor, key: int) -> Tensor:
        """It reads the last element, which is on another page than the first, and writes both."""
        values[:3] += inputs
        values[-1] += values[0]
        return torch.cat((values[:3], values[-1:]))

    graphs = CudaGraphs(add)
    example = torch.tensor(ADDED, dtype=torch.int32, device="cuda")
    values.zero_()
    add(example, 0)
    graphs.capture([(0, example)])

    def replay_twice() -> list[float]:
        values.zero_()
        inputs = torch.tensor(ADDED, dtype=torch.int32).pin_memory()
        graphs.replay(0, inputs)
        return graphs.replay(0, inputs).tolist()

    expected = replay_twice()
    assert expected == [2, 4, 6, 3]  # 1 + 2 at the end
    before = freed_since()
    for _ in range(3):
        memory.release()
        memory.release()  # again: nothing to do
        assert not IS_ALONE or freed_since(before) > NUM_BYTES * 0.9
        others = torch.full((NUM_BYTES // 4,), 7.0, device="cuda")  # somebody uses the pages meanwhile
        assert bool((others == 7).all())
        del others
        memory.restore()
        memory.restore()
        assert not IS_ALONE or freed_since(before) < NUM_BYTES * 0.1
        assert values.data_ptr() == address

        assert replay_twice() == expected


@pytest.mark.gpu
def test_memory_that_the_gpu_does_not_have_is_refused() -> None:
    _, total = torch.cuda.mem_get_info()

    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory: [\d,]+ bytes are needed, [\d,]+ are free"):
        take(2 * total)

    assert take(5).tensor().fill_(3).tolist() == [3] * 5


@pytest.mark.gpu
def test_the_memory_lives_as_long_as_its_tensors() -> None:
    before = freed_since()
    part = take(NUM_BYTES).tensor()[5:10]

    assert part.fill_(3).tolist() == [3] * 5
    assert not IS_ALONE or freed_since(before) <= -NUM_BYTES
    del part
    assert not IS_ALONE or freed_since(before) > -NUM_BYTES * 0.9


@pytest.mark.parametrize("name", ["cpu", "rocm"])
def test_other_devices_have_no_such_memory(name: str) -> None:
    assert device_named(name).memory_mapper is None


class HostMemory:
    """What is given back is overwritten, for want of pages."""

    def __init__(self, num_bytes: int) -> None:
        self.has_pages = True
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self) -> Tensor:
        return self._bytes

    def release(self) -> None:
        self.has_pages = False
        self._bytes.fill_(0xFF)

    def restore(self) -> None:
        self.has_pages = True


class HostMapper:
    def can_map(self, device: torch.device) -> bool:
        return True

    def take(self, num_bytes: int, device: torch.device) -> HostMemory:
        return HostMemory(num_bytes)


def test_the_tensors_of_kv_stay_at_their_addresses() -> None:
    taken: list[HostMemory] = []

    def take_memory(num_bytes: int) -> HostMemory:
        taken.append(HostMemory(num_bytes))
        return taken[-1]

    layout = KvLayout.uniform(3, num_heads=2, head_dim=16, dtype=torch.bfloat16)
    plain = MemoryManager(10, layout, torch.device("cpu"))
    manager = MemoryManager(10, layout, torch.device("cpu"), take_memory=take_memory)
    layer = manager.layer(1)
    address = layer.data_ptr()

    manager.release()
    assert [memory.has_pages for memory in taken] == [False]
    assert layer.isnan().all()
    manager.restore()

    assert [memory.has_pages for memory in taken] == [True]
    assert (manager.layer(1).data_ptr(), manager.keeps_addresses, plain.keeps_addresses) == (address, True, False)
    assert [(buffer.shape, buffer.dtype) for buffer in manager.buffers] == [
        (buffer.shape, buffer.dtype) for buffer in plain.buffers
    ]
