"""KV that prefill engines send for waiting requests of this engine.

A request with a transfer waits until there are slots for its prompt. Then the workers expect its KV in these slots, and
the dispatcher has a prefill engine compute it. When the transfer ends, what has come enters the prefix cache, where the
request finds it. It computes the rest itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvCancel, KvTransferParams, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.step import KvRecv
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.kv.pool import KvPool, PrefixLoad, cacheable
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.radix_cache import Ids, have_common_prefix
from lightserve.router.kv.source import Activity, KvReceiverHandle, KvSource, KvTransfers, KvWorkers, LoadContext
from lightserve.router.observability.stats import Figures
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

MIN_COMING_TOKENS = 32  # another request waits for the same prefix if it has so many more tokens than the cache
GRACE_S = 10.0  # the workers end a transfer in time; if they do not, a request waits so much longer and then computes


PrefixKey = tuple[str, int, bytes]  # salt, the first token of a block, and the first tokens of the block


class PendingTransfer(NamedTuple):
    req: Req
    prefix: PrefixLoad
    wait: Wait  # of its request, and of others with the same prefix

    @property
    def num_blocks(self) -> int:
        return len(self.prefix.slots) // BLOCK_TOKENS + sum(map(len, self.prefix.group_blocks))


class _NoReceiver:
    """The workers are lost."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def cancel(self, transfer_id: int) -> None:
        """There is no transfer."""


NO_RECEIVER = _NoReceiver()


