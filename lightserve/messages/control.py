"""Between the launcher and each of its children, as lines of JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from lightserve.messages.media import Sight


class StartupPhase(msgspec.Struct, frozen=True, tag=True):
    """A finished phase of a child's startup, for the table of the banner."""

    name: str
    seconds: float


class StartupProgress(msgspec.Struct, frozen=True, tag=True):
    """How far a phase of a child's startup is. The launcher shows it. The fields are those of ProgressState."""

    label: str
    done: int = 0
    total: int = 0
    unit: Literal["bytes", "items"] = "bytes"
    rate: float = 0.0
    seconds: float = 0.0
    status: Literal["running", "finished", "stopped"] = "running"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child is ready to work."""

    summary: str = ""  # for the banner


DEFAULT_RUNNING = 256


class StepLimits(msgspec.Struct, frozen=True):
    """The sizes of steps that suit a device, unless the operator sets others."""

    batch_max_tokens: int  # of all requests
    chunked_prefill_size: int | None = None  # prompt tokens while others decode; None: no limit of its own
    preferred_step_tokens: tuple[int, ...] = ()  # efficient sizes of a step with prompts and decodes; empty: any
    long_prompt_step_s: float = 0.0  # what a step with a long prompt may take beside few decodes; 0: a usual chunk
    weight_read_tokens: float = 256.0  # that a step computes in the time in which it reads the weights
    leaves_out_drafts: bool = False  # steps do not compute drafts that nobody proposes
    max_running: int = DEFAULT_RUNNING  # requests


class SlidingWindowKv(msgspec.Struct, frozen=True, tag="sliding_window"):
    """A KV group of layers with a sliding window, in a pool of its own: a token has KV there while windows reach it."""

    size: int  # tokens
    window: int  # the largest one: tokens that a query attends to, itself included
    kept_tokens: int  # tokens of a running request that keep their KV, up to the last one


class StateKv(msgspec.Struct, frozen=True, tag="state"):
    """The states of recurrent layers: a row for each running request, and rows that cached prefixes keep."""

    size: int  # rows
    block: int = 1  # chunks of prompts end at multiples of so many tokens: --deterministic


KvGroupSize = SlidingWindowKv | StateKv


class PoolingLimits(msgspec.Struct, frozen=True):
    """What a model computes instead of text."""

    size: int  # numbers of a result
    needs_whole_prompt: bool  # the result depends on all tokens of a text: a cached prefix cannot be used
    has_kv: bool  # False: a step computes whole texts
    summary: str = ""  # for the banner: "embed (mean of the tokens, 384 numbers)"
    is_per_token: bool = False  # a text has a result for each token

    @property
    def shares_prefix(self) -> bool:
        """Whether texts may use cached prefixes."""
        return self.has_kv and not self.needs_whole_prompt


class CpuGroupSize(msgspec.Struct, frozen=True):
    """The host memory for blocks of a KV group."""

    num_blocks: int
    block_bytes: int  # of all ranks


class CpuKvSize(msgspec.Struct, frozen=True):
    """The host memory for evicted KV. Its blocks have numbers: first those of all tokens, then group after group."""

    num_blocks: int  # with the KV of the pool of all tokens
    block_bytes: int  # of all ranks
    storage_tiers: tuple[str, ...] = ()  # below it
    groups: tuple[CpuGroupSize, ...] = ()  # by KV group


class KvIdentity(msgspec.Struct, frozen=True):
    """What keys and values depend on, besides weights, tokens, salt and adapter, and how they lie in memory.

    Engines send each other KV, and find what others have stored, only if all of it is the same.
    """

    tp: int  # ranks of a stage that compute the same requests
    pp: int
    version: str  # of LightServe: of its kernels, and of the format of a block
    model: str  # digest of the configuration of the model, and of the angles of positions that --max_req_total_len sets
    computed: str  # "in bfloat16 (KV in int8) on cuda"
    layout: str  # digest of the heads, sizes and data types of all layers of a rank
    is_deterministic: bool = False
    is_divisible: bool = False  # the layout is that of all ranks, and their heads may be divided among more or fewer


MAX_KV_CUTS = 8  # how many times as many ranks one engine may have as another


def can_divide_kv(tp: int, other_tp: int) -> bool:
    """Whether engines with so many ranks can cut each other's KV by heads, if it is divisible."""
    small, large = sorted((tp, other_tp))
    return large % small == 0 and large // small <= MAX_KV_CUTS and (large // small).bit_count() == 1


