"""Every message that crosses a process boundary, and nothing else. Neither torch nor a tokenizer is imported here.

    httpserver ──GenerateReq, AbortReq──▶ router ──BatchTokenIdOut, RouterStats──▶ detokenization
    httpserver ◀──BatchStrOut, RouterStats── detokenization ──AbortReq──▶ router
    router ──Step──▶ model worker ──list[TokenOut]──▶ router
    launcher ──ToChild──▶ each of them ──FromChild──▶ launcher

The scheduler tells the workers what to run in a Step: requests that enter, the slots that each row of the step fills,
requests that leave. A worker knows the rest (the tokens of its requests), so prefill, a chunk of it and decode are the
same message: the next len(slots) tokens of a request. Several tokens of a request may come back, in their order: the
one that was sampled and those that its grammar forces after it. The next row of that request has as many slots.
"""

from __future__ import annotations

import enum
import reprlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lightserve.errors import InvalidRequestError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the longest request the server takes
    ABORT = "abort"


INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]  # one beyond the vocabulary is ignored where it is used
Share = Annotated[float, Meta(gt=0, le=1)]  # of the probability mass; 1: all of it
OpenAIPenalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopCount = Annotated[int, Meta(ge=0, le=20)]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=16384)]
LengthDecay = tuple[Annotated[int, Meta(ge=0, le=INT32_MAX)], Annotated[float, Meta(ge=1, le=100)]]


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag", "prefix"]
MAX_GRAMMAR_LENGTH = 256 * 1024  # characters; grammar/compiler.py knows which kinds may have fewer


class GrammarSpec(msgspec.Struct, frozen=True):
    """The texts that a request may answer with. What ``text`` is for each kind, grammar/compiler.py says."""

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""
    before: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""  # in Lark, with @answer in place of such a text


class ThinkingLimit(msgspec.Struct, frozen=True):
    """How long an answer may think before it answers, and by which tags that is known."""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)]  # between the tags
    begin: str
    end: str
    end_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]  # the tokens of ``end``, forced when the time is over
    is_begun: bool  # the prompt has the first tag


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next token. Logits are changed in the order of vLLM and transformers: what may not come next is
    forbidden, logit_bias, watermark, penalties, exponential_decay_length_penalty, temperature, top_k, top_p, min_p,
    typical_p."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 16
    min_new_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0  # 0: greedy
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    presence_penalty: OpenAIPenalty = 0.0
    frequency_penalty: OpenAIPenalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] = {}
    bad_words_ids: Annotated[tuple[BadWord, ...], Meta(max_length=1024)] = ()  # sequences never to be completed
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=100)] = (
        0  # so many tokens in a row never come twice; 0: they may
    )
    allowed_token_ids: TokenIds | None = None  # None: all
    first_allowed_token_ids: TokenIds | None = None  # of the first token alone
    # (start, factor): an end token becomes likelier with every token after the first ``start``
    exponential_decay_length_penalty: LengthDecay | None = None
    watermark: bool = False  # favour tokens that the one before it chooses: see common/ops/watermark.py
    grammar: GrammarSpec | None = None  # None: any text
    thinking: ThinkingLimit | None = None  # None: as long as it likes
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # None: a random one
    ignore_eos: bool = False
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    include_stop: bool = False  # leave the stop string or the end token in the text
    skip_special_tokens: bool = True
    shown_special_ids: tuple[TokenId, ...] = ()  # stay in the text all the same
    hidden_chars: Annotated[int, Meta(ge=0)] = 0  # at the beginning of the text: they were in the prompt
    logprobs: TopCount | None = None  # the chosen token's, and those of the k most likely
    prompt_logprobs: TopCount | None = None  # the same for the tokens of the prompt

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        try:
            msgspec.convert(self, _SamplingTypes, from_attributes=True)
        except msgspec.ValidationError as error:
            raise _blame(self, error) from error
        if self.min_new_tokens > self.max_new_tokens:
            found = f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            raise InvalidRequestError(found, "min_new_tokens")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


