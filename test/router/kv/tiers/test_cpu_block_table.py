from __future__ import annotations

from lightserve.router.kv.tiers.cpu_block_table import CpuBlockTable


def filled(*keys: bytes) -> CpuBlockTable:
    host = CpuBlockTable(len(keys))
    for key in keys:
        host.put(key)
    return host


def test_the_least_recently_used_block_makes_room() -> None:
    host = filled(b"a", b"b")
    host.touch(b"a")

    host.put(b"c")

    assert [key in host for key in (b"a", b"b", b"c")] == [True, False, True]


def test_a_pinned_block_stays_and_there_may_be_no_room() -> None:
    host = filled(b"a")
    blocks = host.pin([b"a"])

    assert host.put(b"b") is None
    host.unpin(blocks)
    assert host.put(b"b") == blocks[0]


def test_a_removed_block_that_is_pinned_is_free_when_it_is_unpinned() -> None:
    host = filled(b"a")
    blocks = host.pin([b"a"])

    host.remove(b"a")

    assert b"a" not in host
    assert host.put(b"b") is None
    host.unpin(blocks)
    assert host.put(b"b") == blocks[0]
