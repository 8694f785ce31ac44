"""Blocks of KV on a disk: what is read is what was written, or an error."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightserve.errors import ServerError
from lightserve.worker.kv.offload.block_store.disk import SUFFIX, DiskStore, StoredFile
from lightserve.worker.kv.offload.block_store.frame import HEADER_BYTES, BlockError, identity_of

SIZE = 3000
IDENTITY = identity_of("a layout", 0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(SIZE)))


def make(
    folder: Path, blocks: int = 100, identity: bytes = IDENTITY, group: str = "ranks1.0", num_engines: int = 1
) -> DiskStore:
    return DiskStore(folder, group, blocks * (SIZE + HEADER_BYTES), identity, num_engines)


def read(store: DiskStore, number: int) -> bytes:
    into = memoryview(bytearray(SIZE))
    store.get(key(number), into)
    return bytes(into)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def test_a_block_is_found_by_another_process(tmp_path: Path) -> None:
    make(tmp_path).put(key(1), content(1))

    store = make(tmp_path)

    assert store.contains(key(1))
    assert not store.contains(key(2))
    assert read(store, 1) == content(1)
    assert not store.put(key(1), content(1)), "it is there already"
    assert store.used_bytes == SIZE + HEADER_BYTES


def flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def extend(data: bytearray, rng: random.Random) -> bytearray:
    return data + rng.randbytes(rng.randrange(1, 100))


def zero(data: bytearray, rng: random.Random) -> bytearray:
    """As a file system may leave it after a power cut."""
    begin = rng.randrange(len(data) - 1)
    end = rng.randrange(begin + 1, len(data)) + 1
    return data[:begin] + bytes(end - begin) + data[end:]


def shift(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(1) + data[at:-1]


def swap(data: bytearray, rng: random.Random) -> bytearray:
    """Two parts of the content change places."""
    at, size = HEADER_BYTES + rng.randrange(0, 1000), rng.randrange(1, 500)
    other = at + 1000
    data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    return data


def random_bytes(data: bytearray, rng: random.Random) -> bytearray:
    return bytearray(rng.randbytes(len(data)))


def another_block(data: bytearray, rng: random.Random) -> bytearray:
    return bytearray(OTHER_FILE)


OTHER_FILE = b""
DAMAGES = [flip, flip, truncate, extend, zero, shift, swap, random_bytes, another_block]


def test_none_of_1000_random_damages_is_read_as_a_block(tmp_path: Path) -> None:
    global OTHER_FILE
    rng = random.Random(1)
    store = make(tmp_path)
    store.put(key(2), content(2))
    OTHER_FILE = files(tmp_path)[0].read_bytes()
    num_found = 0
    for _ in range(1000):
        store.put(key(1), content(1))
        path = Path(store._path(key(1)))
        before = path.read_bytes()
        damaged = bytes(rng.choice(DAMAGES)(bytearray(before), rng))
        path.write_bytes(damaged)
        if damaged == before:  # zeros where zeros were
            assert read(store, 1) == content(1)
            continue

        with pytest.raises(BlockError):
            read(store, 1)

        assert not path.exists(), "a damaged file would be read again and again"
        assert not store.contains(key(1))
        num_found += 1

    assert num_found > 990
    assert store.used_bytes == SIZE + HEADER_BYTES


def remove(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [remove, make_folder])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, change: Callable[[Path], None]) -> None:
    store = make(tmp_path)
    store.put(key(1), content(1))

    change(files(tmp_path)[0])

    with pytest.raises(BlockError):
        read(store, 1)


def test_a_block_of_another_identity_is_not_found_even_if_its_file_is_moved(tmp_path: Path) -> None:
    other = make(tmp_path, identity=identity_of("another layout", 0))
    other.put(key(1), content(1))
    store = make(tmp_path)
    assert not store.contains(key(1))

    Path(other._path(key(1))).rename(store._path(key(1)))

    with pytest.raises(BlockError, match="does not fit"):
        read(store, 1)


def test_the_least_recently_used_file_makes_room(tmp_path: Path) -> None:
    store = make(tmp_path, blocks=3)
    for number in (1, 2, 3):
        store.put(key(number), content(number))
    read(store, 1)

    store.put(key(4), content(4))

    assert [store.contains(key(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(files(tmp_path)) == 3


def engines(folder: Path, blocks: int, count: int) -> list[DiskStore]:
    """Of a server with --dp."""
    return [make(folder, blocks, num_engines=count) for _ in range(count)]


def test_engines_that_share_a_folder_lose_no_block_at_a_restart(tmp_path: Path) -> None:
    for number, store in enumerate(10 * engines(tmp_path, 20, 2)):
        store.put(key(number), content(number))

    again = engines(tmp_path, 20, 2)

    assert len(files(tmp_path)) == 20
    assert all(all(store.find([key(number) for number in range(20)])) for store in again)
    assert sum(store.used_bytes for store in again) == 20 * (SIZE + HEADER_BYTES)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_engines_that_share_a_folder_fill_it_and_stay_within_its_size(tmp_path: Path, count: int) -> None:
    stores, rng = engines(tmp_path, 60, count), random.Random(0)
    for number in range(200):
        rng.choice(stores).put(key(number), content(number))
        assert min(number + 1, 50) <= len(files(tmp_path)) <= 60

    stores[0].put(key(1000), content(1000))
    stores[-1].put(key(1000), content(1000))
    assert stores[-1].contains(key(199)), "the newest stay"
    assert not stores[0].contains(key(0))


def test_what_another_server_removes_makes_room(tmp_path: Path) -> None:
    """With the same folder."""
    one, other = make(tmp_path, 20), make(tmp_path, 20)
    for number in range(15):
        one.put(key(number), content(number))
    for number in range(15):
        other.remove(key(number))
    assert not any(one.find([key(number) for number in range(15)]))

    for number in range(20, 40):
        one.put(key(number), content(number))

    assert len(files(tmp_path)) >= 18


def test_two_servers_keep_one_folder_near_its_size(tmp_path: Path) -> None:
    """Each of them writes a twentieth before it sees what the other one has written."""
    stores = [make(tmp_path, 60) for _ in range(2)]
    for number in range(400):
        stores[number % 2].put(key(number), content(number))
        assert len(files(tmp_path)) <= 60 + 3


def test_a_folder_is_listed_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing looks at all files."""
    store, listings = make(tmp_path, 100), 0
    list_files = DiskStore._files

    def counted(store: DiskStore) -> Iterator[StoredFile]:
        nonlocal listings
        listings += 1
        return list_files(store)

    monkeypatch.setattr(DiskStore, "_files", counted)
    for number in range(500):
        store.put(key(number), content(number))

    assert listings <= 500 // 5 + 1


