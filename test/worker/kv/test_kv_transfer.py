"""KV from the pool of one worker to that of another, over real sockets: what comes, what does not, and strangers."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightserve.common.device import pick_device
from lightserve.common.kv.cpu_kv import block_bytes
from lightserve.common.kv.layout import StateGroup, StateTensor
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.links.kv_secret import make_kv_certificate, read_kv_certificate
from lightserve.links.tls import PeerContexts
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.step import KvRecv, KvSend
from lightserve.messages.worker_calls import KvReceived
from lightserve.worker.kv.transfer import pipe, sockets, staging as kv_staging
from lightserve.worker.kv.transfer.base import Frame, Outgoing
from lightserve.worker.kv.transfer.framing import FrameStream, greet_receiver
from lightserve.worker.kv.transfer.pipe import KvTransferError, ReadTimeoutError, SocketPipe
from lightserve.worker.kv.transfer.rank_heads import RankHeads
from lightserve.worker.kv.transfer.sockets import SocketTransferBackend
from lightserve.worker.kv.transfer.staging import SendStaging
from lightserve.worker.kv.transfer.transfer import KvReceiver, KvSender, frame_sizes, readable_memory
from lightserve.worker.kv.transfer.transport import ReadableMemory
from test.common.test_cpu_kv import LAYOUTS, filled
from test.ports import free_port
from test.waiting import wait_until

SECRET = b"s" * 40
IDENTITY = b"i" * 32
ALONE = RankHeads(0, 1)
BLOCKS = 5
LONG_S = 60.0
LAYOUT = LAYOUTS["float32"]


class Pair:
    """A sender and a receiver with pools of the same layout."""

    group_sizes: tuple[int, ...] = ()  # in tokens
    state_rows = 0

    def __init__(
        self,
        address: str,
        layout: Any = LAYOUT,
        secret: bytes = SECRET,
        identity: bytes = IDENTITY,
        tls: tuple[PeerContexts | None, PeerContexts | None] = (None, None),
        transport: str | ReadableMemory = "sockets",
    ) -> None:
        """``secret``, ``identity``: of the sender. ``tls``, ``transport``: of both."""
        memories = [readable_memory(transport) if isinstance(transport, str) else transport for _ in range(2)]
        platform = pick_device("cpu")
        device = platform.torch_device(0)
        self.address = address
        self.source, self.target = (filled(layout, device, self.group_sizes, self.state_rows) for _ in range(2))
        self.backends = [
            SocketTransferBackend(identity, secret, frame_sizes(self.source, ALONE), tls[0], memories[0]),
            SocketTransferBackend(IDENTITY, SECRET, frame_sizes(self.target, ALONE), tls[1], memories[1]),
        ]
        self.sender = KvSender(self.source, platform, self.backends[0], ALONE)
        self.receiver = KvReceiver(self.target, platform, self.backends[1], ALONE)
        self.backends[1].listen(address, self.receiver)

    def slots(self, seed: int, blocks: int = BLOCKS) -> np.ndarray[Any, Any]:
        return np.array(random.Random(seed).sample(range(self.source.size), blocks * BLOCK_TOKENS), dtype=np.int32)

    def expect(self, transfer_id: int, slots: Any, timeout_s: float = LONG_S) -> None:
        self.receiver.expect(KvRecv(transfer_id, slots, timeout_s))

    def push(self, transfer_id: int, slots: Any, first: int = 0) -> None:
        self.sender.push(KvSend(transfer_id, [self.address], first, slots))

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def new_certificate(folder: Path) -> PeerContexts:
    folder.mkdir(exist_ok=True)
    make_kv_certificate(folder)
    return read_kv_certificate(str(folder))


PACKAGES = {"nixl": "nixl"}  # by transport: the receiver reads
NEEDS = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install {package}")
    for name, package in PACKAGES.items()
}
READ_BY = [pytest.param(name, marks=mark) for name, mark in NEEDS.items()]
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")


WAYS = [
    "unix",
    "tcp",
    pytest.param("tls", marks=NEEDS_OPENSSL),
    *(pytest.param(f"{name}, unix", marks=mark) for name, mark in NEEDS.items()),
    *(pytest.param(f"{name}, tls", marks=[mark, NEEDS_OPENSSL]) for name, mark in NEEDS.items()),
]


@pytest.fixture(params=WAYS)
def new_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Pair]:
    way: str = request.param
    address = f"unix://{tmp_path}/kv" if "unix" in way else f"tcp://127.0.0.1:{free_port()}"
    tls = new_certificate(tmp_path) if "tls" in way else None
    transport = way.partition(",")[0] if "," in way else "sockets"
    return partial(Pair, address, tls=(tls, tls), transport=transport)


@pytest.fixture
def pair(new_pair: Callable[..., Pair]) -> Iterator[Pair]:
    made = new_pair()
    yield made
    made.close()


def kv(memory: MemoryManager, slots: Any) -> list[torch.Tensor]:
    parts = [*memory.buffers, *memory.scale_buffers.values()]
    return [part[:, torch.from_numpy(slots).long()].contiguous().view(torch.uint8) for part in parts]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_kv_of_every_layout_arrives_in_other_slots(
    layout: Any, new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_staging, "FRAME_BYTES", 2 * block_bytes(layout, BLOCK_TOKENS))
    pair = new_pair(layout)
    source, target = pair.slots(1), pair.slots(2)
    others = np.setdiff1d(np.arange(pair.target.size, dtype=np.int32), target)
    before = kv(pair.target, others)
    pair.expect(7, target)

    pair.push(7, source[: 2 * BLOCK_TOKENS])
    pair.push(7, source[2 * BLOCK_TOKENS :], first=2)

    assert pair.receiver.next_received() == [KvReceived(7, BLOCKS)]
    assert all(map(torch.equal, kv(pair.target, target), kv(pair.source, source)))
    assert all(map(torch.equal, kv(pair.target, others), before))
    pair.close()


def test_blocks_of_a_windowed_pool_arrive_too(new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of other layers, and in slots of their own."""
    monkeypatch.setattr(Pair, "group_sizes", (3 * BLOCK_TOKENS,))
    pair = new_pair(LAYOUTS["two groups, one with a window"])
    source, target = pair.slots(1), pair.slots(2)
    windowed = np.random.default_rng(3).permutation(3 * BLOCK_TOKENS).astype(np.int32)
    sent, received = windowed[: 2 * BLOCK_TOKENS], windowed[BLOCK_TOKENS:]
    pair.receiver.expect(KvRecv(7, target, LONG_S, [received]))

    pair.push(7, source)
    pair.sender.push(KvSend(7, [pair.address], 0, sent, pool=1))

    assert pair.receiver.next_received() == [KvReceived(7, BLOCKS + 2)]
    to, of = torch.from_numpy(target).long(), torch.from_numpy(source).long()
    assert torch.equal(pair.target.buffers[0][:, to].view(torch.uint8), pair.source.buffers[0][:, of].view(torch.uint8))
    for there, here in zip(windowed_kv(pair.target, received), windowed_kv(pair.source, sent), strict=True):
        assert torch.equal(there, here)
    pair.close()


