"""Memory whose content moves to the host and back at the same addresses, on a driver without a GPU and on one with."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common.compile import c_library
from lightserve.common.device import Graphs, cuda_mapped, cuda_pool, device_named
from lightserve.common.device.cuda_pool import SOURCE, CudaMappedPool, PoolLibrary, pool_library
from lightserve.errors import ServerError

PAGE = 2 << 20
DRIVER = Path(__file__).parent / "fake_driver" / "driver.c"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The library, and the fake driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        pool, driver = c_library.library_of(SOURCE), c_library.library_of(DRIVER)
        assert pool is not None
        assert driver is not None
        yield pool, driver


@pytest.fixture
def library(compiled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolLibrary]:
    """One with tables of its own: a copy is another library."""
    pool, driver = (shutil.copy(path, tmp_path / f"{tmp_path.name}-{path.name}") for path in compiled)
    monkeypatch.setattr(cuda_mapped, "LIBRARY", str(driver))
    monkeypatch.setattr(cuda_mapped, "make_context_current", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (PAGE, 8 * PAGE))
    cuda_mapped._driver.cache_clear()
    library = PoolLibrary(Path(pool))
    for allocate in (library.pool_allocate, library.scratch_allocate):
        allocate.restype, allocate.argtypes = c_void_p, (c_size_t, c_int, c_void_p)
    library.pool_free.argtypes = (c_void_p, c_size_t, c_int, c_void_p)
    library.driver.fake_used.restype = c_size_t
    library.driver.fake_limit.argtypes = (c_size_t,)
    library.driver.fake_largest_copy.argtypes = (c_size_t,)
    yield library
    cuda_mapped._driver.cache_clear()


def pool_of(library: PoolLibrary) -> CudaMappedPool:
    return CudaMappedPool(library, torch.device("cuda", 0))


class Memory:
    """What torch has allocated."""

    def __init__(self, library: PoolLibrary, size: int, fill: int, *, is_scratch: bool = False) -> None:
        self._library = library
        self.size = size
        self.address = (library.scratch_allocate if is_scratch else library.pool_allocate)(size, 0, None)
        assert self.address
        ctypes.memset(self.address, fill, size)

    @property
    def content(self) -> set[int]:
        return set(ctypes.string_at(self.address, self.size))

    def free(self) -> None:
        self._library.pool_free(self.address, self.size, 0, None)


def test_content_comes_back_at_the_same_addresses_after_others_had_the_memory(library: PoolLibrary) -> None:
    taken = [Memory(library, size, fill) for fill, size in enumerate((PAGE, 5, 3 * PAGE, PAGE + 1), 1)]
    pool = pool_of(library)
    assert library.driver.fake_used() == 7 * PAGE  # whole pages

    for _ in range(2):
        pool.release()
        pool.release()  # again: nothing to do
        assert library.driver.fake_used() == 0
        others = Memory(library, 7 * PAGE, 0xFF)
        others.free()
        pool.restore()
        pool.restore()

        assert library.driver.fake_used() == 7 * PAGE
        assert [memory.content for memory in taken] == [{1}, {2}, {3}, {4}]
        assert library.driver.fake_pinned() == 1  # and kept for the next time


def test_memory_of_graphs_is_freed_without_a_copy(library: PoolLibrary) -> None:
    weight, scratch = Memory(library, PAGE, 1), Memory(library, 3 * PAGE, 2, is_scratch=True)
    pool = pool_of(library)
    library.driver.fake_largest_copy(PAGE)

    pool.release()
    assert library.driver.fake_used() == 0
    pool.restore()

    assert library.driver.fake_used() == 4 * PAGE == pool.num_bytes
    assert weight.content == {1}
    ctypes.memset(scratch.address, 3, scratch.size)
    assert scratch.content == {3}


def test_what_was_freed_is_neither_copied_nor_taken_again(library: PoolLibrary) -> None:
    taken = [Memory(library, PAGE, number % 256) for number in range(600)]  # the table grows
    for memory in taken[::2]:
        memory.free()
    pool = pool_of(library)

    pool.release()
    taken[1].free()  # the tensor of a request that ends during a sleep
    pool.restore()

    assert library.driver.fake_used() == 299 * PAGE == pool.num_bytes
    assert [memory.content for memory in taken[3::2]] == [{number % 256} for number in range(3, 600, 2)]


def test_parts_of_a_pool_that_no_tensor_uses_give_their_memory_back(library: PoolLibrary) -> None:
    used, unused = Memory(library, PAGE, 1), Memory(library, 2 * PAGE, 2)
    pool = pool_of(library)

    class Pool:
        def snapshot(self) -> list[dict[str, Any]]:
            sizes = {used.address: 512, unused.address: 0}
            return [{"address": address, "allocated_size": size} for address, size in sizes.items()]

    pool._pool = Pool()
    pool.settle()
    assert library.driver.fake_used() == PAGE == pool.num_bytes

    pool.release()
    pool.restore()
    assert library.driver.fake_used() == PAGE
    assert used.content == {1}
    unused.free()  # torch may do so later


def test_memory_that_a_trainer_still_has_is_asked_for_again(library: PoolLibrary) -> None:
    taken = [Memory(library, PAGE, fill) for fill in (1, 2, 3)]
    pool = pool_of(library)
    pool.release()
    library.driver.fake_limit(2 * PAGE)

    with pytest.raises(torch.OutOfMemoryError, match=r"the worker needs 6,291,456 bytes again, 2,097,152 are left"):
        pool.restore()

    assert library.driver.fake_used() == 0  # what was free stays free
    library.driver.fake_limit(3 * PAGE)
    pool.restore()
    assert [memory.content for memory in taken] == [{1}, {2}, {3}]


def test_a_device_without_memory_allocates_nothing(library: PoolLibrary) -> None:
    library.driver.fake_limit(PAGE)

    assert library.pool_allocate(2 * PAGE, 0, None) is None
    assert library.blocks() == []
    assert Memory(library, PAGE, 1).content == {1}


def test_a_host_without_room_keeps_the_weights_on_the_device(
    library: PoolLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(library, PAGE, 1)
    pool = pool_of(library)
    monkeypatch.setattr(cuda_pool, "free_ram", lambda: cuda_pool.HOST_MARGIN)

    with pytest.raises(ServerError, match=r"the host has 1,073,741,824 bytes of free memory, and 2,097,152 are needed"):
        pool.release()

    assert library.driver.fake_used() == PAGE
    assert memory.content == {1}


def test_a_copy_that_fails_frees_nothing(library: PoolLibrary) -> None:
    taken = [Memory(library, size, 1) for size in (PAGE, 2 * PAGE)]
    pool = pool_of(library)
    library.driver.fake_largest_copy(PAGE)

    with pytest.raises(ServerError, match="the CUDA driver failed: invalid value"):
        pool.release()

    assert library.driver.fake_used() == 3 * PAGE
    assert [memory.content for memory in taken] == [{1}, {1}]


def test_a_library_is_compiled_once(compiled: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "_compiler", lambda: pytest.fail("it is compiled again"))

    assert c_library.library_of(SOURCE) == compiled[0]
    assert sorted(path.suffix for path in compiled[0].parent.iterdir()) == [".so", ".so"]


def test_without_a_compiler_or_a_driver_there_is_no_such_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("lightserve"), "propagate", True)
    pool_library.cache_clear()
    monkeypatch.setattr(cuda_mapped, "LIBRARY", "libcuda-that-nobody-has.so.1")
    assert pool_library() is None
    assert "weights cannot be moved to the host" in caplog.text

    pool_library.cache_clear()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert pool_library() is None
    assert "there is no C compiler" in caplog.text
    pool_library.cache_clear()


def test_a_home_that_cannot_be_written_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    library = c_library.library_of(SOURCE)

    assert library is not None
    assert library.is_relative_to(tmp_path)


@pytest.mark.parametrize("name", ["cpu", "rocm"])
def test_other_devices_have_no_such_memory(name: str) -> None:
    assert device_named(name).memory_pools is None


@pytest.mark.gpu
def test_tensors_of_torch_move_to_the_host_and_back_and_graphs_read_them() -> None:
    device = torch.device("cuda", 0)
    pools = device_named("cuda").memory_pools
    assert pools is not None
    pool = pools.open(device)
    assert pool is not None
    with pool.use():
        weights = [torch.full((rows, 1024), float(rows), device=device) for rows in (1, 100, 20_000)]
        torch.empty(50_000_000, device=device)  # freed at once
    pool.settle()
    added = torch.zeros(1024, device=device)

    def add(inputs: Tensor, key: int) -> Tensor:
        """With 80 MB in the memory of the graph."""
        scratch = weights[2] * 1.0
        added.add_(weights[0][-1] + weights[1][-1] + scratch[-1])
        return added

    graphs: Graphs[int, Tensor] | None = device_named("cuda").graphs(add)
    assert graphs is not None
    example = torch.zeros(1, dtype=torch.int32, device=device)
    add(example, 0)
    graphs.capture([(0, example)])
    others = torch.ones(5, device=device)
    addresses = [weight.data_ptr() for weight in weights]
    free = [torch.cuda.mem_get_info()[0]]

    for _ in range(2):
        pool.release()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        trainer = torch.full((20_000_000,), 7.0, device=device)  # somebody uses the pages meanwhile
        assert bool((trainer == 7).all())
        del trainer
        pool.restore()
        added.zero_()
        graphs.replay(0, example.cpu().pin_memory())
        assert bool((added == 20_101).all())

    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(bool((weight == len(weight)).all()) for weight in weights)
    assert bool((others == 1).all())
    assert "PYTEST_XDIST_WORKER" in os.environ or min(free[1:]) - free[0] >= 2 * 20_000 * 1024 * 4 * 0.9
