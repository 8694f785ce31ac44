"""httpserver -> router -> httpserver: what a trainer asks of the engine, except tokens. See docs/rl.md.

A new control call is a struct here in RlQuery, and a handler that RlControl of the router has for its type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lightserve.messages.weights import WeightBuffering, WeightSelector, WeightTensor

PauseMode = Literal["abort", "wait", "keep"]
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
TRAINER = "trainer"  # the source of weights that were broadcast: nobody can load them again


class GetRlState(msgspec.Struct, frozen=True, tag=True):
    """Is the engine paused, or asleep, and how many ranks has it?"""

    query_id: int


class PauseGeneration(msgspec.Struct, frozen=True, tag=True):
    """Send no more steps to the workers. The reply comes when the last one is back."""

    query_id: int
    mode: PauseMode = "abort"  # what happens to the requests: they end with what they have, finish, or stay
    refuses_new: bool = True  # new requests fail with 503; otherwise they wait. Those of mode keep always wait
    clears_cache: bool = False  # preempt the requests that stay, and drop all cached prefixes


class ResumeGeneration(msgspec.Struct, frozen=True, tag=True):
    """Go on after a pause."""

    query_id: int


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Drop all cached prefixes."""

    query_id: int
    preempts: bool = False  # running requests too, which compute their tokens again; otherwise they are an error


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """End all requests with the tokens that they have."""

    query_id: int


class JoinWeightGroup(msgspec.Struct, frozen=True, tag=True):
    """Have all workers join a trainer, which will send them weights."""

    query_id: int
    name: str
    first_rank: int  # of worker 0 of engine 0
    world_size: int
    backend: str  # gloo, or that of the device: nccl
    timeout_s: float
    address: str = ""
    port: int = 0
    buffering: WeightBuffering = WeightBuffering.EACH  # of its tensors, unless a call says another
    buffer_bytes: int = 0
    uses_torch: bool = True  # a process group of torch; False: a communicator of NCCL alone
    unique_id: bytes = b""  # of such a communicator; empty: a store at the address has it
    engine: int = 0  # its place among those that join: the ranks of those before it come first


class LeaveWeightGroup(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    name: str


class BeginWeightUpdate(msgspec.Struct, frozen=True, tag=True):
    """Weights will come, and EndWeightUpdate after the last ones. Without it, an update ends when all have come."""

    query_id: int
    selector: WeightSelector = WeightSelector.ALL  # of calls that name none


class ReceiveWeights(msgspec.Struct, frozen=True, tag=True):
    """Receive tensors from a trainer, which broadcasts them while this call waits."""

    query_id: int
    group: str
    tensors: list[WeightTensor]  # empty: the same as in the last update with this group
    buffering: WeightBuffering | None = None  # None: as the group
    version: str | None = None
    recomputes: bool = True  # running requests compute their KV again, with the new weights
    aborts: bool = False  # end all requests first, with the tokens that they have
    selector: WeightSelector | None = None  # None: that of BeginWeightUpdate


class EndWeightUpdate(msgspec.Struct, frozen=True, tag=True):
    query_id: int
    version: str | None = None
    recomputes: bool = True


class LoadWeightsFrom(msgspec.Struct, frozen=True, tag=True):
    """Load all weights from a folder below --weights_dir."""

    query_id: int
    path: str
    version: str | None = None
    recomputes: bool = True
    aborts: bool = False
    selector: WeightSelector = WeightSelector.ALL


class SetWeightVersion(msgspec.Struct, frozen=True, tag=True):
    """Name the weights that are served."""

    query_id: int
    version: str
    aborts: bool = False


class GetWeights(msgspec.Struct, frozen=True, tag=True):
    """What is served, and perhaps some numbers of a weight."""

    query_id: int
    name: str = ""  # of a weight; empty: none
    limit: int = 0


WeightQuery = (
    JoinWeightGroup
    | LeaveWeightGroup
    | BeginWeightUpdate
    | ReceiveWeights
    | EndWeightUpdate
    | LoadWeightsFrom
    | SetWeightVersion
    | GetWeights
)


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give memory back. The reply comes when it is free."""

    query_id: int
    mode: PauseMode = "abort"  # as of PauseGeneration
    tags: list[str] = []  # of MEMORY_TAGS; empty: all
    keeps_weights: bool = True  # in host memory, if the workers can; otherwise they are stopped


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again. The reply comes when the weights are loaded."""

    query_id: int
    tags: list[str] = []  # empty: all; requests go on when all are there


RlQuery = GetRlState | PauseGeneration | ResumeGeneration | FlushCache | AbortAll | Sleep | WakeUp | WeightQuery


class RlState(msgspec.Struct, frozen=True):
    is_paused: bool = False
    is_sleeping: bool = False


class WeightsState(msgspec.Struct, frozen=True):
    """The weights that an engine has."""

    version: str = "default"
    generation: int = 0  # how often they were replaced
    source: str = ""  # the folder of the last update, or "trainer"; empty: they come from --model_dir
    problem: str = ""  # why no text can be generated with them
    draft_source: str = ""  # as ``source``, of what drafts
    draft_problem: str = ""  # why what drafts has older weights than the last update gave it; texts are right
    missing: int | None = None  # tensors that the open update still needs
    values: list[float] = []


class RlReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to an RlQuery."""

    query_id: int
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong
    state: RlState = RlState()
    count: int = 0  # of requests that were aborted, paused or are still open, or of ranks (GetRlState)
    method: str = ""  # how a Sleep or WakeUp did it: see router/rl/sleep.py
    seconds: float = 0.0  # that it took
    weights: WeightsState | None = None  # in replies to a WeightQuery
    engines: int = 1  # whose replies this is


def _problems(weights: WeightsState) -> tuple[bool, bool]:
    """The greatest is that of the engine which has to be heard of."""
    return bool(weights.problem), bool(weights.draft_problem)


def joined_replies(query_id: int, replies: dict[int, RlReply]) -> RlReply:
    """Of several engines, by number: the worst status, and what any of them is."""
    messages = [f"engine {engine}: {reply.message}" for engine, reply in replies.items() if reply.message]
    states = [reply.state for reply in replies.values()]
    return RlReply(
        query_id,
        max(reply.status for reply in replies.values()),
        "; ".join(messages),
        RlState(any(state.is_paused for state in states), any(state.is_sleeping for state in states)),
        sum(reply.count for reply in replies.values()),
        next(iter(replies.values())).method,
        max(reply.seconds for reply in replies.values()),
        max(filter(None, (reply.weights for reply in replies.values())), key=_problems, default=None),
        len(replies),
    )