def test_a_smaller_size_after_a_restart_removes_the_oldest_files_also_of_other_models(tmp_path: Path) -> None:
    other, store = make(tmp_path, identity=identity_of("another layout", 0)), make(tmp_path)
    for number, one in enumerate((store, other, store, other)):
        one.put(key(number), content(number))
        os.utime(one._path(key(number)), (1000 + number, 1000 + number))

    again = make(tmp_path, blocks=2)

    assert len(files(tmp_path)) == 2
    assert again.contains(key(2))
    assert not again.contains(key(0))


def test_files_of_other_ranks_and_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    rank = make(tmp_path, group="ranks2.1")
    rank.put(key(1), content(1))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.kv").write_bytes(bytes(10_000))

    make(tmp_path, blocks=0, group="ranks2.0")

    assert len(files(tmp_path)) == 2


def test_an_interrupted_write_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    store = make(tmp_path)
    stale = f"{store._path(key(1))}.77.tmp"
    Path(stale).write_bytes(b"half")
    os.utime(stale, (1, 1))

    again = make(tmp_path)

    assert not again.contains(key(1))
    assert not Path(stale).exists()


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)

    with pytest.raises(BlockError, match="No space left"):
        store.put(key(1), content(1))
    assert list(tmp_path.rglob("*.tmp")) == files(tmp_path) == []


def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ServerError, match=r"kv_disk_dir=.*/file: cannot be used: Not a directory"):
        make(tmp_path / "file")