class RemoteKvSource(KvSource, PoolListener):
    def __init__(self, pool: KvPool, send: Callable[[RemotePrefillRequest | KvTransferTimeout], None]) -> None:
        """``send``: to the dispatcher."""
        self.num_wanted = 0  # tokens
        self.num_received = 0
        self.num_given_up = 0  # tokens that a prefill engine should have sent and that did not come
        self.num_recomputed = 0  # tokens that were received, and computed all the same
        self._pool = pool
        self._send = send
        self._receiver: KvReceiverHandle = NO_RECEIVER
        self._open: dict[int, PendingTransfer] = {}  # by transfer
        self._coming: dict[PrefixKey, PendingTransfer] = {}  # the latest, by the first block that it brings
        self._transfer_of: dict[int, int] = {}  # by request: its open transfer
        self._received: dict[int, int] = {}  # by request that is not admitted yet: tokens that should be cached
        self._recvs: list[KvRecv] = []  # for the next step
        self._cancelled: set[int] = set()  # open transfers that nobody sends KV for
        self._declined: set[int] = set()  # of these, transfers whose prompts no prefill engine has got
        pool.add_listener(self)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted before transfers end."""
        return sum(len(pending.wait.blocked) for pending in self._open.values())

    @property
    def expected_reqs(self) -> Sequence[Req]:
        """The requests that wait for transfers of their own."""
        return [
            pending.req
            for transfer_id, pending in self._open.items()
            if self._transfer_of.get(pending.req.req_id) == transfer_id
        ]

    def connect(self, workers: KvWorkers, wake: Callable[[], None]) -> None:
        if workers.kv_receiver is None:
            return
        self.use_receiver(workers.kv_receiver)
        workers.kv_receiver.on_received = partial(self._on_received, wake)
        workers.kv_receiver.start()

    def use_receiver(self, receiver: KvReceiverHandle) -> None:
        """Whoever has it calls ``finish``."""
        self._receiver = receiver

    def _on_received(self, wake: Callable[[], None], received: KvReceived) -> None:
        self.finish(received)
        wake()

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        """What a request waits for before it is admitted: its prompt comes from another engine."""
        if req.kv_transfer_params is None and (context.is_prefetch or not self._open):
            return None  # most requests end here
        cached = self._pool.cached_len(req)
        return self._wait_for_coming(req, cached, context.now_s) or self._ask_for(req, cached, context)

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        transfers.recvs += self._recvs
        self._recvs = []

    @property
    def has_transfers(self) -> bool:
        return bool(self._recvs)

    def on_admitted(self, req: Req) -> None:
        self._decline(req)
        self.num_recomputed += max(self._received.pop(req.req_id, 0) - req.planned_len, 0)

    def drop(self, req: Req) -> None:
        self._received.pop(req.req_id, None)
        transfer_id = self._transfer_of.pop(req.req_id, None)
        if transfer_id is not None:
            self._cancel(transfer_id)

    def cancel(self, message: KvCancel) -> None:
        """No prefill engine computes the prompt. The request waits until the workers have ended the transfer."""
        if self._transfer_of.get(message.req_id) == message.transfer_id:
            if not message.was_started:
                self._declined.add(message.transfer_id)
            self._cancel(message.transfer_id)

    @property
    def is_writing(self) -> bool:
        return bool(self._open)

    def stop_writing(self) -> None:
        for transfer_id in self._open:
            self._cancel(transfer_id)

    def _cancel(self, transfer_id: int) -> None:
        self._cancelled.add(transfer_id)
        self._receiver.cancel(transfer_id)

    def finish(self, received: KvReceived) -> None:
        """The workers have ended a transfer."""
        pending = self._open.pop(received.transfer_id, None)
        if pending is None:  # all KV was lost meanwhile
            return
        if self._coming.get(_key_of(pending.prefix)) is pending:
            del self._coming[_key_of(pending.prefix)]
        prefix = pending.prefix
        if received.num_blocks < pending.num_blocks:
            prefix = self._pool.shorten_load(prefix, min(received.num_blocks * BLOCK_TOKENS, len(prefix.slots)))
        self._pool.finish_load(prefix, is_valid=True, was_sent=True)
        self.num_received += len(prefix.slots)
        missing = len(pending.prefix.slots) - len(prefix.slots)
        if received.transfer_id not in self._declined:
            self.num_given_up += missing
        if received.num_blocks < pending.num_blocks and received.transfer_id not in self._cancelled:
            self._send(KvTransferTimeout(pending.req.req_id, received.transfer_id))
        self._cancelled.discard(received.transfer_id)
        self._declined.discard(received.transfer_id)
        pending.wait.end()
        if self._transfer_of.get(pending.req.req_id) != received.transfer_id:
            return  # it has ended meanwhile, and may have come back with another transfer
        del self._transfer_of[pending.req.req_id]
        self._received[pending.req.req_id] = len(prefix.ids)
        pending.req.timeline.kv("kv_received", len(prefix.slots))

    def on_reset(self) -> None:
        """The workers are lost. Requests that wait compute their prompts."""
        self._receiver = NO_RECEIVER
        expected = (pending for transfer_id, pending in self._open.items() if transfer_id not in self._declined)
        self.num_given_up += sum(len(pending.prefix.slots) for pending in expected)
        containers = (self._open, self._coming, self._transfer_of, self._received, self._recvs)
        for container in (*containers, self._cancelled, self._declined):
            container.clear()

    def figures(self) -> Figures:
        return {
            "kv_transfer_requests_waiting": self.num_waiting,
            "kv_transfer_waited_tokens_total": self.num_wanted,
            "kv_transfer_received_tokens_total": self.num_received,
            "kv_transfer_given_up_tokens_total": self.num_given_up,
            "kv_transfer_recomputed_tokens_total": self.num_recomputed,
        }

    def _ask_for(self, req: Req, cached: int, context: LoadContext) -> Wait | None:
        """Have a prefill engine compute the prompt, if one was offered and it is worth it."""
        params = req.kv_transfer_params
        if params is None or self._receiver is NO_RECEIVER:
            return None
        begin, end = cached // BLOCK_TOKENS, _num_divisible(req)
        if end * BLOCK_TOKENS - cached < params.min_tokens:
            self._decline(req)
            return None
        groups = self._pool.groups
        if not context.has_room(end * BLOCK_TOKENS) or not groups.can_load(
            groups.blocks_before(end), context.step_tokens
        ):
            return None  # it does not fit either, most likely, and is asked again
        wait = Wait(context.now_s + params.timeout_s + GRACE_S, self._on_late)
        self._start(req, params, (begin, end), wait)
        return wait

    def _start(self, req: Req, params: KvTransferParams, blocks: tuple[int, int], wait: Wait) -> None:
        begin, end = blocks
        of_groups = self._pool.groups.blocks_before(end)
        prefix = self._pool.start_load(req, begin * BLOCK_TOKENS, end * BLOCK_TOKENS, of_groups)
        req.kv_transfer_params = None
        self._open[params.id] = self._coming[_key_of(prefix)] = PendingTransfer(req, prefix, wait)
        self._transfer_of[req.req_id] = params.id
        self._recvs.append(KvRecv(params.id, prefix.slots, params.timeout_s, list(prefix.group_slots)))
        self.num_wanted += len(prefix.slots)
        req.timeline.kv("kv_wanted", len(prefix.slots))  # before a prefill engine can begin
        addresses, adapter = self._receiver.addresses, req.lora_digest
        self._send(RemotePrefillRequest(req.req_id, params.id, begin, end - begin, addresses, adapter))

    def _on_late(self, req: Req) -> None:
        """The workers have not ended the transfer. Its slots stay reserved, and the request computes its prompt."""
        transfer_id = self._transfer_of.pop(req.req_id, None)
        if transfer_id is not None:  # if not, it waited for that of another request
            self._send(KvTransferTimeout(req.req_id, transfer_id))
            self._cancel(transfer_id)

    def _decline(self, req: Req) -> None:
        params, req.kv_transfer_params = req.kv_transfer_params, None
        if params is not None:
            self._send(RemotePrefillRequest(req.req_id, params.id))

    def _wait_for_coming(self, req: Req, cached: int, now_s: float) -> Wait | None:
        """For the transfer that brings the next blocks of this request, which may be another's."""
        if req.needs_prompt_computed:
            return None
        ids = cacheable(req)
        pending = self._coming.get(_prefix_key(ids, req.salt, cached // BLOCK_TOKENS * BLOCK_TOKENS))
        if pending is None or now_s >= pending.wait.deadline_s:
            return None
        return pending.wait if have_common_prefix(ids, pending.prefix.ids, cached + MIN_COMING_TOKENS) else None


def _num_divisible(req: Req) -> int:
    """Blocks that another engine can compute without the rest of the prompt: no image is divided, nor are tokens that
    see later ones."""

    def is_divisible(length: int) -> bool:
        return req.boundaries.may_end_at(length) and not any(image.start < length < image.end for image in req.images)

    most = len(cacheable(req)) // BLOCK_TOKENS
    return next((count for count in range(most, 0, -1) if is_divisible(count * BLOCK_TOKENS)), 0)


def _key_of(prefix: PrefixLoad) -> PrefixKey:
    return _prefix_key(prefix.ids, prefix.req.salt, len(prefix.cached))


def _prefix_key(ids: Ids, salt: str, begin: int) -> PrefixKey:
    return salt, begin, ids[begin : begin + MIN_COMING_TOKENS].tobytes()