class RoutedExpertsShape(msgspec.Struct, frozen=True):
    """Of the experts that a request's tokens were routed to: see --enable_return_routed_experts."""

    num_layers: int  # of the model
    layers: tuple[int, ...]  # those with experts
    top_k: int  # experts of a token in each of them
    num_experts: int  # in each of them


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready. The launcher passes it on to the router and the HTTP processes."""

    max_total_token_num: int  # tokens the KV pool holds
    max_req_total_len: int  # prompt plus output; never more than the pool holds
    vocab_size: int
    pipeline_depth: int  # steps that may be in flight at once
    eos_token_ids: tuple[int, ...] = ()
    dtype_and_device: str = ""  # for the banner: "in bfloat16 on cuda"
    step_limits: StepLimits = StepLimits(2048)
    step_timeout_s: float = 0.0  # a step that takes longer has hung; 0: no limit
    launch_lead_s: float = 0.0  # the time that planning, sending and launching a step takes
    kv_groups: tuple[KvGroupSize, ...] = ()  # with pools of their own beside that of max_total_token_num
    pooling: PoolingLimits | None = None  # None: the model generates text
    lora_slots: int = 0  # adapters that fit on the device at once; 0: requests cannot use adapters
    cpu_kv: CpuKvSize | None = None  # None: evicted KV is not kept in host memory
    kv_identity: KvIdentity | None = None  # None: it computes no KV
    sight: Sight = Sight.NONE  # of the tokens of prompts, if requests may have images
    sight_window: int | None = None  # tokens that see one another, at most; None: any number
    speculation: str = ""  # for the banner: "ngram of 3 to 4 tokens, up to 4 drafts a step"
    routed_experts: RoutedExpertsShape | None = None  # None: they are not kept


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """The child exits because of an error: one line for the operator."""

    message: str


class Drained(msgspec.Struct, frozen=True, tag=True):
    """No request is left in this HTTP process, or in the router of --listen."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, finish the open ones, then send Drained."""


class EngineDied(msgspec.Struct, frozen=True, tag=True):
    """Fail every request with this message."""

    message: str


class WorkersLost(msgspec.Struct, frozen=True, tag=True):
    """The router has lost its workers: a connection closed, or a step did not end. It waits for NewWorkers."""

    generation: int  # of the lost workers; the first is 0
    reason: str
    caused_by_request: bool  # a request crashed them twice, and the router has failed it


class NewWorkers(msgspec.Struct, frozen=True, tag=True):
    """The workers were replaced by new ones with the same KV pool."""

    generation: int  # of the new workers


class StopWorkers(msgspec.Struct, frozen=True, tag=True):
    """The router of --enable_rl sleeps: stop its workers, and start none until StartWorkers."""

    only_dead: bool = False  # they stay, without weights in their memory; if they die, WorkersStopped is sent


class WorkersStopped(msgspec.Struct, frozen=True, tag=True):
    """The reply to StopWorkers: their memory is free."""


class StartWorkers(msgspec.Struct, frozen=True, tag=True):
    """The router wakes up. The reply is NewWorkers, unless the workers have stayed."""


class EngineJoined(msgspec.Struct, frozen=True, tag=True):
    """To the dispatcher: the router of an engine is ready for requests."""

    engine: int
    epoch: int  # how often this engine was restarted


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """To the dispatcher: the router of an engine has died. Its requests go on in other engines."""

    engine: int


class HttpProcessLost(msgspec.Struct, frozen=True, tag=True):
    """To the router or the dispatcher: an HTTP process has died, and nobody waits for its requests any more.

    Requests that it sent may still come after this message.
    """

    process: int  # its number in the ids of its requests
    successor: int  # the number of the process that replaces it


class Keys(msgspec.Struct, frozen=True, tag=True):
    """To an HTTP process: the keys that are valid from now on. Requests that run with another one go on."""

    api_key: list[str]
    admin_key: list[str]


class CertificateRenewed(msgspec.Struct, frozen=True, tag=True):
    """To an HTTP process: read the files of --ssl_certfile and --ssl_keyfile again, for new connections."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """The launcher checks that a child responds."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The response to Ping. A child with an event loop sends it from the loop."""


class RankExited(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank on another node, from the launcher there."""

    exit_code: int  # negative: of a signal
    is_node_missing: bool = False  # the rank did not start, because its node did not come in time


FromChild = (
    StartupPhase
    | StartupProgress
    | Ready
    | EngineInfo
    | ChildFailed
    | Drained
    | WorkersLost
    | StopWorkers
    | StartWorkers
    | Pong
    | RankExited
)

ToChild = (
    EngineInfo
    | NewWorkers
    | WorkersStopped
    | EngineJoined
    | EngineLost
    | HttpProcessLost
    | Keys
    | CertificateRenewed
    | Drain
    | EngineDied
    | Ping
)