def test_the_state_after_the_last_block_arrives_too(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "state_rows", 8)
    states = StateGroup((1,), (StateTensor((3, 5), torch.float32), StateTensor((7,), torch.bfloat16)))
    pair = new_pair(replace(LAYOUT, states=(states,)))
    source, target = pair.slots(1), pair.slots(2)
    pair.receiver.expect(KvRecv(7, target, LONG_S, [np.array([6], dtype=np.int32)]))

    pair.push(7, source)
    pair.sender.push(KvSend(7, [pair.address], 0, np.array([2], dtype=np.int32), pool=1))

    assert pair.receiver.next_received() == [KvReceived(7, BLOCKS + 1)]
    assert all(map(torch.equal, kv(pair.target, target), kv(pair.source, source)))
    for there, here in zip(pair.target.state_buffers[0], pair.source.state_buffers[0], strict=True):
        assert torch.equal(there[:, 6].view(torch.uint8), here[:, 2].view(torch.uint8))
        assert not torch.equal(there[:, 5].view(torch.uint8), here[:, 2].view(torch.uint8))
    pair.close()


def windowed_kv(memory: MemoryManager, slots: Any) -> list[torch.Tensor]:
    buffers = memory.buffers[1], memory.scale_buffers[1]
    return [buffer[:, torch.from_numpy(slots).long()].contiguous().view(torch.uint8) for buffer in buffers]


