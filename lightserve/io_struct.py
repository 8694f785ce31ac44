"""Every message that crosses a process boundary, and nothing else. Neither torch nor a tokenizer is imported here.

    httpserver ──GenerateReq, AbortReq, ReleaseParents──▶ router ──BatchTokenIdOut, RouterStats──▶ detokenization
    httpserver ◀──BatchStrOut, RouterStats── detokenization ──AbortReq──▶ router
    httpserver ──GetTimelines, StartProfile, StopProfile──▶ router ──QueryReply──▶ detokenization ──▶ httpserver
    httpserver ──LoadAdapter, UnloadAdapter, ListAdapters──▶ router ──QueryReply──▶ detokenization ──▶ httpserver
    router ──Step, and the requests of worker_calls.py──▶ model worker ──StepResult, and their replies──▶ router
    launcher ──ToChild──▶ each of them ──FromChild──▶ launcher

With --dp, a dispatcher stands where the router stands, and speaks to the routers of several engines:

    dispatcher ──DispatchedReq, AbortReq, MovedReqs──▶ router ──BatchTokenIdOut, RouterStats, KvNews──▶ dispatcher
    dispatcher ──ReleaseParents──▶ router

With roles, a decode engine has prompts computed by a prefill engine, whose workers send the KV to its workers:

    dispatcher ──DispatchedReq, KvCancel──▶ decode router ──KvWanted, KvMissing──▶ dispatcher
    dispatcher ──DispatchedReq──▶ prefill router

With --engines, the dispatcher is in a gateway, and the routers are on other machines. The same messages cross TCP. The
two introduce themselves first, and both send heartbeats:

    gateway ──GatewayHello, Heartbeat──▶ engine ──EngineHello, LinkRefused, Heartbeat, EngineDraining──▶ gateway

A Step names the requests that enter, the KV slots that each row fills, and the requests that leave. A worker knows the
tokens of its requests, so prefill, a chunk of a prompt and decode are the same message: compute the next len(slots)
tokens of a request. A request may get several tokens back, in their order: the sampled one and those that its grammar
forces after it. The next row of that request has as many slots.
"""

from __future__ import annotations

import enum
import functools
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from lightserve.errors import InvalidRequestError
from lightserve.utils.int_arrays import NO_INT32, NO_INT64, int32s, int64s
from lightserve.utils.spelling import nearest

if TYPE_CHECKING:
    Int32s: TypeAlias = Any  # an array; a message that is not sent may hold a list
    Int64s: TypeAlias = Any  # the same of 64 bits
else:  # what a receiver gets
    Int32s, Int64s = npt.NDArray[np.int32], npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the longest request the server takes
    ABORT = "abort"


INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]  # ids beyond the vocabulary have no effect
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
    """The texts that a response may have. grammar/compiler.py says what ``text`` is for each kind."""

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""
    before: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""  # Lark rules that refer to it as @answer
    memory_mib: Annotated[int, Meta(ge=1, le=2**16)] = 1  # that it takes when it is compiled, as measured


class ThinkingLimit(msgspec.Struct, frozen=True):
    """How many tokens a model may spend on thinking, and the tags around its thinking."""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)]  # between the tags
    begin: str
    end: str
    end_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]  # the tokens of ``end``, which are forced at the limit
    is_begun: bool  # the prompt ends inside the thinking


class _CheckedParams(msgspec.Struct, frozen=True):
    """Parameters whose types and ranges are checked when they are made: msgspec checks them only when it decodes."""

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self, _unchecked_twin(type(self)), from_attributes=True)
        except msgspec.ValidationError as error:
            raise _invalid_field(self, error) from error


