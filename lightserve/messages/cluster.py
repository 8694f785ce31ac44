"""dispatcher <-> router of an engine; gateway <-> engine over TCP."""

from __future__ import annotations

import msgspec

from lightserve.messages.control import EngineInfo
from lightserve.messages.output import BatchTokenIdOut, QueryReply, RouterStats, WeightsReplaced
from lightserve.messages.request import (
    AbortReq,
    AdapterQuery,
    GenerateReq,
    GetTimelines,
    ReleaseParents,
    StartProfile,
    StopProfile,
)
from lightserve.messages.rl import RlQuery


class KvTransferParams(msgspec.Struct, frozen=True):
    """A prefill engine may compute the prompt of this request. The engine reserves slots for it and sends
    RemotePrefillRequest."""

    id: int
    timeout_s: float  # how long it waits for the KV from then on
    min_tokens: int  # if fewer are missing, it computes them itself


class KvTarget(msgspec.Struct, frozen=True):
    """The request is a prompt to compute for another engine: its KV goes there, block by block."""

    transfer_id: int
    first_block: int  # of the prompt: those before it are not needed
    addresses: list[str]  # of the workers there, by rank
    adapter: str = ""  # digest of its LoRA adapter there; empty: the base model


class DispatchedReq(msgspec.Struct, frozen=True, tag=True):
    """A request for one of several engines. It may have begun in another engine, and goes on from its tokens."""

    request: GenerateReq  # with its whole prompt, and a seed, so that every engine samples the same tokens
    age_s: float  # since it arrived: the clock of ``arrived_s`` may be another machine's
    block_hashes: bytes  # [blocks of the prompt] int64: see messages/block_hash.py
    output_ids: list[int] = []  # tokens that the client has got already
    is_moved: bool = False  # another engine had accepted it
    runs_alone: bool = False  # it may have crashed the workers of another engine: see CrashIsolation
    kv_transfer_params: KvTransferParams | None = None
    target: KvTarget | None = None


class MovedReqs(msgspec.Struct, frozen=True, tag=True):
    """These requests go on in another engine. Forget them, and confirm it by ``BatchTokenIdOut.aborted``."""

    req_ids: list[int]


class KvCancel(msgspec.Struct, frozen=True, tag=True):
    """No prefill engine computes the prompt of this request, or not any more."""

    req_id: int
    transfer_id: int
    was_started: bool = True  # a prefill engine had got the prompt


ToEngine = (
    DispatchedReq
    | AbortReq
    | ReleaseParents
    | MovedReqs
    | KvCancel
    | GetTimelines
    | StartProfile
    | StopProfile
    | AdapterQuery
    | RlQuery
)


class KvCacheEvents(msgspec.Struct, frozen=True, tag=True):
    """Changes of an engine's prefix cache since the last message, as hashes of blocks."""

    epoch: int  # counts how often all KV was lost; entries of an earlier epoch are void
    added: bytes  # [n] int64
    evicted: bytes  # [n] int64


class EngineDraining(msgspec.Struct, frozen=True, tag=True):
    """The engine ends when its requests have: send it no new ones."""


class RemotePrefillRequest(msgspec.Struct, frozen=True, tag=True):
    """The engine has reserved slots for the prompt of a request with KvTransferParams: let a prefill engine compute
    it."""

    req_id: int
    transfer_id: int
    first_block: int = 0  # the engine has those before it
    num_blocks: int = 0  # 0: it needs none
    addresses: list[str] = []  # of its workers, by rank
    adapter: str = ""  # digest of its LoRA adapter; empty: the base model


class KvTransferTimeout(msgspec.Struct, frozen=True, tag=True):
    """The KV of a prompt has not come in time, though nobody has cancelled it: the engines may not reach each other."""

    req_id: int
    transfer_id: int


FromEngine = (
    BatchTokenIdOut
    | RouterStats
    | WeightsReplaced
    | QueryReply
    | KvCacheEvents
    | EngineDraining
    | RemotePrefillRequest
    | KvTransferTimeout
)

LINK_PROTOCOL = 13  # increase it when a message between gateways and engines changes


class GatewayHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a gateway. Its fields stay as they are in all versions, so that every engine can read it."""

    protocol: int
    gateway: str  # a random name, for as long as the process runs
    model_digest: str  # of config and tokenizer: see links/digest.py


class EngineHello(msgspec.Struct, frozen=True, tag=True):
    """The reply to GatewayHello: the engine accepts requests."""

    protocol: int
    engine_id: str  # a random name, for as long as the engine's launcher runs
    epoch: int  # how many times the router was replaced
    model_digest: str
    weights_digest: str  # all engines of a gateway must compute with the same weights
    ready: EngineInfo
    role: str = "normal"  # --role
    kv_transport: str = ""  # how it sends and receives KV: --kv_transport and --cluster_tls


class LinkRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts no requests from this gateway, or does not know it any more."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Both sides send it twice a second."""


GatewayToEngine = ToEngine | GatewayHello | Heartbeat

EngineToGateway = FromEngine | EngineHello | LinkRefused | Heartbeat