def test_many_transfers_at_once_arrive_whole(pair: Pair) -> None:
    pushed = {transfer_id: pair.slots(transfer_id, 2) for transfer_id in range(1, 4)}
    free = np.random.default_rng(0).permutation(pair.target.size).astype(np.int32)[: 3 * 2 * BLOCK_TOKENS]
    targets = dict(zip(pushed, free.reshape(3, -1), strict=True))
    for transfer_id, slots in targets.items():
        pair.expect(transfer_id, slots)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda transfer_id: pair.push(transfer_id, pushed[transfer_id]), pushed))
    received: list[KvReceived] = []
    while len(received) < len(targets):
        received += pair.receiver.next_received()

    assert {one.num_blocks for one in received} == {2}
    for transfer_id, slots in targets.items():
        assert all(map(torch.equal, kv(pair.target, slots), kv(pair.source, pushed[transfer_id])))


def test_a_frame_may_come_before_its_transfer(pair: Pair) -> None:
    source, target = pair.slots(1), pair.slots(2)

    pair.push(7, source)
    pair.expect(7, target)

    assert pair.receiver.next_received() == [KvReceived(7, BLOCKS)]


def test_a_transfer_ends_at_its_deadline_with_the_blocks_that_follow_each_other(pair: Pair) -> None:
    source, target = pair.slots(1), pair.slots(2)
    pair.expect(7, target)
    pair.push(7, source[: 2 * BLOCK_TOKENS])
    pair.push(7, source[3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS], first=3)  # the one between is missing
    wait_until(lambda: pair.receiver._transfers[7].arrived == {0, 1, 3})
    pair.receiver._transfers[7].deadline_s = 0.0

    assert pair.receiver.next_received() == [KvReceived(7, 2)]

    before = kv(pair.target, target)
    pair.push(7, source[2 * BLOCK_TOKENS :], first=2)  # late: the slots may be another request's
    pair.expect(8, pair.slots(3, 1))
    pair.push(8, source[:BLOCK_TOKENS])
    assert pair.receiver.next_received() == [KvReceived(8, 1)]
    wait_until(lambda: len(pair.receiver._stagings[0]._free) == len(pair.receiver._stagings[0].kv))
    untouched = np.setdiff1d(target, pair.slots(3, 1)).astype(np.int32)
    is_kept = np.isin(target, untouched)
    assert all(
        torch.equal(a, b[:, torch.from_numpy(is_kept)])
        for a, b in zip(kv(pair.target, target[is_kept]), before, strict=True)
    )


def test_a_cancelled_transfer_ends_at_once_even_before_it_was_expected(pair: Pair) -> None:
    pair.receiver.cancel(7)
    pair.expect(7, pair.slots(1))
    assert pair.receiver.next_received() == [KvReceived(7, 0)]

    pair.expect(8, pair.slots(1))
    pair.receiver.cancel(8)
    assert pair.receiver.next_received() == [KvReceived(8, 0)]

    pair.receiver.cancel(8)  # it has ended meanwhile
    assert not pair.receiver._cancelled


@pytest.mark.parametrize("wrong", [{"secret": b"x" * 40}, {"identity": b"x" * 32}])
def test_a_sender_with_another_secret_or_model_brings_nothing(wrong: Any) -> None:
    check_brings_nothing(Pair(f"tcp://127.0.0.1:{free_port()}", **wrong))


