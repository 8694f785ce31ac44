"""router <-> model worker: a step, and what it results in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import NO_INT32, NO_INT64, Int32s, Int64s, int32s, int64s
from lightserve.messages.media import ImageRows
from lightserve.messages.params import SamplingParams, StoppingParams


class ForkPrefix(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a request is that of another one, which the workers keep: see Step.retain."""

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
    group_slots: tuple[Int32s, ...] = ()  # what it holds in each KV group: of a window, slots of the last cached tokens
    lora_slot: int = -1  # of its adapter; -1: it uses none
    parent: ForkPrefix | None = None
    images: list[ImageRows] = []  # in the prompt

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
    """Copy blocks from the KV pool to host memory: all of the pool of all tokens, or all of one KV group."""

    slots: Int32s  # in that pool: of all tokens, block after block; of states: one row for each block
    blocks: Int32s  # of host memory
    store_id: int = 0  # they count up


class KvLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks from host memory to the KV pool, beside the steps that follow. They are of one pool: see KvStore."""

    load_id: int
    blocks: Int32s  # of host memory
    slots: Int32s  # as in KvStore; no step uses them before the load has ended


class KvSend(msgspec.Struct, frozen=True, array_like=True):
    """Send blocks of tokens, which this step or an earlier one has computed, to a worker of another engine."""

    transfer_id: int
    addresses: list[str]  # of the workers there, by rank
    first: int  # number of the first block among those of the transfer that are of this pool
    slots: Int32s  # as in KvStore
    pool: int = 0  # 0: of all tokens; those of KV groups follow


class KvRecv(msgspec.Struct, frozen=True, array_like=True):
    """Another engine sends the KV of these slots. No step uses them before the transfer has ended: see KvReceived."""

    transfer_id: int
    slots: Int32s  # of all tokens, block after block
    timeout_s: float  # then the transfer ends with what has come
    group_slots: list[Int32s] = []  # of each KV group, as in KvStore


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
    retain: list[int] = []  # of ``free``: later requests may name them as parents
    release: list[int] = []  # of the requests that are kept: none will name them any more
    # by KV group; of a window: of all tokens of the rows, in their order; of states: a row of each, then of snapshots
    group_slots: tuple[Int32s, ...] = ()
    snapshots: Int32s = NO_INT32  # of states: of each its request's number in the step, and the tokens before it
    decode_ids: Int64s = NO_INT64  # requests of which it computes one token
    decode_slots: Int32s = NO_INT32  # of these tokens, one request after the other
    slot_counts: Int32s = NO_INT32  # how many of ``decode_slots`` each of ``decode_ids`` gets; empty: one
    draft_counts: Int32s = NO_INT32  # drafts of each of ``decode_ids``; empty: none
    loras: list[LoraPlace] = []
    stores: list[KvStore] = []
    loads: list[KvLoad] = []
    # of all tokens of the rows, in their order, drafts too, if the first stage does not sample them
    token_ids: Int32s = NO_INT32
    sends: list[KvSend] = []
    recvs: list[KvRecv] = []
    # of a request in the next step, at most: so many a head, or the last stage of a pipeline, drafts after this one
    next_drafts: int = 0
    ready_lens: Int32s = (
        NO_INT32  # of a pipeline with drafts: tokens of each of ``decode_ids`` computed before the step
    )
    groups: list[Step] = []  # of all attention groups, also of those without rows; empty: there is one group

    @property
    def num_decodes(self) -> int:
        return len(self.decode_ids) + sum(group.num_decodes for group in self.groups)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + len(self.chunks) + sum(len(group.chunks) for group in self.groups)

    @property
    def num_drafts(self) -> int:
        drafts = int(np.sum(self.draft_counts)) if len(self.draft_counts) else 0
        return drafts + sum(group.num_drafts for group in self.groups)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the chunks."""
        chunks = sum(len(row.slots) for row in self.chunks)
        return chunks + sum(group.num_prompt_tokens for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_drafts + self.num_prompt_tokens

    @property
    def rows(self) -> list[StepRow]:
        """All requests: slower than the columns, and simpler."""
        counts = int32s(self.slot_counts) if len(self.slot_counts) else np.ones(len(self.decode_ids), dtype=np.int32)
        slots, ends = int32s(self.decode_slots).tolist(), np.cumsum(counts).tolist()
        decodes = zip(int64s(self.decode_ids).tolist(), [0, *ends], ends, strict=False)
        return [*(StepRow(req_id, slots[begin:end]) for req_id, begin, end in decodes), *self.chunks]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of every token of a prompt but the first, given the tokens before it.

    The arrays travel as bytes: a prompt is long, and only the HTTP process reads them.
    """

    logprobs: bytes  # [tokens] float32
    ranks: bytes  # [tokens] int32; 1: the most likely token
    top_ids: bytes  # [tokens, k] int32, the most likely first
    top_logprobs: bytes  # [tokens, k] float32
    candidates: bytes = b""  # [tokens, count] float32, if there are PromptCandidates; -inf for those that are none


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token of a request's output: the part that every message about it has in common."""

    id: int
    logprob: float | None = None  # if requested; from the unmodified logits
    top_logprobs: list[tuple[int, float]] | None = None  # if requested: (token id, logprob), the most likely first
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if requested
    # if requested: [tokens before it, without those of earlier outputs; layers; top_k] uint8 or int16
    routed_experts: bytes | None = None


NO_TOKEN = Token(-1)  # of the end of a request that was aborted


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
    counts = [columns.each_counts for columns in parts] if any(len(columns.counts) for columns in parts) else []
    return TokenColumns(
        np.concatenate([NO_INT64, *(int64s(columns.req_ids) for columns in parts)]),
        np.concatenate([NO_INT32, *(int32s(columns.token_ids) for columns in parts)]),
        np.concatenate([NO_INT32, *counts]),
    )


class DraftColumns(msgspec.Struct, frozen=True, array_like=True):
    """What became of the drafts of a step, in columns: one number for each request that computed some."""

    req_ids: Int64s = NO_INT64
    proposed: Int32s = NO_INT32  # the others had no proposal
    accepted: Int32s = NO_INT32

    def __len__(self) -> int:
        """Requests."""
        return len(self.req_ids)

    def where(self, is_chosen: npt.NDArray[np.bool_]) -> DraftColumns:
        """Those of some of the requests."""
        return DraftColumns(
            int64s(self.req_ids)[is_chosen], int32s(self.proposed)[is_chosen], int32s(self.accepted)[is_chosen]
        )

    def rows(self) -> Iterable[tuple[int, int, int]]:
        """Request, proposed and accepted drafts. Slower than the columns, and simpler."""
        return zip(
            int64s(self.req_ids).tolist(),
            int32s(self.proposed).tolist(),
            int32s(self.accepted).tolist(),
            strict=True,
        )


NO_DRAFTS = DraftColumns()


def joined_drafts(parts: Sequence[DraftColumns]) -> DraftColumns:
    """The drafts of all parts as one, whose requests differ."""
    return DraftColumns(
        np.concatenate([NO_INT64, *(int64s(columns.req_ids) for columns in parts)]),
        np.concatenate([NO_INT32, *(int32s(columns.proposed) for columns in parts)]),
        np.concatenate([NO_INT32, *(int32s(columns.accepted) for columns in parts)]),
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

    One is sampled. Those before it are drafts that were accepted: ``drafts`` counts them. Those after it are forced by
    the grammar: then a step that is in flight already, and does not compute all of them, samples none and accepts no
    drafts. A request in ``failed`` may have tokens too: accepted drafts before the token that it lacks.
    """

    detailed: list[TokenOut] = []
    failed: list[ReqFailed] = []
    embeddings: list[Embedding] = []
    plain: TokenColumns = NO_TOKENS
    launch_s: float = 0.0  # how long the worker took to launch it
    drafts: DraftColumns = NO_DRAFTS
    proposals: TokenColumns = NO_TOKENS  # of a pipeline: drafts of requests for their next steps, which bring them

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
        joined_drafts([result.drafts for result in results]),
        joined_columns([result.proposals for result in results]),
    )
