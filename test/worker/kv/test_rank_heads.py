"""KV between engines with different numbers of ranks: every rank gets its heads, whichever rank had them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightserve.common.device import pick_device
from lightserve.common.kv.layout import KvGroup, KvLayout
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import RankGroup
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import can_divide_kv
from lightserve.messages.step import KvRecv, KvSend
from lightserve.messages.worker_calls import KvReceived
from lightserve.worker.kv.transfer import staging
from lightserve.worker.kv.transfer.rank_heads import WHOLE, Cut, RankHeads, cut_of
from lightserve.worker.kv.transfer.sockets import SocketTransferBackend
from lightserve.worker.kv.transfer.transfer import KvReceiver, KvSender, frame_sizes

BLOCKS, SIZE = 3, 8 * BLOCK_TOKENS
SECRET, IDENTITY = b"s" * 40, b"i" * 32
PLATFORM = pick_device("cpu")
CPU = PLATFORM.torch_device(0)
BF16 = torch.bfloat16
# all heads of a model, by group
MODELS = {
    "keys and values": (KvGroup((0, 2), 8, 16, 16, BF16),),
    "int8 with scales": (KvGroup((0, 1), 4, 16, 16, torch.int8, torch.float32),),
    "odd sizes": (KvGroup((0,), 4, 3, 3, torch.int8, torch.float32),),
    "unequal keys and values": (KvGroup((0, 1), 4, 24, 16, torch.float16),),
    "two shapes": (KvGroup((0, 2), 8, 16, 16, BF16), KvGroup((1,), 2, 32, 32, BF16)),
    "fewer heads than ranks": (KvGroup((0, 1), 2, 16, 16, torch.float32),),
    "latents": (KvGroup((0, 1), 1, 72, 0, BF16),),
    "latents in fp8": KvLayout.latents((0, 1), (72, 8), "fp8", BF16).groups,
}
WAYS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (8, 1), (1, 8)]


def of_heads(tensor: Tensor, heads: int, part: slice) -> Tensor:
    """``[layers, slots, heads or 2 * heads, ...]`` of some of the heads."""
    kinds = tensor.shape[2] // heads
    return tensor.unflatten(2, (kinds, heads))[:, :, :, part].flatten(2, 3)  # type: ignore[no-untyped-call, no-any-return]


def random_kv(groups: tuple[KvGroup, ...]) -> MemoryManager:
    """Of the whole model."""
    memory = MemoryManager(SIZE, KvLayout(groups), CPU)
    for buffer in (*memory.buffers, *memory.scale_buffers.values()):
        buffer.view(torch.uint8).random_(0, 120)
    return memory


def of_rank(whole: MemoryManager, rank: int, tp: int) -> MemoryManager:
    """What one rank has of the KV of the whole model."""
    parts = [RankGroup(rank, tp).part_of(group.num_heads) for group in whole.layout.groups]
    groups = [
        KvGroup(group.layers, part.stop - part.start, group.key_size, group.value_size, group.dtype, group.scale_dtype)
        for group, part in zip(whole.layout.groups, parts, strict=True)
        if group.content == group.content.KV
    ]
    others = [group for group in whole.layout.groups if group.content != group.content.KV]
    memory = MemoryManager(SIZE, KvLayout((*groups, *others)), CPU)
    for number, (group, part) in enumerate(zip(whole.layout.groups, parts, strict=True)):
        memory.buffers[number].copy_(of_heads(whole.buffers[number], group.num_heads, part))
        if number in whole.scale_buffers:
            memory.scale_buffers[number].copy_(of_heads(whole.scale_buffers[number], group.num_heads, part))
    return memory


class Ranks:
    """The ranks of an engine that sends, and of one that receives."""

    def __init__(self, whole: MemoryManager, senders: int, receivers: int, folder: Path) -> None:
        total = tuple(group.num_heads for group in whole.layout.groups)
        self.expected = [of_rank(whole, rank, receivers) for rank in range(receivers)]
        self.targets = [MemoryManager(SIZE, memory.layout, CPU) for memory in self.expected]
        self.addresses = [f"unix://{folder}/{rank}" for rank in range(receivers)]
        self.backends: list[SocketTransferBackend] = []
        self.receivers = []
        for rank, (memory, address) in enumerate(zip(self.targets, self.addresses, strict=True)):
            heads = RankHeads(rank, receivers, total)
            backend = self._backend(memory, heads)
            self.receivers.append(KvReceiver(memory, PLATFORM, backend, heads))
            backend.listen(address, self.receivers[-1])
        self.senders = []
        for rank in range(senders):
            memory, heads = of_rank(whole, rank, senders), RankHeads(rank, senders, total)
            self.senders.append(KvSender(memory, PLATFORM, self._backend(memory, heads), heads))

    def _backend(self, memory: MemoryManager, heads: RankHeads) -> SocketTransferBackend:
        self.backends.append(SocketTransferBackend(IDENTITY, SECRET, frame_sizes(memory, heads)))
        return self.backends[-1]

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "FRAME_BYTES", 2**15)


@contextmanager
def ranks_of(name: str, senders: int, receivers: int, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(random_kv(MODELS[name]), senders, receivers, folder)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("senders", "receivers"), WAYS)
def test_every_rank_gets_its_heads(name: str, senders: int, receivers: int, tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(SIZE).astype(np.int32)
    source, target = order[: BLOCKS * BLOCK_TOKENS], order[-BLOCKS * BLOCK_TOKENS :]
    with ranks_of(name, senders, receivers, tmp_path) as ranks:
        for receiver in ranks.receivers:
            receiver.expect(KvRecv(7, target, 60.0))
        for sender in ranks.senders:
            sender.push(KvSend(7, ranks.addresses, 0, source))

        ended = [receiver.next_received() for receiver in ranks.receivers]

        assert ended == [[KvReceived(7, BLOCKS)]] * receivers
        for found, expected in zip(ranks.targets, ranks.expected, strict=True):
            for one, wanted in zip(tensors_of(found), tensors_of(expected), strict=True):
                assert torch.equal(one[:, target], wanted[:, source])


def tensors_of(memory: MemoryManager) -> list[Tensor]:
    return [buffer.view(torch.uint8) for buffer in (*memory.buffers, *memory.scale_buffers.values())]


def test_a_block_has_not_come_before_all_of_its_cuts_have(tmp_path: Path) -> None:
    slots = np.arange(BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    with ranks_of("keys and values", 2, 1, tmp_path) as ranks:
        (receiver,) = ranks.receivers
        receiver.expect(KvRecv(7, slots, 2.0))
        ranks.senders[0].push(KvSend(7, ranks.addresses, 0, slots))
        ranks.senders[1].push(KvSend(7, ranks.addresses, 0, slots[:BLOCK_TOKENS]))

        assert receiver.next_received() == [KvReceived(7, 1)]


def test_only_one_of_the_ranks_with_the_same_latents_sends_them() -> None:
    receivers = [RankHeads(rank, 4, (1,)).receivers(2) or [] for rank in range(4)]

    assert [[receiver.rank for receiver in found] for found in receivers] == [[0], [], [1], []]


def test_cuts_have_numbers_in_their_order() -> None:
    cuts = list(RankHeads(0, 1, (8,)).cuts())

    assert [cut.order for cut in cuts] == list(range(len(cuts)))
    assert [cut_of(order) for order in range(len(cuts))] == cuts
    assert cuts[:4] == [WHOLE, Cut(0, 2), Cut(1, 2), Cut(0, 4)]


@pytest.mark.parametrize(("ranks", "fits"), [((1, 8), True), ((4, 2), True), ((1, 16), False), ((3, 1), False)])
def test_ranks_are_divided_by_a_few_powers_of_2(ranks: tuple[int, int], fits: bool) -> None:
    assert can_divide_kv(*ranks) is fits


def test_kv_that_cannot_be_cut_goes_to_as_many_ranks_only() -> None:
    assert RankHeads(1, 2).receivers(1) is None
    assert RankHeads(1, 2).receivers(2) == [(1, WHOLE, WHOLE)]
