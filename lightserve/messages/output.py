"""router -> detokenization -> httpserver: tokens, text, figures, and replies to queries."""

from __future__ import annotations

from typing import Literal

import msgspec

from lightserve.messages.params import FinishReason, TextParams
from lightserve.messages.request import AbortByRequestId
from lightserve.messages.rl import RlReply
from lightserve.messages.step import NO_DRAFTS, NO_TOKENS, DraftColumns, ReqFailed, Token, TokenColumns


class TextReq(msgspec.Struct, frozen=True):
    """Announces a request to the detokenizer."""

    req_id: int
    text: TextParams
    output_ids: list[int] = []  # tokens whose text the client has already


class Admission(msgspec.Struct, frozen=True):
    """How a request was admitted."""

    queue_s: float
    cached_tokens: int  # of the prompt, from the prefix cache
    weight_version: str = ""  # of the weights; empty: they were never replaced


class TokenIdOut(msgspec.Struct, frozen=True, array_like=True):
    """A token of a request that has no text yet."""

    req_id: int
    token: Token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for an end token of the model
    admission: Admission | None = None  # with the first token
    is_text_token: bool = False  # it finishes the request, and its text counts: it is no end token


class EmbeddingOut(msgspec.Struct, frozen=True, array_like=True):
    """The result of a pooling request, which ends with it."""

    req_id: int
    values: bytes  # [size] float32
    admission: Admission


class BatchTokenIdOut(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one step, requests that are new or failed, and ids of requests that were aborted.

    A request is in ``new`` before its tokens come.
    """

    outs: list[TokenIdOut] = []
    new: list[TextReq] = []
    failed: list[ReqFailed] = []
    aborted: list[int] = []
    plain: TokenColumns = NO_TOKENS  # neither the first nor the last of their requests
    embeddings: list[EmbeddingOut] = []
    drafts: DraftColumns = NO_DRAFTS  # of this step
    ended: list[int] = []  # aborted too, but their clients get what they have; no token of them follows

    @property
    def tokens(self) -> list[TokenIdOut]:
        """All tokens: slower than the columns, and simpler."""
        return [*(TokenIdOut(req_id, Token(token_id)) for req_id, token_id in self.plain.pairs()), *self.outs]


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    counts: list[int]  # one per bucket of messages/metrics.py; the last counts all larger values
    total: float  # sum of the observed values


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """Metrics by the names of messages/metrics.py, which knows their kinds, buckets and labels."""

    values: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}  # name -> label value -> count
    histograms: dict[str, HistogramCounts] = {}


class RouterStats(msgspec.Struct, frozen=True, tag=True):
    """The heartbeat of router and detokenizer, every second, with the current metrics."""

    step_age_s: float  # age of the oldest step in flight; 0 when idle
    metrics: MetricsSnapshot
    has_workers: bool = True  # False while lost workers are being replaced
    crash_suspects: list[int] = []  # requests that were in flight when the workers were lost, right after that
    is_sleeping: bool = False  # they were stopped: --enable_rl
    problem: str = ""  # why no text can be generated until a trainer or an operator does something
    adapters: dict[str, str] = {}  # in the host memory of the workers: digests of their files, by name


TimelineEventKind = Literal[
    "queued",
    "refused",
    "admitted",
    "prefill",
    "first_token",
    "preempted",
    "workers_lost",
    "moved",  # to another engine
    "kv_wanted",  # from a prefill engine
    "kv_received",
    "finished",
    "failed",
]


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request in the router."""

    kind: TimelineEventKind
    at_s: float  # time.monotonic()
    duration_s: float = 0.0  # of a prefill chunk: from sending its step until the result is back
    # cached (admitted), computed (prefill), wanted or received of a prefill engine, or generated so far (preempted,
    # finished, failed)
    tokens: int = 0
    detail: str = ""  # finish reason, or status and message of a failure


class RequestTimeline(msgspec.Struct, frozen=True):
    """What happened to one sequence. An HTTP request has several if it has several prompts or choices."""

    request_id: str
    req_id: int
    arrived_s: float  # time.monotonic()
    prompt_tokens: int
    max_new_tokens: int
    events: list[TimelineEvent]
    events_left_out: int = 0  # beyond the limit: those before the last one


class Timelines(msgspec.Struct, frozen=True, tag=True):
    """The reply to GetTimelines, newest first."""

    query_id: int
    timelines: list[RequestTimeline]


class ProfileReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to StartProfile and StopProfile."""

    query_id: int
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong, or what is missing in the profile
    path: str = ""  # of the profile, once it is written


class AdapterCard(msgspec.Struct, frozen=True):
    name: str
    path: str


class AdapterReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to an AdapterQuery."""

    query_id: int
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong
    adapters: list[AdapterCard] = []


class VersionedReq(msgspec.Struct, frozen=True, array_like=True):
    """A request that was open when the weights were replaced."""

    req_id: int
    output_len: int  # tokens that were generated before


class WeightsReplaced(msgspec.Struct, frozen=True, tag=True):
    """An engine has other weights, or another name for them. All tokens of before come before this message."""

    version: str
    reqs: list[VersionedReq]


QueryReply = (
    Timelines | ProfileReply | AdapterReply | RlReply
)  # goes through the detokenizer to the HTTP process that asked

ToDetokenization = BatchTokenIdOut | RouterStats | AbortByRequestId | WeightsReplaced | QueryReply


class RequestDrafts(msgspec.Struct, frozen=True, array_like=True):
    """The drafts of a request, from its first token to its last one."""

    accepted: int
    rejected: int


class StrOut(msgspec.Struct, frozen=True, array_like=True):
    """A token with the text that it completes: "" while a character or a stop string may be incomplete."""

    req_id: int
    text: str
    token: Token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    admission: Admission | None = None
    drafts: RequestDrafts | None = None  # with the last token, if there were any

    @property
    def has_token(self) -> bool:
        """False: it is only the end of a request that was aborted."""
        return self.token.id >= 0


class EndedOut(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request that was aborted, and whose client gets what it has."""

    req_id: int
    text: str  # that was held back


class BatchStrOut(msgspec.Struct, frozen=True, tag=True):
    outs: list[StrOut] = []
    failed: list[ReqFailed] = []
    embeddings: list[EmbeddingOut] = []
    ended: list[EndedOut] = []


ToHttpserver = BatchStrOut | RouterStats | AbortByRequestId | WeightsReplaced | QueryReply
