"""The requests that a worker holds, and the input of a step over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lightserve.common.device import to_device
from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.ops.step import CHOSEN
from lightserve.io_struct import NewReq, SamplingParams, StepRow, StoppingParams
from lightserve.worker.sampling.grammar import ReqGrammar
from lightserve.worker.sampling.prompt_logprobs import PromptPart, StepScores
from lightserve.worker.sampling.req_rules import ReqRules
from lightserve.worker.sampling.thinking import ThinkingBudget
from lightserve.worker.shared_prefixes import SharedPrefixes, SharedRows
from lightserve.worker.step_input import StepColumns, StepShape, columns_of, input_size

MIN_SHARING = 16  # requests of a step; smaller ones take little more than reading the weights does


DEFAULT_STOPPING = StoppingParams()


@dataclass(slots=True, eq=False)
class InferReq:
    """A request in the worker: its tokens, and how many of them are in the KV cache."""

    req_id: int
    row: int  # of req_to_token
    token_ids: list[int]  # that the host knows; the one chosen last may be known to the device alone
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    stopping: StoppingParams = DEFAULT_STOPPING
    grammar: ReqGrammar | None = None
    thinking: ThinkingBudget | None = None
    cache_len: int = 0
    counted_len: int = 0  # tokens that SeenTokens has counted
    # [tokens known as it entered] int32; those up to cache_len are filled, by which others may share them
    leading_slots: np.ndarray = field(init=False)
    total_len: int = field(init=False)  # tokens, known to the host or not
    obeys_grammar: bool = field(init=False)  # one says what may come after token_ids, as far as is known
    temperature: float = field(init=False)  # by which the step chooses; 0: greedily
    rules: ReqRules = field(init=False)
    prompt_parts: list[PromptPart] | None = field(init=False)  # None: nobody asks for the prompt's logprobs (any more)

    def __post_init__(self) -> None:
        self.rules = ReqRules(self.sampling, self.stopping, self.eos_ids)
        self.total_len = len(self.token_ids)
        self.obeys_grammar = self.grammar is not None
        self.leading_slots = np.empty(self.total_len, dtype=np.int32)
        is_asked = self.sampling.prompt_logprobs is not None and self.output_len == 0  # else they were told
        self.prompt_parts = [] if is_asked else None
        is_greedy = self.sampling.is_greedy or self.rules.is_special  # to draw what is chosen again would be a waste
        self.temperature = 0.0 if is_greedy else self.sampling.temperature

    @property
    def output_len(self) -> int:
        return self.total_len - self.prompt_len

    @property
    def is_due(self) -> bool:
        """Whether the step that was packed last computes its last token, so that the next can be chosen."""
        return self.cache_len == self.total_len

    @property
    def is_known(self) -> bool:
        """Whether the host knows all of its tokens."""
        return len(self.token_ids) == self.total_len

    @property
    def may_be_forced(self) -> bool:
        """Whether thinking that lasts too long may force the next token."""
        return self.thinking is not None and self.thinking.may_force(self.output_len)

    def append(self, chosen: int, forced: list[int]) -> None:
        """The host learns a token that counts in ``total_len`` already, and those that come after it in any case.

        A step may be packed meanwhile, so its length is known first: who finds the tokens may ask what follows. Where
        nothing is forced, the length is not touched: it may be counted up by the next step just now. That a grammar is
        over is told last: a step that knows it does not wait for the tokens with which it ended.
        """
        if forced:
            self.total_len += len(forced)
        self.token_ids += [chosen, *forced]
        self.obeys_grammar = self.grammar is not None and not self.grammar.is_over

    def scored_next(self, count: int) -> list[int]:
        """Tokens of the prompt whose logprobs come of computing its next ``count`` tokens, where they are asked for."""
        if self.prompt_parts is None:
            return []
        return self.token_ids[self.cache_len + 1 : min(self.cache_len + 1 + count, self.prompt_len)]

    def forbidden_next(self) -> list[int]:
        return self.rules.forbidden_after(self.token_ids, self.output_len)

    def forced_next(self) -> int | None:
        """The token that must come next, if any."""
        if self.thinking is None or not self.may_be_forced:
            return None
        return self.thinking.forced_after(self.token_ids[self.prompt_len :])


class Scored(NamedTuple):
    """Of the prompt of a request in a step."""

    req: InferReq
    start: int  # the token of the step from which on its tokens say how likely the next is
    targets: list[int]  # those next tokens


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as one array of integers, padded to a shape."""

    inputs: np.ndarray  # int32: see columns_of
    shape: StepShape
    reqs: list[InferReq]
    scored: list[Scored]

    def open_scores(self, device: torch.device) -> StepScores | None:
        """For the logprobs of prompts, of which each request gets its part."""
        if not self.scored:
            return None
        rows = [row for one in self.scored for row in range(one.start, one.start + len(one.targets))]
        targets = [target for one in self.scored for target in one.targets]
        k = max(one.req.sampling.prompt_logprobs or 0 for one in self.scored)
        scores = StepScores(rows, targets, k, device)
        begin = 0
        for req, _, own in self.scored:
            assert req.prompt_parts is not None
            req.prompt_parts.append(PromptPart(scores, slice(begin, begin + len(own))))
            begin += len(own)
        return scores


