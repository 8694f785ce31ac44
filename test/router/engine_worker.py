"""A simulated worker with all that steps may ask of it: its KV slots hold hashes of the prefixes that they belong to.

It does what a step says in the order of a real worker: it stores KV in host memory, starts loads, expects KV, computes
the rows, and sends KV. The slots that a load or another engine writes hold nothing before that has ended. Whatever is
read, stored or sent must be the hash of the right prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightserve.messages.block_hash import BLOCK_TOKENS, KEY_BYTES
from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.step import KvLoad, KvRecv, KvSend, KvStore, NewReq, Step
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.state_pool import StatePool
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.scheduler import Scheduler
from test.router.processing import StepOuts
from test.router.scheduler.test_scheduler import ROOT, KvWorker, fold
from test.router.sources import source_of

Prefixes = list[int]  # what the slots of some tokens hold


def root_of(lora_id: int | None) -> int:
    """The prefix of no tokens, computed with this adapter."""
    return ROOT if lora_id is None else fold(ROOT, -1 - lora_id)


def prefixes_of(ids: list[int], root: int) -> Prefixes:
    """Of all these tokens."""
    return list(accumulate(ids, fold, initial=root))[1:]


def stored(key: bytes, blocks: dict[bytes, Prefixes], num_slots: int) -> Prefixes:
    """What a block of this key holds: all tokens, or the state after the last one."""
    return blocks[key[:KEY_BYTES]][-num_slots:]


class EngineWorker(KvWorker):
    def __init__(self, scheduler: Scheduler, forces: bool, blocks: dict[bytes, Prefixes]) -> None:
        """``blocks``: what a block of each key must hold."""
        super().__init__(scheduler.only_group, forces=forces)
        self.host: dict[int, list[int | None]] = {}
        self.loads: dict[int, KvLoad] = {}  # by id
        self.recvs: dict[int, KvRecv] = {}  # by transfer
        self.wanted: dict[int, Prefixes] = {}  # by transfer: what another engine wants
        self.num_sent: dict[int, int] = {}  # blocks, by transfer
        self.num_group_sends = 0
        self._scheduler = scheduler
        self._blocks = blocks
        self._adapters: dict[int, int] = {}  # by slot on the device
        self._adapter_of: dict[int, tuple[int, int]] = {}  # by request: its slot, and the adapter that was there

    def run(self, step: Step) -> StepOuts:
        self._adapters |= {place.slot: place.lora_id for place in step.loras}
        for store in step.stores:
            self._store(store)
        for load in step.loads:
            self._fill(load, [None] * len(load.slots))
        for recv in step.recvs:
            for kv, slots in self._pools_of(recv):
                _write(kv, slots, [None] * len(slots))
        self.loads |= {load.load_id: load for load in step.loads}
        self.recvs |= {recv.transfer_id: recv for recv in step.recvs}
        outs = super().run(step)
        self._check_written()
        for row in step.rows:
            slot, lora_id = self._adapter_of[row.req_id]
            assert self._adapters.get(slot, -1) == lora_id, "a request is computed with another adapter"
        for send in step.sends:
            self._send(send)
        return outs

    def finish_load(self, load_id: int, is_valid: bool) -> None:
        load = self.loads.pop(load_id)
        if is_valid:
            self._fill(load, [prefix for block in load.blocks.tolist() for prefix in self.host[block]])

    def num_coming(self, transfer_id: int) -> int:
        """Blocks of all pools."""
        recv = self.recvs[transfer_id]
        per_block = [BLOCK_TOKENS, *(self._slots_of_block(number) for number in range(len(recv.group_slots)))]
        return sum(len(slots) // count for slots, count in zip((recv.slots, *recv.group_slots), per_block, strict=True))

    def receive(self, transfer_id: int, prompt: Prefixes, begin: int, num_blocks: int) -> None:
        """So many of its first blocks have come, behind ``begin`` tokens of the prompt. Nothing more does."""
        is_whole = num_blocks == self.num_coming(transfer_id)
        recv = self.recvs.pop(transfer_id)
        end = begin + len(recv.slots)
        come = prompt[begin : min(begin + num_blocks * BLOCK_TOKENS, end)]
        _write(self._kv, recv.slots[: len(come)], come)
        for number, slots in enumerate(recv.group_slots if is_whole else ()):
            _write(self._groups[number]._kv, slots, self._sent_of_group(number, prompt[:end], len(slots)))

    def _pools_of(self, recv: KvRecv) -> list[tuple[list[int | None], Int32s]]:
        groups = [(self._groups[number]._kv, slots) for number, slots in enumerate(recv.group_slots)]
        return [(self._kv, recv.slots), *groups]

    def _slots_of_block(self, group: int) -> int:
        return 1 if isinstance(self._scheduler.only_group.pool.groups[group], StatePool) else BLOCK_TOKENS

    def _sent_of_group(self, number: int, prompt: Prefixes, count: int) -> Sequence[int | None]:
        """What a group sends to continue behind a prompt. What the next token does not need may be anything."""
        group = self._scheduler.only_group.pool.groups[number]
        needed = group._needed if isinstance(group, SlidingWindowPool) else 1
        return [None] * (count - needed) + prompt[-count:][-needed:]

    def _root_of(self, new: NewReq) -> int:
        lora_id = self._adapters.get(new.lora_slot, -1)
        self._adapter_of[new.req_id] = new.lora_slot, lora_id
        return root_of(None if lora_id < 0 else lora_id)

    def _store(self, store: KvStore) -> None:
        tiers = source_of(self._scheduler, KvTiers)
        assert tiers is not None
        being_loaded = {block for load in self.loads.values() for block in load.blocks.tolist()}
        kv, blocks = self._kv_of(store), store.blocks.tolist()
        for block, slots in zip(blocks, store.slots.reshape(len(blocks), -1), strict=True):
            assert block not in being_loaded, "a block is stored where a load reads"
            self.host[block] = [kv[slot] for slot in slots]
            key = tiers.offload_queue._storing[block].block.key
            assert self.host[block] == stored(key, self._blocks, len(slots)), "a block does not hold its tokens"

    def _kv_of(self, command: KvStore | KvLoad) -> list[int | None]:
        """Of the pool whose blocks it has."""
        tiers = source_of(self._scheduler, KvTiers)
        assert tiers is not None
        first = command.blocks.tolist()[0]
        (number,) = [i for i, t in enumerate(tiers.offload_queue.host._tables) if t.first <= first < t.first + t.size]
        return self._kv if number == 0 else self._groups[number - 1]._kv

    def _fill(self, load: KvLoad, prefixes: Sequence[int | None]) -> None:
        kv = self._kv_of(load)
        _write(kv, load.slots, prefixes)

    def _check_written(self) -> None:
        """Nobody else writes to the slots of loads and of other engines."""
        pools = [self._kv, *(group._kv for group in self._groups)]
        for kv, written in zip(pools, self.written, strict=True):
            loading = [load.slots for load in self.loads.values() if self._kv_of(load) is kv]
            loading += [slots for recv in self.recvs.values() for pool, slots in self._pools_of(recv) if pool is kv]
            assert set(written).isdisjoint(slot for slots in loading for slot in int32s(slots).tolist())

    def _send(self, send: KvSend) -> None:
        """Block after block, each when it is computed. Those of KV groups follow."""
        if send.pool:
            kv, wanted = self._groups[send.pool - 1]._kv, self.wanted[send.transfer_id]
            expected = self._sent_of_group(send.pool - 1, wanted, len(send.slots))
            for slot, prefix in zip(send.slots.tolist()[-len(wanted) :], expected[-len(wanted) :], strict=True):
                assert prefix is None or kv[slot] == prefix, "a block of a group does not hold what comes next needs"
            self.num_group_sends += 1
            return
        begin, count = self.num_sent.get(send.transfer_id, 0), len(send.slots) // BLOCK_TOKENS
        assert send.first == begin, "blocks are sent twice, or one was left out"
        self.num_sent[send.transfer_id] = begin + count
        prefixes = self.wanted[send.transfer_id][begin * BLOCK_TOKENS : (begin + count) * BLOCK_TOKENS]
        assert [self._kv[slot] for slot in send.slots] == prefixes, "a block is sent that does not hold its tokens"


def _write(kv: list[int | None], slots: Int32s, prefixes: Sequence[int | None]) -> None:
    for slot, prefix in zip(int32s(slots).tolist(), prefixes, strict=True):
        kv[slot] = prefix