# the same fields on a struct without __post_init__: msgspec checks types and ranges as it fills one, in a microsecond
_SamplingTypes = msgspec.defstruct(
    "_SamplingTypes", [(field.name, field.type) for field in msgspec.structs.fields(SamplingParams)]
)


def _blame(params: SamplingParams, error: msgspec.ValidationError) -> InvalidRequestError:
    """Which field, what was wanted, what was found; msgspec says "Expected `int` >= 1 - at `$.top_k`"."""
    wanted, _, place = str(error).partition(" - at ")
    field = place.partition("$.")[2].partition("[")[0].partition(".")[0].rstrip("`")
    return InvalidRequestError(f"{field}: {wanted}, found {reprlib.repr(getattr(params, field))}", field)


class NewReq(msgspec.Struct, frozen=True):
    """A request that enters the workers, or enters again after a pause."""

    req_id: int
    prompt_ids: list[int]  # all tokens that are known of it
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...] = ()  # not to be sampled before min_new_tokens
    cached_slots: list[int] = []  # of its first tokens, whose KV is there
    output_len: int = 0  # the last of ``prompt_ids`` that are output


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """Compute the request's next len(slots) tokens into these KV slots."""

    req_id: int
    slots: list[int]


class Step(msgspec.Struct, frozen=True, tag=True):
    """One forward pass. Requests in ``free`` leave before it, requests in ``new`` enter."""

    rows: list[StepRow]
    new: list[NewReq] = []
    free: list[int] = []


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of every token of a prompt but the first, given those before it.

    Arrays as bytes: a prompt is long, and who passes them on need not read them.
    """

    logprobs: bytes  # [tokens] float32
    ranks: bytes  # [tokens] int32; 1: the likeliest
    top_ids: bytes  # [tokens, k] int32, the likeliest first
    top_logprobs: bytes  # [tokens, k] float32


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """A token sampled for a request whose known tokens are all computed, or one that its grammar forces after that."""

    req_id: int
    token_id: int
    logprob: float | None = None  # where the request asked for it; of the model, before anything changed the logits
    top: list[tuple[int, float]] | None = None  # with it, as many of the likeliest tokens as asked for, best first
    completes: bool = False  # the request's grammar, after which nothing may follow
    error: str | None = None  # why there is no token: the request ends
    status: int = 400  # of the error
    prompt: PromptLogprobs | None = None  # with the first token, where the request asked for it
    is_forced: bool = False  # it follows another of the same step, and the step under way after that brings none


# httpserver -> router


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request is treated, beside what it generates."""

    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] = 0  # lower goes first
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # from arrival to the last token
    cache_salt: str = ""  # prefixes are shared among requests of the same salt
    use_cache: bool = True  # share prefixes with other requests


class GenerateReq(msgspec.Struct, frozen=True, tag=True):
    """One sequence to generate. The upper bits of its id say which HTTP process asks: see http_worker_of."""

    req_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    arrived_s: float  # time.monotonic() when the HTTP request came; one clock for all processes of a machine
    terms: Terms = Terms()
    group: int = 0  # id of the first of the sequences that continue the same prompt