@NEEDS_OPENSSL
@pytest.mark.parametrize("wrong", ["the certificate of another cluster", "none, at the sender", "none"])
def test_only_the_certificate_of_the_cluster_opens_an_encrypted_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(pipe, "TIMEVAL", struct.pack("ll", 1, 0))  # a plain sender and a receiver with TLS both wait
    ours, theirs = new_certificate(tmp_path / "ours"), new_certificate(tmp_path / "theirs")
    sender = {"none": ours, "none, at the sender": None}.get(wrong, theirs)
    pair = Pair(f"tcp://127.0.0.1:{free_port()}", tls=(sender, None if wrong == "none" else ours))

    check_brings_nothing(pair)


@pytest.mark.parametrize("transport", READ_BY)
def test_addresses_of_blocks_need_an_encrypted_connection_between_machines(transport: str) -> None:
    check_brings_nothing(Pair(f"tcp://127.0.0.1:{free_port()}", transport=transport))


def check_brings_nothing(pair: Pair) -> None:
    pair.expect(7, pair.slots(2))

    pair.push(7, pair.slots(1))

    wait_until(lambda: pair.address in pair.backends[0]._failed_s)
    wait_until(lambda: len(pair.sender._stagings[0]._free) == len(pair.sender._stagings[0].kv))
    pair.receiver.cancel(7)
    assert pair.receiver.next_received() == [KvReceived(7, 0)]
    pair.close()


def test_a_receiver_without_the_secret_gets_nothing() -> None:
    with pytest.raises(KvTransferError, match="the receiver has another kv"):
        greet_receiver(_Replayed(), SECRET, IDENTITY)  # type: ignore[arg-type]


class _Replayed:
    """A pipe whose other side sends any bytes."""

    def __init__(self) -> None:
        self._left = b"LSKVMOV2" + bytes(64)

    def send_all(self, buffers: list[memoryview]) -> None: ...

    def read_into(self, buffers: list[memoryview]) -> None:
        count = len(buffers[0])
        buffers[0][:], self._left = self._left[:count], self._left[count:]


def test_changed_bytes_and_replayed_frames_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = (FrameStream(SocketPipe(one), b"k" * 32) for one in (ours, theirs))
        block, frame = memoryview(bytearray(b"a" * 100)), Frame(1, 0, 1)
        place = memoryview(bytearray(100))
        sender.send(frame, [block])
        got, mac = receiver.read_header()
        receiver.read_blocks([place])
        receiver.check(got, [place], mac)
        assert bytes(place) == bytes(block)

        with pytest.raises(KvTransferError, match="wrong MAC"):
            receiver.check(got, [place], mac)  # the same frame again
        sender.send(frame, [block])
        got, mac = receiver.read_header()
        receiver.read_blocks([place])
        place[5] ^= 1
        with pytest.raises(KvTransferError, match="wrong MAC"):
            receiver.check(got, [place], mac)


def test_a_frame_with_a_wrong_mac_changes_no_slot_and_ends_the_connection() -> None:
    pair = Pair(f"tcp://127.0.0.1:{free_port()}")
    target = pair.slots(2)
    before = kv(pair.target, target)
    pair.expect(7, target)
    stream = pair.backends[0].connect(pair.address)
    stream._key = b"x" * 32

    stream.send(Frame(7, 0, 1), [memoryview(bytearray(pair.backends[0]._sizes[0].block_bytes))])

    wait_until(stream.pipe.has_ended)
    pair.receiver.cancel(7)
    assert pair.receiver.next_received() == [KvReceived(7, 0)]
    assert all(map(torch.equal, kv(pair.target, target), before))
    stream.pipe.close()
    pair.close()


def test_garbage_and_frames_beyond_the_limit_close_the_connection(pair: Pair) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(200)):
        with sockets._connect(pair.address) as sock:
            sock.sendall(garbage)
            with suppress(ConnectionResetError):  # it did not read all of it
                while sock.recv(4096):
                    pass
    stream = pair.backends[0].connect(pair.address)
    limit = pair.backends[1]._sizes[0].max_blocks
    header = np.array([7], "<i8").tobytes() + np.array([0, limit + 1, 0], "<u4").tobytes() + bytes(32)
    stream.pipe.send_all([memoryview(header)])
    wait_until(stream.pipe.has_ended)
    stream.pipe.close()

    pair.expect(7, pair.slots(2))
    pair.push(7, pair.slots(1))
    assert pair.receiver.next_received() == [KvReceived(7, BLOCKS)]


