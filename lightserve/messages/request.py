"""httpserver -> router: requests, and queries about them."""

from __future__ import annotations

import msgspec
import numpy as np

from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.media import FromEncoder, ImageItem
from lightserve.messages.params import FinishReason, GenerationParams, SchedulingParams
from lightserve.messages.rl import RlQuery


class GenerateReq(msgspec.Struct, frozen=True, tag=True):
    """One sequence to generate. The upper bits of its id name the HTTP process that waits: see http_process_of.

    With ``parent``, a request of an open group that has ended, ``prompt_ids`` follow the whole prompt of the parent.
    """

    req_id: int
    prompt_ids: Int32s
    params: GenerationParams
    arrived_s: float  # time.monotonic() when the HTTP request came; one clock for all processes of a machine
    scheduling: SchedulingParams = SchedulingParams()
    group: int = 0  # id of the first of the sequences that continue the same prompt
    is_group_open: bool = False  # more sequences of the group follow, as in a beam search, and use the KV of this one
    request_id: str = ""  # X-Request-Id of the HTTP request, for GET /debug/requests
    parent: int | None = None
    owner: str = ""  # the client, by a digest of its API key, for GET /debug/requests
    images: list[ImageItem] = []  # in the prompt, in their order

    def prefix_salt(self, uses_cache: bool) -> str:
        """Requests share cached prefixes exactly if this is the same. Choices of one prompt always share them."""
        return f"salt {self.scheduling.cache_salt}" if uses_cache else f"group {self.group}"

    def after(self, parent_ids: Int32s) -> GenerateReq:
        """The same with its whole prompt. ``parent_ids``: that of its parent."""
        return msgspec.structs.replace(self, prompt_ids=np.concatenate((parent_ids, int32s(self.prompt_ids))))

    @property
    def unknown_parent(self) -> str:
        """What its client is told if the parent is not known."""
        return f"the request continues {self.parent}, which is not known"


class ContinueReq(msgspec.Struct, frozen=True, tag=True):
    """A request that began in another server, which died. Its client has these tokens: generate those that follow."""

    request: GenerateReq  # with the seed that it had there
    output_ids: list[int]


class AbortReq(msgspec.Struct, frozen=True, tag=True):
    """End a request: its client disconnected (ABORT), or the detokenizer found a stop string (STOP)."""

    req_id: int
    reason: FinishReason = FinishReason.ABORT
    keeps_tokens: bool = False  # its client is there, and gets what the request has


class ReleaseParents(msgspec.Struct, frozen=True, tag=True):
    """No request will name these ones of an open group as its parent any more. They have ended or were aborted."""

    req_ids: list[int]


class AbortByRequestId(msgspec.Struct, frozen=True, tag=True):
    """A client aborts requests by their request id, None for all. Every HTTP process aborts those that it has."""

    request_id: str | None
    owner: str | None = None  # only the requests of this client


class GetTimelines(msgspec.Struct, frozen=True, tag=True):
    """A client asks what happened to requests. The upper bits of ``query_id`` name the HTTP process that asks."""

    query_id: int
    request_id: str | None  # of the HTTP request; None: the last requests
    limit: int
    owner: str | None = None  # only the requests of this client


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """An operator starts a profile of the router and the workers."""

    query_id: int
    max_seconds: float  # then it ends by itself


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """An operator ends the profile and wants its file."""

    query_id: int


class SpanCounts(msgspec.Struct, frozen=True, tag=True):
    """Spans that an HTTP process has exported and dropped since its last message, for the metrics."""

    exported: int
    dropped: int


class StreamLogCounts(msgspec.Struct, frozen=True, tag=True):
    """What an HTTP process has counted about the stream log since its last message, for the metrics."""

    lost: int
    resumed: int
    taken_over: int


class ImageCounts(msgspec.Struct, frozen=True, tag=True):
    """What an HTTP process has counted about images since its last message, for the metrics."""

    process: int  # its number
    fetch_counts: list[int]  # of the buckets of image_fetch_seconds
    fetch_s: float
    fetching: int  # images that are fetched now
    refused: dict[str, int]  # by reason


HttpCounts = SpanCounts | StreamLogCounts | ImageCounts


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """An operator adds a LoRA adapter under a name."""

    query_id: int
    name: str
    path: str  # of its folder, below --lora_dir
    replaces: bool = False  # an adapter of this name may exist: new requests use the new one
    is_restored: bool = False  # other engines have it: requests can name it at once, and wait until it is loaded


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """An operator removes an adapter. Requests that run finish with it."""

    query_id: int
    name: str


class ListAdapters(msgspec.Struct, frozen=True, tag=True):
    """Which adapters are there? With ``name``, whether a request may use this one."""

    query_id: int
    name: str = ""


AdapterQuery = LoadAdapter | UnloadAdapter | ListAdapters

ToRouter = (
    GenerateReq
    | ContinueReq
    | AbortReq
    | ReleaseParents
    | AbortByRequestId
    | GetTimelines
    | StartProfile
    | StopProfile
    | SpanCounts
    | StreamLogCounts
    | ImageCounts
    | AdapterQuery
    | RlQuery
)
RouterInbox = ToRouter | FromEncoder

REQ_ID_BITS = 48  # low bits of an id count the requests of one HTTP process

HTTP_PROCESS_BITS = 8  # above them is the number of the process: see ChildConfig.http_process
NOBODY = (1 << REQ_ID_BITS - HTTP_PROCESS_BITS) - 1  # id of a query whose reply nobody waits for; counts end before it


def http_process_of(req_id: int) -> int:
    return req_id >> REQ_ID_BITS