@functools.cache
def _unchecked_twin(params: type[_CheckedParams]) -> type[msgspec.Struct]:
    """The same fields on a struct without __post_init__: filling one checks types and ranges in a microsecond."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(params)]
    return msgspec.defstruct(f"_{params.__name__}Types", fields)


def _invalid_field(params: _CheckedParams, error: msgspec.ValidationError) -> InvalidRequestError:
    """Name the field, what it takes and what it has; msgspec says "Expected `int` >= 1 - at `$.top_k`"."""
    wanted, _, place = str(error).partition(" - at ")
    field = place.partition("$.")[2].partition("[")[0].partition(".")[0].rstrip("`")
    return InvalidRequestError(f"{field}: {wanted}, found {reprlib.repr(getattr(params, field))}", field)


class SamplingParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker samples the next token.

    Logits change in the order of vLLM and transformers: forbidden tokens, logit_bias, watermark, penalties,
    exponential_decay_length_penalty, temperature, top_k, top_p, min_p, typical_p.
    """

    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0  # 0: greedy
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    presence_penalty: OpenAIPenalty = 0.0
    frequency_penalty: OpenAIPenalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] = {}
    bad_words_ids: Annotated[tuple[BadWord, ...], Meta(max_length=1024)] = ()  # sequences that are never completed
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=100)] = 0  # an n-gram of this size occurs once; 0: no limit
    allowed_token_ids: TokenIds | None = None  # None: all
    first_allowed_token_ids: TokenIds | None = None  # the same for the first token only
    # (start, factor): end tokens become more likely with every token after the first ``start``
    exponential_decay_length_penalty: LengthDecay | None = None
    watermark: bool = False  # prefer tokens that a hash of the previous token selects: see common/ops/watermark.py
    grammar: GrammarSpec | None = None  # None: any text
    thinking: ThinkingLimit | None = None  # None: no limit
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # None: a random one
    logprobs: TopCount | None = None  # of the sampled token, and of the top k tokens
    prompt_logprobs: TopCount | None = None  # the same for the tokens of the prompt

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class StoppingParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """When output tokens end a request. The router decides; workers mask end tokens until min_new_tokens."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 16
    min_new_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            found = f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            raise InvalidRequestError(found, "min_new_tokens")


class TextParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """How the detokenizer turns the tokens of a request into text."""

    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    include_stop: bool = False  # leave the stop string or the end token in the text
    skip_special_tokens: bool = True
    shown_special_ids: tuple[TokenId, ...] = ()  # these stay in the text all the same
    hidden_chars: Annotated[int, Meta(ge=0)] = 0  # at the start of the text: the prompt has them already
    continues_text: bool = True  # False: a message of its own, which does not begin with the space between words

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        super().__post_init__()


class GenerationParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The generation parameters of a request, one part for each process that reads them."""

    sampling: SamplingParams = SamplingParams()
    stopping: StoppingParams = StoppingParams()
    text: TextParams = TextParams()

    @classmethod
    def of(cls, **fields: Any) -> GenerationParams:
        """Parameters by their own names, whichever part they belong to: ``of(max_new_tokens=8, temperature=0)``."""
        return cls().replace(**fields)

    def get(self, name: str) -> Any:
        """The value of the parameter of this name, whichever part it belongs to."""
        return getattr(getattr(self, _PART_OF[name]), name)

    def replace(self, **fields: Any) -> GenerationParams:
        """A copy with other values of the named parameters."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in fields.items():
            if name not in _PART_OF:
                near = nearest(name, _PART_OF)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(_PART_OF)}"
                raise InvalidRequestError(f"{name}: there is no such parameter; {hint}", name)
            changed.setdefault(_PART_OF[name], {})[name] = value
        parts = {part: msgspec.structs.replace(getattr(self, part), **values) for part, values in changed.items()}
        return msgspec.structs.replace(self, **parts)


_PART_OF = {  # parameter: the field of GenerationParams that has it
    field.name: part
    for part, params in (("sampling", SamplingParams), ("stopping", StoppingParams), ("text", TextParams))
    for field in msgspec.structs.fields(params)
}


# router -> model worker


class ParentPart(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a request is that of another one, which the workers keep: see Step.kept."""

    req_id: int
    num_tokens: int  # at least one token of the request follows
    num_slots: int