def test_a_frame_beyond_the_slots_of_its_transfer_is_dropped(pair: Pair) -> None:
    pair.expect(7, pair.slots(2, 2))
    pair.push(7, pair.slots(1, 2), first=1)
    pair.push(7, pair.slots(1, 2))

    assert pair.receiver.next_received() == [KvReceived(7, 2)]


def test_a_receiver_that_dies_leaves_no_thread_and_no_memory_in_use(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "RETRY_S", LONG_S)
    before = threading.active_count()
    pair.expect(7, pair.slots(2))
    pair.push(7, pair.slots(1))
    pair.receiver.next_received()
    dead = "unix:///no/such/socket" if pair.address.startswith("unix") else f"tcp://127.0.0.1:{free_port()}"

    returned = threading.Event()
    view = memoryview(bytearray(8))
    pair.backends[0].push(dead, Outgoing(Frame(1, 0, 1), [view], lambda: None, lambda _: returned.set()))

    assert returned.wait(LONG_S)
    wait_until(lambda: dead not in pair.backends[0]._peers)
    again = threading.Event()
    pair.backends[0].push(dead, Outgoing(Frame(1, 0, 1), [view], lambda: None, lambda _: again.set()))
    assert again.is_set()  # it is left alone for a while
    pair.close()
    wait_until(lambda: threading.active_count() <= before)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 frames of a block each are on their way at most. No receiver is too slow for a loaded machine."""
    monkeypatch.setattr(kv_staging, "FRAME_BYTES", block_bytes(LAYOUT, BLOCK_TOKENS))
    monkeypatch.setattr(kv_staging, "STALL_S", LONG_S)


@pytest.fixture
def swallowing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a port that takes connections and never reads. Nobody gives up in the time of a test."""
    monkeypatch.setattr(pipe, "TIMEVAL", struct.pack("ll", 3600, 0))
    with socket.create_server(("127.0.0.1", 0), backlog=16) as sock:
        yield f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def num_free(pair: Pair) -> int:
    return len(pair.sender._stagings[0]._free)


def push_to(pair: Pair, address: str, transfer_id: int, blocks: int = 40) -> None:
    pair.sender.push(KvSend(transfer_id, [address], 0, np.tile(pair.slots(1, 1), blocks)))


def push_until_stalled(pair: Pair, address: str, transfer_id: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_staging, "STALL_S", 0.01)
        push_to(pair, address, transfer_id)


@pytest.mark.usefixtures("small_frames")
def test_a_receiver_that_takes_nothing_leaves_memory_for_others(swallowing: str) -> None:
    pair = Pair(f"tcp://127.0.0.1:{free_port()}")
    pair.expect(8, pair.slots(2))

    push_until_stalled(pair, swallowing, 7)
    pair.push(8, pair.slots(1))

    assert pair.receiver.next_received() == [KvReceived(8, BLOCKS)]
    wait_until(lambda: num_free(pair) == 8)
    pair.close()


