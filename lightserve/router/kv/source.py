"""The contract of a place that KV may come from, so that a request need not compute it: other memory, another engine.

Admission asks every source what a request must wait for. A source reserves slots of the KV pool, says in a step what
the workers do, and gives the slots to the prefix cache when the KV is there. Then the request finds it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeVar

from lightserve.ipc.worker_calls import WorkerCall
from lightserve.messages.cluster import KvCancel
from lightserve.messages.step import KvLoad, KvRecv, KvSend, KvStore, NewReq, Step
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.kv.tiers.storage import Reply, StorageClient
from lightserve.router.observability.stats import Figures
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

Request = TypeVar("Request")
Replied = TypeVar("Replied")


class LoadContext(NamedTuple):
    """When a request asks for its KV."""

    now_s: float
    has_room: Callable[[int], bool]  # whether so many slots can be held beside what running requests will need
    is_prefetch: bool = False  # the request could not run yet
    step_tokens: int = 0  # the most of a step


class Activity(Enum):
    """What the scheduler has to do when a step is planned."""

    COMPUTING = auto()  # the step computes tokens, or requests enter the workers
    WAITING = auto()  # requests run or wait, and there is nothing to compute
    IDLE = auto()  # there are no requests


@dataclass(slots=True)
class KvTransfers:
    """What a step does with KV besides computing it."""

    stores: list[KvStore] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    sends: list[KvSend] = field(default_factory=list)
    recvs: list[KvRecv] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.sends or self.recvs)


class StepPart:
    """Adds transfers to steps. A part implements the methods that it needs."""

    def begin_step(self) -> None:
        """The rows of a step are planned now."""

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        """Add what the step does. If that is nothing for all parts, and it computes nothing, there is no step."""

    def on_completed(self, transfers: KvTransfers) -> None:
        """The step with these transfers is back."""

    def on_admitted(self, req: Req) -> None:
        """The request runs now, and computes what it has not cached."""

    def as_new(self, req: Req, new: NewReq) -> NewReq:
        """The request as the workers get it."""
        return new

    def drop(self, req: Req) -> None:
        """The request has ended, or goes on in another engine."""

    def figures(self) -> Figures:
        """The present values of its metrics. Those of all attention groups are added up."""
        return {}


class KvReceiverHandle(Protocol):
    """The workers that receive KV."""

    addresses: list[str]  # by rank

    def cancel(self, transfer_id: int) -> None:
        """End a transfer. The workers still report it."""


class StartedKvReceiver(KvReceiverHandle, Protocol):
    on_received: Callable[[KvReceived], None]

    def start(self) -> None: ...


class KvCaller(Protocol):
    def call(self, call: WorkerCall[Request, Replied], request: Request) -> Reply[Replied | None]:
        """None: the workers are lost."""


class KvWorkers(KvCaller, Protocol):
    """The workers of an attention group, as far as the sources of its KV need them."""

    @property
    def storage_tiers(self) -> StorageClient | None:
        """None: there are no KV tiers below host memory."""

    @property
    def kv_receiver(self) -> StartedKvReceiver | None:
        """None: the workers receive no KV of other engines."""


class KvSource(StepPart):
    """``KvPool.on_reset`` tells a source that all KV is lost, and the workers with it."""

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        """What a request must wait for before it is admitted; None: nothing. A transfer for it may begin now."""
        raise NotImplementedError

    @property
    def has_transfers(self) -> bool:
        """Whether the next steps may have something for the workers, though they only decode."""
        return True

    @property
    def stores_evicted(self) -> bool:
        """Whether a step has something for the workers if its slots come from an eviction."""
        return False

    @property
    def expected_reqs(self) -> Sequence[Req]:
        """Requests that will run as soon as their KV is there. Slots for their prompts are reserved."""
        return ()

    def connect(self, workers: KvWorkers, wake: Callable[[], None]) -> None:
        """Use these workers from now on. ``wake``: something has changed for waiting requests."""

    def on_sent(self, step: Step, workers: KvWorkers) -> None:
        """The step was sent to these workers."""

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts."""

    def cancel(self, message: KvCancel) -> None:
        """Another engine will not send what a request waits for."""

    @property
    def is_writing(self) -> bool:
        """Whether the workers may still write into slots of the pool, beside their steps."""
        return False

    def stop_writing(self) -> None:
        """End what can end early. It has ended when ``is_writing`` is false."""
