"""httpserver -> router -> httpserver: what a trainer asks of the engine beside tokens. See docs/rl.md.

A new control call is a struct here in RlQuery, and a handler that RlControl of the router has for its type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class GetRlState(msgspec.Struct, frozen=True, tag=True):
    """Is the engine paused, or asleep?"""

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


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give memory back. The reply comes when it is free."""

    query_id: int
    mode: PauseMode = "abort"  # as of PauseGeneration
    tags: list[str] = []  # of MEMORY_TAGS; empty: all. Without ``weights``, nothing is freed


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again. The reply comes when the weights are loaded."""

    query_id: int
    tags: list[str] = []  # empty: all; requests go on when all are there


RlQuery = GetRlState | PauseGeneration | ResumeGeneration | FlushCache | AbortAll | Sleep | WakeUp


class RlState(msgspec.Struct, frozen=True):
    is_paused: bool = False
    is_sleeping: bool = False


class RlReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to an RlQuery."""

    query_id: int
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong
    state: RlState = RlState()
    count: int = 0  # of requests that were aborted, paused or are still open
    method: str = ""  # how a Sleep or WakeUp did it: see router/rl/sleep.py
    seconds: float = 0.0  # that it took


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
    )