class InferBatch:
    """All requests of a worker by id, and the tokens that were chosen last for them."""

    def __init__(
        self, req_manager: ReqManager, padding_slot: int, device: torch.device, shares_prefixes: bool = True
    ) -> None:
        """``shares_prefixes``: steps tell attention which requests begin with the same slots."""
        self._req_manager = req_manager
        self.padding_slot = padding_slot  # of the KV pool; another pool, another slot
        self._device = device
        self._reqs: dict[int, InferReq] = {}
        self._prefixes: SharedPrefixes[InferReq] = SharedPrefixes()
        self.shares_prefixes = shares_prefixes
        self.req_to_token = req_manager.req_to_token
        self.last_ids = torch.zeros(req_manager.max_reqs + 1, dtype=torch.int64, device=device)  # chosen last, by row

    def add(self, new: NewReq, grammar: ReqGrammar | None = None, thinking: ThinkingBudget | None = None) -> None:
        row = self._req_manager.alloc()
        ids, cached = list(new.prompt_ids), np.array(new.cached_slots, dtype=np.int32)
        if len(cached):
            self.req_to_token[row, : len(cached)] = to_device(cached, self._device)
        prompt_len = len(ids) - new.output_len
        req = InferReq(
            new.req_id,
            row,
            ids,
            prompt_len,
            new.sampling,
            new.seed,
            new.eos_ids,
            new.stopping,
            grammar,
            thinking,
            cache_len=len(cached),
        )
        req.leading_slots[: len(cached)] = cached
        self._reqs[new.req_id] = req

    def remove(self, req_id: int) -> None:
        req = self._reqs.pop(req_id, None)  # a step that failed may not have let it in
        if req is not None:
            self._req_manager.free(req.row)
            self._prefixes.discard(req)

    def clear(self) -> None:
        """Remove all requests, also one that an interrupt stopped on its way in."""
        self._reqs.clear()
        self._prefixes = SharedPrefixes()
        self._req_manager.free_all()

    def pack(self, rows: Sequence[StepRow], fit: Callable[[StepShape], StepShape]) -> PackedStep:
        """The input of a step, whose tokens count as cached from here on; ``fit`` may want it larger.

        It is not asked where prompts are scored: no captured step does that. The requests may come in another order.
        """
        self._note_prompts(rows)
        rows, groups = self._arranged(rows)
        reqs = [self._reqs[row.req_id] for row in rows]
        q_len = np.array([len(row.slots) for row in rows], dtype=np.int32)
        count = int(q_len.sum())
        start = np.cumsum(q_len, dtype=np.int32) - q_len
        scored = _scored(reqs, start.tolist(), q_len.tolist())
        shape = StepShape(count, len(rows), bool((q_len == 1).any()), bool((q_len > 1).any()), bool(groups))
        shape = shape if scored else fit(shape)
        inputs, columns = self._padded(shape)

        table_rows = np.array([req.row for req in reqs], dtype=np.int32)
        ready = np.array([req.cache_len for req in reqs], dtype=np.int32)
        positions = np.arange(count) + np.repeat(ready - start, q_len)
        slots = [slot for row in rows for slot in row.slots]
        ids = [token for req, row in zip(reqs, rows, strict=True) for token in _ids(req, len(row.slots))]
        _fill(columns.tokens, (np.repeat(table_rows, q_len), positions, slots, ids))
        _fill(columns.requests, (table_rows, start, ready + q_len, ready))
        columns.temperature[: len(reqs)] = [req.temperature for req in reqs]
        columns.seed[: len(reqs)] = [req.seed for req in reqs]
        if groups:
            columns.groups[: len(groups), : len(SharedRows._fields)] = groups

        for req, row in zip(reqs, rows, strict=True):
            req.cache_len += len(row.slots)
        return PackedStep(inputs, shape, reqs, scored)

    def _note_prompts(self, rows: Sequence[StepRow]) -> None:
        """The slots of prompts, which others may share from the next step on."""
        if not self.shares_prefixes:
            return
        for req, row in ((self._reqs[row.req_id], row) for row in rows):
            left = len(req.leading_slots) - req.cache_len
            if left > 0:
                req.leading_slots[req.cache_len : req.cache_len + len(row.slots)] = row.slots[:left]
            if 0 < left <= len(row.slots):
                self._prefixes.add(req, req.leading_slots)

    def _arranged(self, rows: Sequence[StepRow]) -> tuple[Sequence[StepRow], list[SharedRows]]:
        """The rows of a decode step such that requests with a common prefix are neighbours, and their groups."""
        if not self.shares_prefixes or len(rows) < MIN_SHARING or any(len(row.slots) != 1 for row in rows):
            return rows, []
        order, groups = self._prefixes.arrange([self._reqs[row.req_id] for row in rows])
        return [rows[place] for place in order], groups

    def padding(self, shape: StepShape) -> np.ndarray:
        """The input of a step that computes nothing."""
        return self._padded(shape)[0]

    def _padded(self, shape: StepShape) -> tuple[np.ndarray, StepColumns]:
        """Input whose tokens go to a slot and a row that nobody reads, of requests of one token each, or none.

        With its columns, where what is computed goes.
        """
        inputs = np.zeros(input_size(shape), dtype=np.int32)
        columns = columns_of(inputs, shape, np.float32, np.int64)
        rows, _, slots, _ = columns.tokens
        req_rows, start, seq_len, _ = columns.requests
        rows[:] = req_rows[:] = self._req_manager.padding_row
        slots[:] = self.padding_slot
        start[:] = shape.tokens if shape.has_prompts else np.arange(shape.requests)
        seq_len[:] = 0 if shape.has_prompts else 1
        return inputs, columns


def _scored(reqs: Sequence[InferReq], starts: Sequence[int], counts: Sequence[int]) -> list[Scored]:
    asking = [entry for entry in zip(reqs, starts, counts, strict=True) if entry[0].prompt_parts is not None]
    scored = [Scored(req, start, req.scored_next(count)) for req, start, count in asking]
    return [one for one in scored if one.targets]


def _ids(req: InferReq, count: int) -> list[int]:
    """Of the next tokens to compute."""
    known = req.token_ids[req.cache_len : req.cache_len + count]
    return known if len(known) == count else [*known, CHOSEN]


def _fill(columns: Sequence[np.ndarray], values: Sequence[np.ndarray | list[int]]) -> None:
    for column, value in zip(columns, values, strict=True):
        column[: len(value)] = value