class NewReq(msgspec.Struct, frozen=True):
    """A request that enters the workers, or enters again after it was preempted.

    With ``parent``, ``token_ids`` and ``cached_slots`` are those that follow the parent's.
    """

    req_id: int
    token_ids: Int32s  # the prompt, and the output tokens so far if it was preempted
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...] = ()  # not to be sampled before min_new_tokens
    cached_slots: Int32s = NO_INT32  # KV slots of its first tokens, which are computed already
    output_len: int = 0  # how many of ``token_ids``, at the end, are output
    stopping: StoppingParams = StoppingParams()
    cached_windowed_slots: Int32s = NO_INT32  # slots of the windowed pool of the last of the cached tokens
    lora_slot: int = -1  # of its adapter; -1: it uses none
    parent: ParentPart | None = None

    @property
    def num_cached(self) -> int:
        """Tokens whose KV is cached."""
        return len(self.cached_slots) + (0 if self.parent is None else self.parent.num_slots)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is not cached."""
        return len(self.token_ids) + (0 if self.parent is None else self.parent.num_tokens) - self.num_cached


class StepRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute the request's next len(slots) tokens into these KV slots."""

    req_id: int
    slots: Int32s


class KvStore(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks of tokens from the KV pool to host memory."""

    slots: Int32s  # of all tokens, block after block
    blocks: Int32s  # of host memory
    store_id: int = 0  # they count up


class KvLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks of tokens from host memory to the KV pool, beside the steps that follow."""

    load_id: int
    blocks: Int32s  # of host memory
    slots: Int32s  # of all tokens, block after block; no step uses them before the load has ended


class KvPush(msgspec.Struct, frozen=True, array_like=True):
    """Send blocks of tokens, which this step or an earlier one has computed, to a worker of another engine."""

    ticket: int
    addresses: list[str]  # of the workers there, by rank
    first: int  # number of the first block among those of the ticket
    slots: Int32s  # of all tokens, block after block


class KvExpect(msgspec.Struct, frozen=True, array_like=True):
    """Another engine sends the KV of these slots. No step uses them before the ticket has ended: see KvReceived."""

    ticket: int
    slots: Int32s  # of all tokens, block after block
    timeout_s: float  # then the ticket ends with what has come


class LoraPlace(msgspec.Struct, frozen=True, array_like=True):
    """Copy an adapter that is in the worker's host memory into a slot on the device."""

    slot: int
    lora_id: int


class Step(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One forward pass. The worker frees requests, adds new ones, copies adapters, then computes the rows.

    Of freed requests it keeps the tokens and slots with which they entered, if later requests may begin with them.

    It stores KV in host memory before it computes anything. It only starts loads: see KvLoaded. It sends KV to other
    engines after it has computed the rows.

    Requests that compute one token are columns, because there may be thousands: they come before ``chunks``.

    With ``draft_counts``, a decode computes its next token and drafts of so many tokens after it. They begin where the
    accepted tokens of the request's last step end. Only the worker knows that place while that step is in flight, so
    slots belong to places in the text and not to steps: ``decode_slots`` are those of the places after all that have
    slots. A step writes drafts that were rejected again, to the same slots. Its result has as many tokens of the
    request as were accepted, and one that was sampled after them.

    With data-parallel attention it has only ``groups``: one step for each group, which all ranks compute at once.
    """

    chunks: list[StepRow]  # of prompts; a chunk may have one token
    new: list[NewReq] = []
    free: list[int] = []
    kept: list[int] = []  # of ``free``: later requests may name them as parents
    dropped: list[int] = []  # of the requests that are kept: none will name them any more
    windowed_slots: Int32s = NO_INT32  # of all tokens of the rows, in their order, if there is a windowed pool
    decode_ids: Int64s = NO_INT64  # requests of which it computes one token
    decode_slots: Int32s = NO_INT32  # of these tokens, one request after the other
    slot_counts: Int32s = NO_INT32  # how many of ``decode_slots`` each of ``decode_ids`` gets; empty: one
    draft_counts: Int32s = NO_INT32  # drafts of each of ``decode_ids``; empty: none
    loras: list[LoraPlace] = []
    stores: list[KvStore] = []
    loads: list[KvLoad] = []
    token_ids: Int32s = NO_INT32  # of all tokens of the rows, in their order, if the first stage does not sample them
    pushes: list[KvPush] = []
    expects: list[KvExpect] = []
    groups: list[Step] = []  # of all attention groups, also of those without rows; empty: there is one group

    @property
    def num_decodes(self) -> int:
        return len(self.decode_ids) + sum(group.num_decodes for group in self.groups)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + len(self.chunks) + sum(len(group.chunks) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        chunks = sum(len(row.slots) for row in self.chunks)
        drafts = int(np.sum(self.draft_counts)) if len(self.draft_counts) else 0
        return len(self.decode_ids) + drafts + chunks + sum(group.num_tokens for group in self.groups)

    @property
    def rows(self) -> list[StepRow]:
        """All requests: slower than the columns, and simpler."""
        counts = int32s(self.slot_counts) if len(self.slot_counts) else np.ones(len(self.decode_ids), dtype=np.int32)
        slots, ends = int32s(self.decode_slots).tolist(), np.cumsum(counts).tolist()
        decodes = zip(int64s(self.decode_ids).tolist(), [0, *ends], ends, strict=False)
        return [*(StepRow(req_id, slots[begin:end]) for req_id, begin, end in decodes), *self.chunks]


class CompileGrammar(msgspec.Struct, frozen=True):
    """Compile a grammar before a request with it enters."""

    grammar: GrammarSpec
    eos_ids: tuple[int, ...]


class ProfileCommand(msgspec.Struct, frozen=True):
    """Start a profile of this worker, or end it and write it to files."""

    prefix: str | None = None  # of the files' paths; None: start


class LoraLoad(msgspec.Struct, frozen=True):
    """Read an adapter into host memory. The adapters of ``dropped`` are not needed there any more."""

    lora_id: int  # never used again for other weights
    path: str  # the folder
    dropped: list[int] = []


# model worker -> router


class LoraLoaded(msgspec.Struct, frozen=True):
    """The reply to a LoraLoad."""

    error: str = ""  # why the adapter cannot be used


class KvLookup(msgspec.Struct, frozen=True):
    """Which of these blocks are in a tier below host memory?"""

    keys: list[bytes]


class KvFetch(msgspec.Struct, frozen=True):
    """Read blocks of a tier below into host memory, after the KvStore ``after``.

    The router knows that one rank has made it; others may be behind.
    """

    after: int
    store: int
    keys: list[bytes]
    blocks: list[int]


class KvFetched(msgspec.Struct, frozen=True):
    """The reply to a KvFetch."""

    are_valid: list[bool]  # those that are now in host memory
    seconds: float = 0.0


class KvFlush(msgspec.Struct, frozen=True):
    """Write blocks of host memory to the tiers below, after the KvStore ``after``, as for KvFetch.

    Blocks that may be wrong are removed there first.
    """

    after: int
    keys: list[bytes]
    blocks: list[int]
    removed: list[bytes] = []


class KvFlushed(msgspec.Struct, frozen=True):
    """The reply to a KvFlush: a number for each tier."""

    written: list[int]
    errors: list[int]
    used_bytes: list[int]


class KvLoaded(msgspec.Struct, frozen=True):
    """A KvLoad has ended."""

    seconds: float  # that copying took
    is_valid: bool = True  # if not, the slots hold anything


class KvReceived(msgspec.Struct, frozen=True, array_like=True):
    """A KvExpect has ended: so many of its first blocks have come, and nothing writes to its slots any more."""

    ticket: int
    num_blocks: int


class ProfileResult(msgspec.Struct, frozen=True):
    """The reply to a ProfileCommand."""

    paths: list[str] = []  # files that were written
    error: str = ""  # what went wrong


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of every token of a prompt but the first, given the tokens before it.

    The arrays travel as bytes: a prompt is long, and only the HTTP process reads them.
    """

    logprobs: bytes  # [tokens] float32
    ranks: bytes  # [tokens] int32; 1: the most likely token
    top_ids: bytes  # [tokens, k] int32, the most likely first
    top_logprobs: bytes  # [tokens, k] float32


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token of a request's output: the part that every message about it has in common."""

    id: int
    logprob: float | None = None  # if requested; from the unmodified logits
    top_logprobs: list[tuple[int, float]] | None = None  # if requested: (token id, logprob), the most likely first
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if requested


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """A new output token. Several of a request in one result follow one another."""

    req_id: int
    token: Token
    completes_grammar: bool = False  # nothing may follow


class TokenColumns(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that have nothing but an id, in columns, because there may be thousands. The requests differ."""

    req_ids: Int64s = NO_INT64
    token_ids: Int32s = NO_INT32  # of all requests, one request after the other
    counts: Int32s = NO_INT32  # tokens of each request, 1 at least; empty: one each

    @classmethod
    def of(cls, tokens: Sequence[tuple[int, Sequence[int]]]) -> TokenColumns:
        """Of requests and their tokens."""
        counts = int32s([len(token_ids) for _, token_ids in tokens])
        ids = int32s([token_id for _, token_ids in tokens for token_id in token_ids])
        return cls(int64s([req_id for req_id, _ in tokens]), ids, counts if len(ids) > len(counts) else NO_INT32)

    def __len__(self) -> int:
        """Requests."""
        return len(self.req_ids)

    @property
    def each_counts(self) -> Int32s:
        """``counts``, also if there is one token each."""
        return int32s(self.counts) if len(self.counts) else np.ones(len(self), dtype=np.int32)

    def where(self, is_chosen: npt.NDArray[np.bool_]) -> TokenColumns:
        """The tokens of some of the requests."""
        req_ids, token_ids = int64s(self.req_ids)[is_chosen], int32s(self.token_ids)
        if not len(self.counts):
            return TokenColumns(req_ids, token_ids[is_chosen])
        counts = int32s(self.counts)
        return TokenColumns(req_ids, token_ids[np.repeat(is_chosen, counts)], counts[is_chosen])

    def pairs(self) -> Iterable[tuple[int, int]]:
        """The request and the id of each token."""
        req_ids = np.repeat(int64s(self.req_ids), self.counts) if len(self.counts) else int64s(self.req_ids)
        return zip(req_ids.tolist(), int32s(self.token_ids).tolist(), strict=True)

    def outs(self) -> list[TokenOut]:
        """Slower than the columns, and simpler."""
        return [TokenOut(req_id, Token(token_id)) for req_id, token_id in self.pairs()]


NO_TOKENS = TokenColumns()


def joined_columns(parts: Sequence[TokenColumns]) -> TokenColumns:
    """The tokens of all parts as one, whose requests differ."""
    counts = [part.each_counts for part in parts] if any(len(part.counts) for part in parts) else []
    return TokenColumns(
        np.concatenate([NO_INT64, *(int64s(part.req_ids) for part in parts)]),
        np.concatenate([NO_INT32, *(int32s(part.token_ids) for part in parts)]),
        np.concatenate([NO_INT32, *counts]),
    )


class ReqFailed(msgspec.Struct, frozen=True):
    """A request that ends without (more) tokens. HTTP responds with ``status`` and ``message``."""

    req_id: int
    status: int
    message: str


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """The result of a pooling request: an embedding, or one score per class."""

    req_id: int
    values: bytes  # [size] float32


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of one step. A request may get several tokens, in their order: all are plain, or all detailed.

    One is sampled. Those before it are drafts that were accepted, if the step computed any. Otherwise those after it
    are forced by the grammar: then a step that is in flight already, and does not compute all of them, samples none.
    """

    detailed: list[TokenOut] = []
    failed: list[ReqFailed] = []
    embeddings: list[Embedding] = []
    plain: TokenColumns = NO_TOKENS
    launch_s: float = 0.0  # how long the worker took to launch it

    @property
    def tokens(self) -> list[TokenOut]:
        """All tokens: slower than the columns, and simpler."""
        return [*self.plain.outs(), *self.detailed]


def joined_results(results: Sequence[StepResult]) -> StepResult:
    """The results of all attention groups as one."""
    if len(results) == 1:
        return results[0]
    return StepResult(
        [out for result in results for out in result.detailed],
        [failure for result in results for failure in result.failed],
        [embedding for result in results for embedding in result.embeddings],
        joined_columns([result.plain for result in results]),
        max(result.launch_s for result in results),
    )


# httpserver -> router


class SchedulingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the router treats a request, whatever it generates."""

    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] = 0  # lower goes first
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # from arrival to the last token
    cache_salt: str = ""  # prefixes are shared among requests of the same salt
    use_cache: bool = True  # share prefixes with other requests
    lora: str = ""  # name of the adapter; "": the base model
    session: str = ""  # the client's name for a conversation: --cluster_policy session keeps it in one engine


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

    def prefix_salt(self, uses_cache: bool) -> str:
        """Requests share cached prefixes exactly if this is the same. Choices of one prompt always share them."""
        return f"salt {self.scheduling.cache_salt}" if uses_cache else f"group {self.group}"

    def after(self, parent_ids: Int32s) -> GenerateReq:
        """The same with its whole prompt. ``parent_ids``: that of its parent."""
        return msgspec.structs.replace(self, prompt_ids=np.concatenate((parent_ids, int32s(self.prompt_ids))))

    @property
    def orphaned(self) -> str:
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


class JournalCounts(msgspec.Struct, frozen=True, tag=True):
    """What an HTTP process has counted about the journal of streams since its last message, for the metrics."""

    lost: int
    resumed: int
    taken_over: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """An operator adds a LoRA adapter under a name."""

    query_id: int
    name: str
    path: str  # of its folder, below --lora_dir
    replaces: bool = False  # an adapter of this name may exist: new requests use the new one


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
    | JournalCounts
    | AdapterQuery
)


# dispatcher -> router of an engine


class KvTicket(msgspec.Struct, frozen=True):
    """A prefill engine may compute the prompt of this request. The engine reserves slots for it and sends KvWanted."""

    id: int
    timeout_s: float  # how long it waits for the KV from then on
    min_tokens: int  # if fewer are missing, it computes them itself


class KvTarget(msgspec.Struct, frozen=True):
    """The request is a prompt to compute for another engine: its KV goes there, block by block."""

    ticket: int
    first_block: int  # of the prompt: those before it are not needed
    addresses: list[str]  # of the workers there, by rank


class DispatchedReq(msgspec.Struct, frozen=True, tag=True):
    """A request for one of several engines. It may have begun in another engine, and goes on from its tokens."""

    request: GenerateReq  # with its whole prompt, and a seed, so that every engine samples the same tokens
    age_s: float  # since it arrived: the clock of ``arrived_s`` may be another machine's
    block_hashes: bytes  # [blocks of the prompt] int64: see utils/block_hash.py
    output_ids: list[int] = []  # tokens that the client has got already
    is_moved: bool = False  # another engine had accepted it
    runs_alone: bool = False  # it may have crashed the workers of another engine: see CrashIsolation
    ticket: KvTicket | None = None
    target: KvTarget | None = None


class MovedReqs(msgspec.Struct, frozen=True, tag=True):
    """These requests go on in another engine. Forget them, and confirm it by ``BatchTokenIdOut.aborted``."""

    req_ids: list[int]


class KvCancel(msgspec.Struct, frozen=True, tag=True):
    """No prefill engine computes the prompt of this request, or not any more."""

    req_id: int
    ticket: int
    was_started: bool = True  # a prefill engine had got the prompt


ToEngine = DispatchedReq | AbortReq | ReleaseParents | MovedReqs | KvCancel | GetTimelines | StartProfile | StopProfile

REQ_ID_BITS = 48  # low bits of an id count the requests of one HTTP process
HTTP_PROCESS_BITS = 8  # above them is the number of the process: see ChildConfig.http_process


def http_process_of(req_id: int) -> int:
    return req_id >> REQ_ID_BITS


# router -> detokenization


class TextReq(msgspec.Struct, frozen=True):
    """Announces a request to the detokenizer."""

    req_id: int
    text: TextParams
    output_ids: list[int] = []  # tokens whose text the client has already


class Admission(msgspec.Struct, frozen=True):
    """How a request was admitted."""

    queue_s: float
    cached_tokens: int  # of the prompt, from the prefix cache


class TokenIdOut(msgspec.Struct, frozen=True, array_like=True):
    """A token of a request that has no text yet."""

    req_id: int
    token: Token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it; None for an end token of the model
    admission: Admission | None = None  # with the first token
    ends_in_text: bool = False  # it finishes the request, and its text counts: it is no end token


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

    @property
    def tokens(self) -> list[TokenIdOut]:
        """All tokens: slower than the columns, and simpler."""
        return [*(TokenIdOut(req_id, Token(token_id)) for req_id, token_id in self.plain.pairs()), *self.outs]


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    counts: list[int]  # one per bucket of utils/metrics.py; the last counts all larger values
    total: float  # sum of the observed values


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """Metrics by the names of utils/metrics.py, which knows their kinds, buckets and labels."""

    values: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}  # name -> label value -> count
    histograms: dict[str, HistogramCounts] = {}


class RouterStats(msgspec.Struct, frozen=True, tag=True):
    """The heartbeat of router and detokenizer, every second, with the current metrics."""

    step_age_s: float  # age of the oldest step in flight; 0 when idle
    metrics: MetricsSnapshot
    has_workers: bool = True  # False while lost workers are being replaced
    crash_suspects: list[int] = []  # requests that were in flight when the workers were lost, right after that


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


QueryReply = Timelines | ProfileReply | AdapterReply  # goes through the detokenizer to the HTTP process that asked

ToDetokenization = BatchTokenIdOut | RouterStats | AbortByRequestId | QueryReply


# router of an engine -> dispatcher


class KvNews(msgspec.Struct, frozen=True, tag=True):
    """Changes of an engine's prefix cache since the last message, as hashes of blocks."""

    epoch: int  # counts how often all KV was lost; entries of an earlier epoch are void
    added: bytes  # [n] int64
    evicted: bytes  # [n] int64


class EngineDraining(msgspec.Struct, frozen=True, tag=True):
    """The engine ends when its requests have: send it no new ones."""


class KvWanted(msgspec.Struct, frozen=True, tag=True):
    """The engine has reserved slots for the prompt of a request with a KvTicket: let a prefill engine compute it."""

    req_id: int
    ticket: int
    first_block: int = 0  # the engine has those before it
    num_blocks: int = 0  # 0: it needs none
    addresses: list[str] = []  # of its workers, by rank


class KvMissing(msgspec.Struct, frozen=True, tag=True):
    """The KV of a prompt has not come in time, though nobody has cancelled it: the engines may not reach each other."""

    req_id: int
    ticket: int


FromEngine = BatchTokenIdOut | RouterStats | QueryReply | KvNews | EngineDraining | KvWanted | KvMissing


# detokenization -> httpserver


class StrOut(msgspec.Struct, frozen=True, array_like=True):
    """A token with the text that it completes: "" while a character or a stop string may be incomplete."""

    req_id: int
    text: str
    token: Token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    admission: Admission | None = None


class BatchStrOut(msgspec.Struct, frozen=True, tag=True):
    outs: list[StrOut] = []
    failed: list[ReqFailed] = []
    embeddings: list[EmbeddingOut] = []


ToHttpserver = BatchStrOut | RouterStats | AbortByRequestId | QueryReply


# between the launcher and each of its children, as lines of JSON


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


class StepLimits(msgspec.Struct, frozen=True):
    """The step sizes that suit a device, unless the operator sets others."""

    batch_max_tokens: int  # of all requests
    chunked_prefill_size: int | None = None  # prompt tokens while others decode; None: no limit of its own
    preferred_step_tokens: tuple[int, ...] = ()  # efficient sizes of a step with prompts and decodes; empty: any
    long_prompt_step_s: float = 0.0  # what a step with a long prompt may take beside few decodes; 0: a usual chunk


class WindowedKv(msgspec.Struct, frozen=True):
    """The second KV pool, for layers with a sliding window: a token has KV there while windows reach it."""

    size: int  # tokens
    window: int  # the largest one: tokens that a query attends to, itself included
    kept: int  # tokens of a running request that keep their KV, up to the last one


class PoolingLimits(msgspec.Struct, frozen=True):
    """What a model computes instead of text."""

    size: int  # numbers of a result
    needs_whole_prompt: bool  # the result depends on all tokens of a text: a cached prefix cannot be used
    has_kv: bool  # False: a step computes whole texts
    summary: str = ""  # for the banner: "embed (mean of the tokens, 384 numbers)"

    @property
    def shares_prefix(self) -> bool:
        """Whether texts may use cached prefixes."""
        return self.has_kv and not self.needs_whole_prompt


class HostKvSize(msgspec.Struct, frozen=True):
    """The host memory for evicted KV."""

    num_blocks: int
    block_bytes: int  # of all ranks
    lower_tiers: tuple[str, ...] = ()  # below it


class KvIdentity(msgspec.Struct, frozen=True):
    """What keys and values depend on, besides weights, tokens, salt and adapter, and how they lie in memory.

    Engines send each other KV, and find what others have stored, only if all of it is the same.
    """

    tp: int
    pp: int
    version: str  # of LightServe: of its kernels, and of the format of a block
    model: str  # digest of the configuration of the model, and of the angles of positions that --max_req_total_len sets
    computed: str  # "in bfloat16 (KV in int8) on cuda"
    layout: str  # digest of the heads, sizes and data types of all layers of a rank
    is_deterministic: bool = False


class EngineReady(msgspec.Struct, frozen=True, tag=True):
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
    windowed: WindowedKv | None = None  # None: all layers keep the KV of all tokens of max_total_token_num
    pooling: PoolingLimits | None = None  # None: the model generates text
    lora_slots: int = 0  # adapters that fit on the device at once; 0: requests cannot use adapters
    host_kv: HostKvSize | None = None  # None: evicted KV is not kept in host memory
    kv_identity: KvIdentity | None = None  # None: it computes no KV


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


class Ping(msgspec.Struct, frozen=True, tag=True):
    """The launcher checks that a child responds."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The response to Ping. A child with an event loop sends it from the loop."""


class RankExited(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank on another node, from the launcher there."""

    exit_code: int  # negative: of a signal
    is_node_missing: bool = False  # the rank did not start, because its node did not come in time


FromChild = (
    StartupPhase | StartupProgress | Ready | EngineReady | ChildFailed | Drained | WorkersLost | Pong | RankExited
)
ToChild = EngineReady | NewWorkers | EngineJoined | EngineLost | HttpProcessLost | Drain | EngineDied | Ping


# gateway <-> engine over TCP, besides ToEngine and FromEngine

LINK_PROTOCOL = 9  # increase it when a message between gateways and engines changes


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
    ready: EngineReady
    role: str = "normal"  # --role
    kv_transport: str = ""  # how it sends and receives KV: --kv_transport and --cluster_tls


class LinkRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts no requests from this gateway, or does not know it any more."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Both sides send it twice a second."""


GatewayToEngine = ToEngine | GatewayHello | Heartbeat
EngineToGateway = FromEngine | EngineHello | LinkRefused | Heartbeat


# node 0 <-> the other nodes of an engine (--nnodes), over TCP

NODE_PROTOCOL = 1  # increase it when one of these messages changes


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node. The first fields stay as they are in all versions, so that every node 0 can read it.

    A node that has other ``properties`` than node 0 is refused: versions, digests of the model, flags.
    """

    protocol: int
    node: int
    properties: dict[str, str] = {}


class NodeAccepted(msgspec.Struct, frozen=True, tag=True):
    """The reply to NodeHello."""


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The other reply to NodeHello."""

    reason: str
    may_retry: bool = False


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the stream is its control connection. The end of the stream kills it, and RankExited ends it."""

    rank: int
    generation: int  # how many times the ranks were replaced
    store_port: int  # on node 0, where the ranks find each other; a node replaces it by a port of its own
    max_total_token_num: int | None = None  # None: as in the node's own flags
    max_windowed_token_num: int | None = None


class ConnectRank(msgspec.Struct, frozen=True, tag=True):
    """Connect to the socket of a rank, for the router."""

    rank: int
    generation: int


class ConnectStore(msgspec.Struct, frozen=True, tag=True):
    """Connect to the store of node 0, where the ranks find each other."""


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """A new stream of bytes in both directions."""

    stream: int  # even if node 0 opens it, else odd
    target: StartRank | ConnectRank | ConnectStore


class StreamData(msgspec.Struct, frozen=True, tag=True):
    stream: int
    data: bytes


class StreamEnd(msgspec.Struct, frozen=True, tag=True):
    """No more data comes from this side."""

    stream: int


StreamMessage = OpenStream | StreamData | StreamEnd
ToFirstNode = NodeHello | StreamMessage | Heartbeat
ToNode = NodeAccepted | NodeRefused | StreamMessage | Heartbeat
