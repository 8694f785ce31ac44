"""The worker's part of prefill and decode engines: it sends KV that it has computed, or receives it into its pool.

KV moves in blocks of tokens, through host memory: a step gathers the blocks that it has completed, threads send them
while the next step computes, and the other side copies them into the slots that its router has reserved.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.device import Device, to_device
from lightserve.common.device.base import Wait
from lightserve.common.kv.cpu_kv import BlockFormat, block_formats
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.links.tls import PeerContexts
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.step import KvRecv, KvSend
from lightserve.messages.worker_calls import KvReceived
from lightserve.utils.logger import init_logger
from lightserve.worker.kv.transfer.base import Frame, FrameSize, Incoming, KvTransferBackend, Outgoing
from lightserve.worker.kv.transfer.nixl import NixlMemory
from lightserve.worker.kv.transfer.rank_heads import WHOLE, Cut, KvRank, RankHeads, cut_of
from lightserve.worker.kv.transfer.sockets import SocketTransferBackend
from lightserve.worker.kv.transfer.staging import SendStaging, Staging, frame_blocks, views_of
from lightserve.worker.kv.transfer.transport import ReadableMemory

logger = init_logger(__name__)

STAGE_WAIT_S = 10.0  # a frame that comes waits so long for memory; then it is dropped
EARLY_S = 5.0  # the step that announces a transfer may come later than its first frame
SWITCH_S = 0.0005  # a thread that moves KV would wait 5 ms for the one that launches steps, at every call
MAX_ENDED = 4096  # transfers whose late frames are dropped at once
MAX_LOST = 256  # transfers whose further blocks are not sent: prompts that are being computed


class Formats:
    """How the blocks of a rank lie in frames: whole, or cut for an engine with more ranks."""

    def __init__(self, memory: MemoryManager, rank: RankHeads) -> None:
        self._memory = memory
        self._rank = rank
        self._by_cut = {WHOLE: block_formats(memory, BLOCK_TOKENS)}

    @property
    def num_pools(self) -> int:
        return len(self._by_cut[WHOLE])

    def of(self, cut: Cut, pool: int) -> BlockFormat:
        if cut not in self._by_cut:
            self._by_cut[cut] = block_formats(self._memory, BLOCK_TOKENS, self._rank.slices(cut))
        return self._by_cut[cut][pool]


class _Gathered(NamedTuple):
    """What a frame is made of."""

    staging: SendStaging
    kv_format: BlockFormat
    slots: Tensor  # [blocks, slots of a block]
    blocks: list[int]  # of the staging


class KvSender:
    """Of an engine that computes prompts for others. Called by the thread that runs steps."""

    def __init__(self, memory: MemoryManager, platform: Device, backend: KvTransferBackend, rank: RankHeads) -> None:
        self._device = memory.buffers[0].device
        self._formats = Formats(memory, rank)
        self._stagings = [SendStaging(memory, platform, pool) for pool in range(self._formats.num_pools)]
        backend.register([chunk for staging in self._stagings for chunk in staging.chunks])
        self._copies = platform.copy_stream(self._device)
        self._backend = backend
        self._rank = rank
        self._lost: deque[int] = deque(maxlen=MAX_LOST)  # transfers of which a frame was not sent

    def push(self, command: KvSend) -> None:
        """Send blocks that the steps so far compute. If a receiver is slower than the steps, this waits for it.

        What cannot be sent is lost, and the other engine computes it: no step may fail because of another engine, or
        wait for one that takes nothing.
        """
        if command.transfer_id in self._lost:
            return
        try:
            reason = self._push(command)
        except RuntimeError as error:  # of the device
            reason = str(error)
        if reason is not None:
            self._lost.append(command.transfer_id)
            logger.warning("the KV of a prompt is not sent: %s", reason)

    @torch.inference_mode()
    def _push(self, command: KvSend) -> str | None:
        """Why not all of it was sent."""
        receivers = self._rank.receivers(len(command.addresses))
        if receivers is None:  # the dispatcher pairs engines that fit
            return f"{self._rank.tp} ranks cannot send KV to {len(command.addresses)}"
        staging = self._stagings[command.pool]
        slots = _by_block(command.slots, staging.kv.format.num_slots, self._device)
        most = frame_blocks(staging.kv.format.num_bytes)
        for begin in range(0, len(slots), most):
            frame_slots = slots[begin : begin + most]
            for receiver in receivers:
                address = command.addresses[receiver.rank]
                blocks = staging.take_for(address, len(frame_slots))
                if blocks is None:
                    return f"{address} takes nothing, and has its share of the host memory"
                pool = receiver.placed_as.order * len(self._stagings) + command.pool
                frame = Frame(command.transfer_id, command.first + begin, len(frame_slots), pool)
                kv_format = self._formats.of(receiver.cut, command.pool)
                self._send(address, frame, _Gathered(staging, kv_format, frame_slots, blocks))
        return None

    def _send(self, address: str, frame: Frame, gathered: _Gathered) -> None:
        staging, kv_format, slots, blocks = gathered
        done = partial(staging.give_back_from, address, blocks)
        hosts = staging.hosts(blocks, kv_format)
        try:
            wait = self._copies.down(hosts, lambda block_range, copied: kv_format.gather(slots[block_range], copied))
        except RuntimeError:
            done(False)
            raise
        self._backend.push(address, Outgoing(frame, views_of(hosts), wait, done))


@dataclass(slots=True, eq=False)
class _Transfer:
    slots: list[Tensor]  # [blocks, slots of a block] by pool
    after: Wait  # the steps before may still use the slots
    deadline_s: float
    arrived: set[int] = field(default_factory=set)  # whole blocks, of one pool after the other
    arrived_cuts: set[tuple[int, Cut]] = field(default_factory=set)  # of such blocks
    num_copying: int = 0  # frames that are being copied into the slots
    is_over: bool = False  # nothing is copied any more

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.slots))

    @property
    def num_first(self) -> int:
        """How many of its first blocks have come."""
        return next(i for i in range(self.num_blocks + 1) if i not in self.arrived)

    def has_room(self, frame: Frame, pool: int) -> bool:
        return pool < len(self.slots) and frame.first + frame.num_blocks <= len(self.slots[pool])

    def slots_of(self, frame: Frame, pool: int) -> Tensor:
        return self.slots[pool][frame.first : frame.first + frame.num_blocks]

    def add(self, frame: Frame, pool: int, cut: Cut) -> None:
        """A frame has come. A block that was cut is there when all cuts of it are."""
        begin = sum(map(len, self.slots[:pool])) + frame.first
        numbers = range(begin, begin + frame.num_blocks)
        self.arrived_cuts.update((number, cut) for number in numbers)
        cuts = [Cut(n, cut.parts) for n in range(cut.parts)]
        self.arrived.update(block for block in numbers if all((block, n) in self.arrived_cuts for n in cuts))


class KvReceiver:
    """Of a decode engine. The thread that runs steps expects, those of the transfer backend bring, one for the router
    waits."""

    def __init__(self, memory: MemoryManager, platform: Device, backend: KvTransferBackend, rank: RankHeads) -> None:
        """``backend`` does not listen yet."""
        self._device = memory.buffers[0].device
        self._formats = Formats(memory, rank)
        self._stagings = [Staging(memory, platform, pool) for pool in range(self._formats.num_pools)]
        backend.register([chunk for staging in self._stagings for chunk in staging.chunks])
        self._copies = platform.copy_stream(self._device)
        self._transfers: dict[int, _Transfer] = {}
        self._ended: deque[int] = deque(maxlen=MAX_ENDED)
        self._cancelled: set[int] = set()  # before they were expected
        self._has_changed = threading.Condition()

    # from the router

    @torch.inference_mode()
    def expect(self, command: KvRecv) -> None:
        of_pools = zip((command.slots, *command.group_slots), self._stagings, strict=False)
        slots = [_by_block(of_pool, staging.kv.format.num_slots, self._device) for of_pool, staging in of_pools]
        transfer = _Transfer(slots, self._copies.mark(), time.monotonic() + command.timeout_s)
        with self._has_changed:
            self._transfers[command.transfer_id] = transfer
            transfer.is_over = command.transfer_id in self._cancelled
            self._cancelled.discard(command.transfer_id)
            self._has_changed.notify_all()

    def cancel(self, transfer_id: int) -> None:
        """Nobody sends what is left of this transfer."""
        with self._has_changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.is_over = True
            elif transfer_id not in self._ended:
                self._cancelled.add(transfer_id)
            self._has_changed.notify_all()

    def next_received(self) -> list[KvReceived]:
        """Wait until transfers have ended: all has come, or they were cancelled, or their deadlines have passed."""
        with self._has_changed:
            while not (ended := self._take_ended(time.monotonic())):
                deadline_s = min((transfer.deadline_s for transfer in self._transfers.values()), default=float("inf"))
                left_s = deadline_s - time.monotonic()
                self._has_changed.wait(min(max(left_s, 0.001), threading.TIMEOUT_MAX))
            return ended

    def _take_ended(self, now_s: float) -> list[KvReceived]:
        ended = []
        for transfer_id, transfer in list(self._transfers.items()):
            transfer.is_over |= now_s >= transfer.deadline_s or len(transfer.arrived) == transfer.num_blocks
            if transfer.is_over and not transfer.num_copying:
                del self._transfers[transfer_id]
                self._ended.append(transfer_id)
                ended.append(KvReceived(transfer_id, transfer.num_first))
        return ended

    # from the transfer backend

    def begin(self, frame: Frame) -> Incoming | None:
        with self._has_changed:
            self._has_changed.wait_for(
                lambda: frame.transfer_id in self._transfers or frame.transfer_id in self._ended, EARLY_S
            )
            if not self._is_wanted(frame):
                return None
        cut, pool = self._content_of(frame)
        staging = self._stagings[pool]
        blocks = staging.take(frame.num_blocks, STAGE_WAIT_S)
        if blocks is None:
            return None
        hosts = staging.hosts(blocks, self._formats.of(cut, pool))
        return Incoming(views_of(hosts), partial(self._end, frame, blocks))

    def _end(self, frame: Frame, blocks: Sequence[int], is_whole: bool) -> None:
        with self._has_changed:
            transfer = self._transfers[frame.transfer_id] if is_whole and self._is_wanted(frame) else None
            if transfer is not None:
                transfer.num_copying += 1
        try:
            if transfer is not None:
                self._copy(transfer, frame, blocks)
        finally:
            self._stagings[self._content_of(frame)[1]].give_back(blocks)

    def _is_wanted(self, frame: Frame) -> bool:
        transfer = self._transfers.get(frame.transfer_id)
        return transfer is not None and not transfer.is_over and transfer.has_room(frame, self._content_of(frame)[1])

    def _content_of(self, frame: Frame) -> tuple[Cut, int]:
        """What its blocks have of the blocks of this rank, and their pool."""
        order, pool = divmod(frame.pool, self._formats.num_pools)
        return cut_of(order), pool

    def _copy(self, transfer: _Transfer, frame: Frame, blocks: Sequence[int]) -> None:
        cut, pool = self._content_of(frame)
        kv_format, slots, is_copied = self._formats.of(cut, pool), transfer.slots_of(frame, pool), True
        try:
            self._copies.up(
                self._stagings[pool].hosts(blocks, kv_format),
                lambda block_range, copied: kv_format.scatter(copied, slots[block_range]),
                transfer.after,
            ).result()
        except RuntimeError as error:
            logger.warning("KV of another engine cannot be copied: %s", error)
            is_copied = False
        with self._has_changed:
            transfer.num_copying -= 1
            if is_copied:
                transfer.add(frame, pool, cut)
            self._has_changed.notify_all()


def _by_block(slots: Int32s, per_block: int, device: torch.device) -> Tensor:
    # a copy: torch warns of arrays that are views of a message
    return to_device(int32s(slots).copy(), device).long().view(-1, per_block)


class KvTransfer(NamedTuple):
    """What an engine with a role has."""

    sender: KvSender | None = None  # of one that computes prompts for others
    receiver: KvReceiver | None = None  # of a decode engine
    address: str = ""  # where it receives


class KvTransferArgs(NamedTuple):
    role: str
    address: str  # where a decode engine receives
    secret: bytes  # of the cluster, if KV goes over TCP
    rank: int  # among those that have a part of the same KV
    tls: PeerContexts | None = None  # None: it is not encrypted
    transport: str = "sockets"


def readable_memory(transport: str) -> ReadableMemory | None:
    """None: blocks go through sockets."""
    return NixlMemory() if transport == "nixl" else None


def frame_sizes(memory: MemoryManager, rank: RankHeads) -> list[FrameSize]:
    """By pool, of whole blocks and of every cut."""
    formats = Formats(memory, rank)
    sizes = [formats.of(cut, pool).num_bytes for cut in rank.cuts() for pool in range(formats.num_pools)]
    return [FrameSize(size, frame_blocks(size)) for size in sizes]


def make_kv_transfer(args: KvTransferArgs, memory: MemoryManager, platform: Device, rank: KvRank) -> KvTransfer:
    sys.setswitchinterval(SWITCH_S)
    heads, identity = rank
    identity = blake2b(args.transport.encode() + identity, digest_size=len(identity)).digest()
    backend = SocketTransferBackend(
        identity, args.secret, frame_sizes(memory, heads), args.tls, readable_memory(args.transport)
    )
    if args.role in ("prefill", "both"):
        return KvTransfer(sender=KvSender(memory, platform, backend, heads))
    receiver = KvReceiver(memory, platform, backend, heads)
    backend.listen(args.address, receiver)
    return KvTransfer(receiver=receiver, address=args.address)