class AbortReq(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the rest: the client left (ABORT), or the detokenizer found a stop string (STOP)."""

    req_id: int
    reason: FinishReason = FinishReason.ABORT


class AbortNamed(msgspec.Struct, frozen=True, tag=True):
    """An operator's abort by a client's request id, None for all: every HTTP process gets it and aborts its own."""

    name: str | None


ToRouter = GenerateReq | AbortReq | AbortNamed

REQ_ID_BITS = 48  # low bits of an id count the requests of one HTTP process


def http_worker_of(req_id: int) -> int:
    return req_id >> REQ_ID_BITS


# router -> detokenization


class TextReq(msgspec.Struct, frozen=True):
    """What must be known to turn a request's tokens into its text."""

    req_id: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    shown_special_ids: tuple[int, ...] = ()
    hidden_chars: int = 0


class Admission(msgspec.Struct, frozen=True):
    """What became of a request before its first token."""

    queue_s: float
    cached_tokens: int  # of the prompt, whose KV was there already


class TokenIdOut(msgspec.Struct, frozen=True, array_like=True):
    """One token of a request, on its way to become text."""

    req_id: int
    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None  # alternatives, most likely first, where asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for an end token of the model
    admission: Admission | None = None  # with the first token
    ends_in_text: bool = False  # it finishes the request, and its text counts: it is no end token
    prompt: PromptLogprobs | None = None  # with the first token, where asked for


class ReqFailed(msgspec.Struct, frozen=True):
    """A request that ends without (more) tokens. ``status`` and ``message`` are what HTTP tells the client."""

    req_id: int
    status: int
    message: str


class BatchTokenIdOut(msgspec.Struct, frozen=True, tag=True):
    """All news of one step; ``new`` come before their tokens, ``gone`` were aborted."""

    outs: list[TokenIdOut] = []
    new: list[TextReq] = []
    failed: list[ReqFailed] = []
    gone: list[int] = []


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    counts: list[int]  # one a bucket of the catalogue, the last is all that is larger
    total: float  # sum of the observed values


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """Metrics by the names of utils/metrics.py, which knows their kinds, buckets and labels."""

    values: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}  # name -> label value -> count
    histograms: dict[str, HistogramCounts] = {}


class RouterStats(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of router and detokenizer, once a second, with every metric as it stands."""

    sent_s: float  # time.monotonic()
    step_age_s: float  # how long the workers have been at the oldest step under way; 0 when idle
    metrics: MetricsSnapshot
    has_workers: bool = True  # else new ones are on their way


ToDetokenization = BatchTokenIdOut | RouterStats | AbortNamed


# detokenization -> httpserver


class StrOut(msgspec.Struct, frozen=True, array_like=True):
    """A token with the text it completes, which is "" while a character or a stop string may be under way."""

    req_id: int
    text: str
    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    admission: Admission | None = None
    prompt: PromptLogprobs | None = None


class BatchStrOut(msgspec.Struct, frozen=True, tag=True):
    outs: list[StrOut] = []
    failed: list[ReqFailed] = []


ToHttpserver = BatchStrOut | RouterStats | AbortNamed


# between the launcher and each of its children, as lines of JSON


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A part of the start that is over, for the table of the banner."""

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The ready word: the child can do its work."""


class StepLimits(msgspec.Struct, frozen=True):
    """How much a device computes in a step unless the operator says otherwise."""

    batch_max_tokens: int  # of all requests
    chunked_prefill_size: int | None = None  # of prompts, while others decode; None: as many as the step has
    sizes: tuple[int, ...] = ()  # of a step in which others decode, that the device computes well; none: any


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The ready word of a worker, and what the router and the HTTP processes then learn."""

    max_total_token_num: int  # tokens the KV pool holds
    max_req_total_len: int  # prompt plus output; never more than the pool holds
    vocab_size: int
    pipeline_depth: int  # steps that may be under way at once
    eos_token_ids: tuple[int, ...] = ()
    computed_in: str = ""  # data type and device, for people
    step_limits: StepLimits = StepLimits(2048)
    step_timeout_s: float = 0.0  # a step that takes longer hangs; 0: none does


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last word of a child that cannot go on: one line for the operator."""

    message: str


class Drained(msgspec.Struct, frozen=True, tag=True):
    """No request is left in this HTTP process."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new request, finish the others, say Drained."""


class EngineDied(msgspec.Struct, frozen=True, tag=True):
    """Fail every request with this message."""

    message: str


class WorkersLost(msgspec.Struct, frozen=True, tag=True):
    """The router has given its workers up: they hung up, or a step does not end. It waits for others."""

    generation: int  # of NewWorkers; 0: the first
    why: str
    is_explained: bool  # a request was to blame, and is gone


class NewWorkers(msgspec.Struct, frozen=True, tag=True):
    """The router's workers were replaced, by others of the same size."""

    generation: int  # theirs


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer; of a child with an event loop, from there."""


FromChild = Phase | Ready | EngineReady | Failed | Drained | WorkersLost | Pong
ToChild = EngineReady | NewWorkers | Drain | EngineDied | Ping
