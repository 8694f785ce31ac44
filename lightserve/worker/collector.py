"""Collects the results of launched steps, in launch order.

Two owners share the state of a request:

- The thread that launches steps owns the batch: lengths, rows, device state, and its view of the token ids.
- The collector owns the output of requests with a grammar (``GrammarOutput``). A thread that collects holds its lock.

The collector waits for the tokens of a step, advances grammars and builds the StepResult. It queues what the launching
thread must know (``TokenUpdate``), and the launching thread applies the queue before it packs the next step. A grammar
changes hands with a request's token. While a sampled token is in flight, only the collector touches the grammar. When
no token of the request is in flight, only the launching thread does, to make its mask.

There is no thread for it. The thread that wants a result collects all steps up to it, so a result reaches the router
without a switch between threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightserve.common.device import copy_to_host
from lightserve.messages.int_arrays import Int32Array, Int64Array, int32s, int64s
from lightserve.messages.step import (
    NO_DRAFTS,
    NO_TOKENS,
    DraftColumns,
    ReqFailed,
    StepResult,
    Token,
    TokenColumns,
    TokenOut,
    joined_columns,
)
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.sampled import Sampled, StepUpdates, TokenOnlyRows, TokenUpdate
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.grammar import NO_TOKEN_LEFT, GrammarOutput
from lightserve.worker.sampling.logprobs import NO_LOGPROBS, SampledLogprobs, TopLogprobs, join_chunks
from lightserve.worker.sampling.sampler import NONE_ALLOWED
from lightserve.worker.speculation.draft_input import VerifiedCounts
from lightserve.worker.speculation.proposals import Proposals, ProposalsOnHost

NOT_FINITE = "numerical error: the model's logits for the next token are not finite numbers"


class HostCounts(NamedTuple):
    """VerifiedCounts on the host."""

    tokens: Int64Array
    proposed: Int64Array


class PendingStep:
    """A launched step."""

    def __init__(
        self,
        tokens: Tensor,
        sampled: Sampled,
        logprobs: SampledLogprobs | None,
        drafts: VerifiedCounts | None = None,
        proposals: Proposals | None = None,
    ) -> None:
        """``drafts``: how many tokens each request gets; None: one each. ``proposals``: for next steps."""
        self.sampled = sampled
        self.result: StepResult | None = None  # when it is collected
        self.error: BaseException | None = None  # if that failed
        self._tokens = copy_to_host(tokens) if drafts is None else copy_to_host(tokens, *drafts)
        self._logprobs = logprobs
        self._proposals = None if proposals is None else ProposalsOnHost(proposals)

    def token_ids(self) -> tuple[Int64Array, HostCounts | None]:
        """Wait for the sampled tokens. Return one per row, and the counts of tokens, if the step has drafts."""
        tokens, *drafts = self._tokens.tensors()
        return tokens.numpy(), HostCounts(*(counts.numpy() for counts in drafts)) if drafts else None

    def proposals(self) -> TokenColumns:
        return NO_TOKENS if self._proposals is None else self._proposals.columns()

    def logprobs(self) -> dict[int, TopLogprobs]:
        return {} if self._logprobs is None else self._logprobs.by_row()


class StepCollector:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[PendingStep] = deque()  # in launch order
        self._updates: deque[StepUpdates] = deque()

    def add(self, step: PendingStep) -> GetResult:
        """A function that waits for the result of ``step``, the step that was launched last."""
        self._pending.append(step)
        return partial(self._collect, step)

    def collect_all(self) -> None:
        """Wait for all steps in flight."""
        with self._lock:
            while self._pending:
                _result_or_raise(self._collect_next())

    def take_updates(self) -> Iterator[StepUpdates]:
        """The tokens that were collected since the last call. Only the launching thread calls this."""
        while self._updates:
            yield self._updates.popleft()

    def _collect(self, step: PendingStep) -> StepResult:
        with self._lock:
            while step.result is None and step.error is None:
                self._collect_next()
        return _result_or_raise(step)

    def _collect_next(self) -> PendingStep:
        step = self._pending.popleft()
        try:
            step.result = self._result_of(step)
        except BaseException as error:
            step.error = error
        return step

    def _result_of(self, step: PendingStep) -> StepResult:
        (ids, drafts), plain = step.token_ids(), step.sampled.plain
        with_details = OtherResults.of(step, ids, None if drafts is None else drafts.tokens)
        columns, last_ids = _plain_columns(plain, ids, None if drafts is None else drafts.tokens)
        has_token = last_ids >= 0
        without = zip(plain.req_ids[~has_token].tolist(), last_ids[~has_token].tolist(), strict=True)
        failed = with_details.failed + [_failure(req_id, token_id) for req_id, token_id in without]
        taken_ids = np.maximum(columns.token_ids, 0)  # as ops.place_tokens takes them
        self._updates.append(StepUpdates(with_details.updates, plain, taken_ids, int32s(columns.counts)))
        columns = _without_last(columns, ~has_token)
        if with_details.plain:
            columns = joined_columns([columns, TokenColumns.of(with_details.plain)])
        return StepResult(
            with_details.detailed,
            failed,
            plain=columns,
            drafts=_draft_columns(step.sampled, drafts),
            proposals=step.proposals(),
        )


class OtherResults(NamedTuple):
    """The results of requests with a grammar or logprobs."""

    plain: list[tuple[int, list[int]]]  # requests and their tokens, of those that need no details
    detailed: list[TokenOut]
    failed: list[ReqFailed]
    updates: list[TokenUpdate]  # what the launching thread must know

    @classmethod
    def of(cls, step: PendingStep, ids: Int64Array, counts: Int64Array | None) -> OtherResults:
        """``counts``: tokens of the request of each row, if the step has drafts."""
        results, logprobs, experts = cls([], [], [], []), step.logprobs(), step.sampled.experts.by_req()
        for sampled in step.sampled.with_details:
            row, req, chunks, drafts = sampled
            count = 1 if counts is None else int(counts[row])
            token_ids: list[int] = ids[row : row + count].tolist()
            prompt = None if chunks is None else join_chunks(chunks, req.sampling)
            of_req = experts.get(req.req_id)
            rejected = drafts + 1 - count
            first = prompt, None if of_req is None else of_req[: len(of_req) - rejected].tobytes()
            tokens = [
                Token(token_id, *logprobs.get(row + number, NO_LOGPROBS), *((None, None) if number else first))
                for number, token_id in enumerate(token_ids)
            ]
            if req.output is not None:
                results._add_constrained(req, tokens, drafts)
            elif token_ids[-1] < 0:
                results._add_failed(req, tokens, drafts)
            else:
                results.detailed.extend(TokenOut(req.req_id, token) for token in tokens)
                results.updates.append(TokenUpdate(req, token_ids, False, drafts, count - 1))
        return results

    def _add_failed(self, req: InferReq, tokens: list[Token], drafts: int) -> None:
        """Accepted drafts, without a token after them."""
        self.failed.append(_failure(req.req_id, tokens[-1].id))
        self.updates.append(TokenUpdate(req, _taken_ids(tokens), False, drafts, len(tokens) - 1))
        self.detailed.extend(TokenOut(req.req_id, token) for token in tokens[:-1])

    def _add_constrained(self, req: InferReq, tokens: list[Token], drafts: int) -> None:
        """Accepted drafts and a sampled token of a request with a grammar. A token that completes it is the last.

        No token has to follow it: there may be none that the grammar and the other rules both allow.
        """
        output = req.output
        assert output is not None
        num_allowed, is_complete = _advance(output, [token.id for token in tokens if token.id >= 0])
        if tokens[-1].id < 0 and not is_complete:
            self._add_failed(req, tokens, drafts)
            return
        sampled_ids, forced = _taken_ids(tokens), list(output.forced())
        forced_ids = [token_id for token_id, _ in forced]
        is_complete = forced[-1][1] if forced else is_complete
        update = TokenUpdate(req, sampled_ids + forced_ids, not output.is_unconstrained, drafts, len(tokens) - 1)
        self.updates.append(update)
        if output.error is not None:
            self.failed.append(ReqFailed(req.req_id, 400, output.error))
            self.detailed.extend(TokenOut(req.req_id, token) for token in tokens[:-1])
        elif is_complete or any(token != Token(token.id) for token in tokens):
            added = [*tokens[:num_allowed], *map(Token, forced_ids)]
            self.detailed.extend(
                TokenOut(req.req_id, new_token, is_complete and new_token is added[-1]) for new_token in added
            )
        else:
            self.plain.append((req.req_id, sampled_ids + forced_ids))


def _plain_columns(plain: TokenOnlyRows, ids: Int64Array, counts: Int64Array | None) -> tuple[TokenColumns, Int32Array]:
    """The tokens of requests without details, and the last one of each. Only that one may be none."""
    if counts is None:
        last_ids: Int32Array = ids[plain.indices].astype(np.int32)
        return TokenColumns(plain.req_ids, last_ids), last_ids
    counts = counts[plain.indices]
    rows = np.arange(counts.sum()) + np.repeat(plain.indices - np.cumsum(counts) + counts, counts)
    token_ids: Int32Array = ids[rows].astype(np.int32)
    return TokenColumns(plain.req_ids, token_ids, counts.astype(np.int32)), token_ids[np.cumsum(counts) - 1]


def _without_last(columns: TokenColumns, is_missing: npt.NDArray[np.bool_]) -> TokenColumns:
    """Without the last token of those requests whose last one is none. They keep the drafts before it."""
    if not is_missing.any() or not len(columns.counts):
        return columns.where(~is_missing)
    counts = int32s(columns.counts)
    is_kept = np.ones(len(columns.token_ids), dtype=np.bool_)
    is_kept[(np.cumsum(counts) - 1)[is_missing]] = False
    left = counts - is_missing
    return TokenColumns(
        int64s(columns.req_ids)[left > 0], int32s(columns.token_ids)[is_kept], left[left > 0].astype(np.int32)
    )


def _draft_columns(sampled: Sampled, drafts: HostCounts | None) -> DraftColumns:
    if drafts is None:
        return NO_DRAFTS
    plain, detailed = sampled.plain, [of_req for of_req in sampled.with_details if of_req.drafts]
    computes = plain.drafts > 0
    rows, req_ids = plain.indices[computes], plain.req_ids[computes]
    if detailed:
        rows = np.concatenate((rows, int64s([of_req.row for of_req in detailed])))
        req_ids = np.concatenate((req_ids, int64s([of_req.req.req_id for of_req in detailed])))
    accepted = drafts.tokens[rows] - 1
    return DraftColumns(req_ids, drafts.proposed[rows].astype(np.int32), accepted.astype(np.int32))


def _result_or_raise(step: PendingStep) -> StepResult:
    if step.result is None:
        raise step.error or AssertionError("the step is not collected")
    return step.result


def _failure(req_id: int, token_id: int) -> ReqFailed:
    """The failure of a request without a token. ``token_id``: the value in place of its token."""
    return ReqFailed(req_id, 400, NO_TOKEN_LEFT) if token_id == NONE_ALLOWED else ReqFailed(req_id, 500, NOT_FINITE)


def _taken_ids(tokens: list[Token]) -> list[int]:
    """As ops.place_tokens takes them: token 0 in place of a missing one."""
    return [max(token.id, 0) for token in tokens]


def _advance(output: GrammarOutput, token_ids: list[int]) -> tuple[int, bool]:
    """Add sampled tokens up to one that completes the grammar. Returns how many, and whether there is such a token."""
    for count, token_id in enumerate(token_ids, start=1):
        if output.add(token_id):
            return count, True
    return len(token_ids), False
