"""The calls of the router to its model workers: their names, their messages, and how the replies of all ranks join.

Every call has its own connection to every rank, which names the call when it is opened. A thread serves it there, so a
call delays neither steps nor other calls. A new call is an entry here and a handler in worker/call_handlers.py; then
``call`` of router/workers/client.py can make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lightserve.errors import WorkerCallError
from lightserve.ipc.codec import make_decode
from lightserve.messages.step import Step, StepResult, joined_results
from lightserve.messages.weights import WorkerWeightsCommand, WorkerWeightsReply
from lightserve.messages.worker_calls import (
    NO_STORE,
    CompileGrammar,
    KvFetch,
    KvFetched,
    KvFlush,
    KvFlushed,
    KvLoaded,
    KvLookup,
    KvReceived,
    LoraLoad,
    LoraLoaded,
    MemoryChanged,
    ProfileChunk,
    ProfileCommand,
    ProfileResult,
    ReleasedMemory,
)
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")
T = TypeVar("T")

LORA_FAILED = "a model worker failed while it loaded the adapter"


class WorkerCall(Generic[Request, Reply]):
    def __init__(
        self,
        name: str,
        request: Any,
        reply: Any,
        join: Callable[[Sequence[Reply]], Reply],
        failed: Callable[[str], Reply] | None = None,
    ) -> None:
        """``request`` and ``reply`` are types. ``join`` makes the result from the replies of all ranks, by rank.

        ``failed`` makes the reply of a rank that fails, from the error. Without it, the call raises WorkerCallError.
        """
        self.name = name
        self.request = request
        self.reply = reply
        self.decode_request: Callable[[bytes], Request] = make_decode(request)
        self.decode_reply: Callable[[bytes], Reply] = make_decode(reply)
        self._join = join
        self._failed = failed

    def joined(self, replies: Sequence[Reply | WorkerCallError]) -> Reply:
        """The result of the call. A rank that failed has an error instead of a reply."""
        valid = [self._or_failed(reply) for reply in replies]
        try:
            return self._join(valid)
        except WorkerCallError as error:  # the ranks disagree
            return self._or_failed(WorkerCallError(f"{self.name}: {error}"))

    def _or_failed(self, reply: Reply | WorkerCallError) -> Reply:
        if not isinstance(reply, WorkerCallError):
            return reply
        if self._failed is None:
            raise reply
        logger.warning("%s", reply)
        return self._failed(str(reply))


class WorkerCaller(Protocol):
    """Model workers, as far as they are called beside steps."""

    def call(
        self, call: WorkerCall[Request, Reply], request: Request, timeout_s: float | None = None
    ) -> asyncio.Future[Reply | None]:
        """Resolves when all ranks have replied; None: the workers are lost.

        A rank that does not reply within ``timeout_s`` has failed.
        """


def same_reply(replies: Sequence[T]) -> T:
    """All ranks must have replied the same."""
    for rank, reply in enumerate(replies):
        if reply != replies[0]:
            raise WorkerCallError(f"the ranks disagree: rank 0 replied {replies[0]!r}, rank {rank} {reply!r}")
    return replies[0]


def _first_error(replies: Sequence[LoraLoaded]) -> LoraLoaded:
    failed = next((reply for reply in replies if reply.error), None)
    if failed is None and len({reply.digest for reply in replies}) > 1:
        return LoraLoaded("the ranks have read different files of the adapter")
    return failed or replies[0]


def _slowest_load(replies: Sequence[KvLoaded]) -> KvLoaded:
    """A load is valid if it is valid in all ranks."""
    return KvLoaded(max(reply.seconds for reply in replies), all(reply.is_valid for reply in replies))


def _lowest_tiers(replies: Sequence[list[int]]) -> list[int]:
    """A block whose parts are in different tiers is read from the lowest of them."""
    return [NO_STORE if NO_STORE in tiers else max(tiers) for tiers in zip(*replies, strict=False)]


def _valid_in_all(replies: Sequence[KvFetched]) -> KvFetched:
    if not all(reply.are_valid for reply in replies):  # a rank failed
        return KvFetched([])
    are_valid = [all(block) for block in _by_item([reply.are_valid for reply in replies])]
    return KvFetched(are_valid, max(reply.seconds for reply in replies))


def _written_by_all(replies: Sequence[KvFlushed]) -> KvFlushed:
    if not all(reply.written for reply in replies):  # a rank failed
        return KvFlushed([], [], [])
    return KvFlushed(
        [min(numbers) for numbers in _by_item([reply.written for reply in replies])],
        [max(numbers) for numbers in _by_item([reply.errors for reply in replies])],
        [sum(numbers) for numbers in _by_item([reply.used_bytes for reply in replies])],
    )


def _by_item(lists: Sequence[list[T]]) -> list[tuple[T, ...]]:
    """The first items of all ranks, then the second ones, and so on."""
    counts = [len(items) for items in lists]
    if len(set(counts)) > 1:
        raise WorkerCallError(f"the ranks disagree: their lists have {counts} items")
    return list(zip(*lists, strict=True))


def _all_addresses(replies: Sequence[list[str]]) -> list[str]:
    return [address for reply in replies for address in reply]


def _all_paths(replies: Sequence[ProfileResult]) -> ProfileResult:
    errors = dict.fromkeys(reply.error for reply in replies if reply.error)
    num_unread = sum(reply.num_unread for reply in replies)
    return ProfileResult([path for reply in replies for path in reply.paths], "; ".join(errors), num_unread)


def _all_chunks(replies: Sequence[list[ProfileChunk]]) -> list[ProfileChunk]:
    return [chunk for reply in replies for chunk in reply]


def _all_changed(replies: Sequence[MemoryChanged]) -> MemoryChanged:
    changed = MemoryChanged(keeps_graphs=all(reply.keeps_graphs for reply in replies))
    return next((reply for reply in replies if reply.error), changed)


def _all_updated(replies: Sequence[WorkerWeightsReply]) -> WorkerWeightsReply:
    """An update has failed if it has failed in any rank. A load needs what any rank still needs."""
    failed = [reply for reply in replies if reply.error]
    if failed:
        return WorkerWeightsReply(failed[0].error, all(reply.is_client_error for reply in failed))
    missing = [reply.missing for reply in replies if reply.missing is not None]
    return WorkerWeightsReply(
        missing=max(missing, default=None),
        used=max(reply.used for reply in replies),
        has_repeated=any(reply.has_repeated for reply in replies),
        has_model=any(reply.has_model for reply in replies),
        has_drafts=any(reply.has_drafts for reply in replies),
        values=replies[0].values,
    )


RUN: WorkerCall[Step, StepResult] = WorkerCall("run", Step, StepResult, joined_results)
COMPILE_GRAMMAR: WorkerCall[CompileGrammar, None] = WorkerCall(
    "compile_grammar", CompileGrammar, None, same_reply, failed=lambda _: None
)
LOAD_LORA: WorkerCall[LoraLoad, LoraLoaded] = WorkerCall(
    "load_lora", LoraLoad, LoraLoaded, _first_error, failed=lambda _: LoraLoaded(LORA_FAILED)
)
WAIT_FOR_LOAD: WorkerCall[int, KvLoaded] = WorkerCall(
    "wait_for_load", int, KvLoaded, _slowest_load, failed=lambda _: KvLoaded(0.0, is_valid=False)
)
LOOKUP_KV: WorkerCall[KvLookup, list[int]] = WorkerCall(
    "lookup_kv", KvLookup, list[int], _lowest_tiers, failed=lambda _: []
)
FETCH_KV: WorkerCall[KvFetch, KvFetched] = WorkerCall(
    "fetch_kv", KvFetch, KvFetched, _valid_in_all, failed=lambda _: KvFetched([])
)
FLUSH_KV: WorkerCall[KvFlush, KvFlushed] = WorkerCall(
    "flush_kv", KvFlush, KvFlushed, _written_by_all, failed=lambda _: KvFlushed([], [], [])
)
KV_ADDRESS: WorkerCall[None, list[str]] = WorkerCall("kv_address", None, list[str], _all_addresses)
RECEIVE_KV: WorkerCall[None, list[KvReceived]] = WorkerCall("receive_kv", None, list[KvReceived], same_reply)
CANCEL_RECEIVE: WorkerCall[int, None] = WorkerCall("cancel_receive", int, None, same_reply, failed=lambda _: None)
PROFILE: WorkerCall[ProfileCommand, ProfileResult] = WorkerCall(
    "profile", ProfileCommand, ProfileResult, _all_paths, failed=lambda error: ProfileResult(error=error)
)
READ_PROFILE: WorkerCall[None, list[ProfileChunk]] = WorkerCall("read_profile", None, list[ProfileChunk], _all_chunks)
SET_MEMORY: WorkerCall[ReleasedMemory, MemoryChanged] = WorkerCall(
    "set_memory", ReleasedMemory, MemoryChanged, _all_changed, failed=lambda error: MemoryChanged(error)
)
UPDATE_WEIGHTS: WorkerCall[WorkerWeightsCommand, WorkerWeightsReply] = WorkerCall(
    "update_weights",
    WorkerWeightsCommand,
    WorkerWeightsReply,
    _all_updated,
    failed=lambda error: WorkerWeightsReply(error),
)