@pytest.mark.usefixtures("small_frames")
def test_no_step_waits_again_for_a_receiver_that_has_stalled(swallowing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(f"tcp://127.0.0.1:{free_port()}")
    push_until_stalled(pair, swallowing, 7)
    assert num_free(pair) == 8
    monkeypatch.setattr(kv_staging, "STALL_S", 3600.0)

    with ThreadPoolExecutor(1) as steps:
        steps.submit(push_to, pair, swallowing, 9).result(LONG_S)

    assert num_free(pair) == 8
    pair.close()


@pytest.mark.usefixtures("small_frames")
def test_a_prompt_of_which_a_frame_was_lost_is_not_sent_any_more(swallowing: str) -> None:
    """The other engine can use the blocks before the gap only."""
    pair = Pair(f"tcp://127.0.0.1:{free_port()}")
    push_until_stalled(pair, swallowing, 7)
    pair.expect(7, pair.slots(2))

    pair.push(7, pair.slots(1))
    pair.expect(8, pair.slots(3))
    pair.push(8, pair.slots(1))

    assert pair.receiver.next_received() == [KvReceived(8, BLOCKS)]
    assert not pair.receiver._transfers[7].arrived
    pair.close()


@pytest.mark.usefixtures("small_frames")
def test_a_step_waits_for_a_receiver_that_is_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight of its 40 frames are on their way at most."""
    pair = Pair(f"unix://{tmp_path}/kv")
    most = 0
    begin = pair.receiver.begin

    def begin_and_count(frame: Frame) -> Any:
        nonlocal most
        most = max(most, 16 - num_free(pair))
        return begin(frame)

    monkeypatch.setattr(pair.receiver, "begin", begin_and_count)
    target = np.tile(pair.slots(2, 1), 40)
    pair.expect(7, target)

    push_to(pair, pair.address, 7)

    assert pair.receiver.next_received() == [KvReceived(7, 40)]
    assert most <= 8
    pair.close()


@pytest.mark.usefixtures("small_frames")
def test_a_receiver_that_takes_frames_again_gets_all_of_them() -> None:
    staging = SendStaging(filled(LAYOUT, torch.device("cpu")), pick_device("cpu"))
    held = [staging.take_for("a", 1) for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_staging, "STALL_S", 0.0)
        assert staging.take_for("a", 1) is None
    assert staging.take_for("a", 1) is None, "it has stalled"

    for blocks in held:
        assert blocks is not None
        staging.give_back_from("a", blocks, was_sent=True)

    assert all(staging.take_for("a", 1) is not None for _ in range(8))


class LateMemory:
    """A ReadableMemory that is not read in time, until the test lets it."""

    transport = "late"

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def register(self, chunks: Any) -> None: ...

    def introduction(self, host: str) -> bytes:
        return b"memory"

    def open(self, host: str, introduction: bytes) -> LateMemory:
        return self

    def being_read(self) -> Any:
        return nullcontext()

    def read(self, addresses: Any, blocks: Any) -> None:
        raise ReadTimeoutError("it takes too long", self._wait)

    def _wait(self) -> None:
        self.has_ended.wait()

    def close(self) -> None: ...


def test_memory_of_a_frame_that_is_not_read_in_time_comes_back_when_nothing_writes_to_it(
    tmp_path: Path,
) -> None:
    memory = LateMemory()
    pair = Pair(f"unix://{tmp_path}/kv", transport=memory)
    staging = pair.receiver._stagings[0]
    pair.expect(7, pair.slots(2))

    pair.push(7, pair.slots(1))

    wait_until(lambda: pair.address in pair.backends[0]._failed_s)  # the receiver has closed the connection
    pair.receiver.cancel(7)
    assert pair.receiver.next_received() == [KvReceived(7, 0)]
    assert len(staging._free) == len(staging.kv) - BLOCKS
    memory.has_ended.set()
    wait_until(lambda: len(staging._free) == len(staging.kv))
    pair.close()


def fail(*_: object) -> None:
    raise RuntimeError("there is no more")


@pytest.mark.parametrize("fault", ["fewer ranks", "device memory", "threads"])
def test_what_cannot_be_sent_fails_no_step_and_leaves_no_memory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The step is launched by the same call."""
    pair = Pair(f"unix://{tmp_path}/kv")
    if fault == "fewer ranks":
        pair.sender._rank = RankHeads(1, 2)
    elif fault == "device memory":
        monkeypatch.setattr(pair.sender._copies, "down", fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", fail)

    pair.push(7, pair.slots(1))

    assert num_free(pair) == len(pair.sender._stagings[0].kv)
    assert not pair.backends[0]._peers
    pair.close()
