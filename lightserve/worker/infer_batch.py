"""The requests of a worker, and the input of a step over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import to_device
from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.ops.step import LAST_SAMPLED
from lightserve.io_struct import NewReq, SamplingParams, StepRow, StoppingParams
from lightserve.utils.int_arrays import GrowingArray, Int32Array, int32s
from lightserve.worker.lora import write_groups
from lightserve.worker.sampling.grammar import GrammarOutput, ReqGrammar
from lightserve.worker.sampling.logprobs import PromptChunk, StepPromptLogprobs
from lightserve.worker.sampling.req_rules import ReqRules
from lightserve.worker.sampling.thinking import ThinkingBudget
from lightserve.worker.shared_prefixes import SharedPrefixes, SharedRows
from lightserve.worker.step_input import Padding, StepShape, pack, padded_input

MIN_SHARING = 16  # requests of a step; a smaller step takes little longer than reading the weights


DEFAULT_STOPPING = StoppingParams()


@dataclass(slots=True, eq=False)
class InferReq:
    """A request in the worker. The thread that launches steps owns it; only ``output`` belongs to the collector."""

    req_id: int
    row: int  # of req_to_token
    known: GrowingArray  # its tokens without the sampled one that is still in flight
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    stopping: StoppingParams = DEFAULT_STOPPING
    grammar: ReqGrammar | None = None
    thinking: ThinkingBudget | None = None
    cache_len: int = 0  # tokens in the KV cache, with those of the step that was packed last
    counted_len: int = 0  # tokens that SeenTokens has counted
    output: GrammarOutput | None = None  # None: no grammar
    lora_slot: int = ops.NO_LORA  # of its adapter
    # [tokens as it entered] int32, filled up to cache_len; other requests may begin with the same slots
    leading_slots: np.ndarray = field(init=False)
    total_len: int = field(init=False)  # tokens, with the one in flight
    is_constrained: bool = field(init=False)  # a grammar limits what may follow token_ids
    temperature: float = field(init=False)  # by which the step itself samples; 0: greedily
    rules: ReqRules = field(init=False)
    is_plain: bool = field(init=False)  # its tokens are returned without details
    prompt_chunks: list[PromptChunk] | None = field(init=False)  # None: the prompt's logprobs are not wanted, or done

    def __post_init__(self) -> None:
        self.rules = ReqRules(self.sampling, self.stopping, self.eos_ids)
        self.total_len = len(self.known)
        self.is_constrained = self.grammar is not None
        self.is_plain = self.output is None and self.sampling.logprobs is None
        self.leading_slots = np.empty(self.total_len, dtype=np.int32)
        has_first_token = self.output_len > 0  # the prompt's logprobs came with it
        is_wanted = self.sampling.prompt_logprobs is not None and not has_first_token
        self.prompt_chunks = [] if is_wanted else None
        # the step's own token is not used if Sampler samples the request, so no noise is computed for it
        is_greedy = self.sampling.is_greedy or self.rules.needs_sampler
        self.temperature = 0.0 if is_greedy else self.sampling.temperature

    @property
    def token_ids(self) -> Int32Array:
        """Its tokens, without the sampled one that is still in flight."""
        return self.known.view

    @property
    def output_len(self) -> int:
        return self.total_len - self.prompt_len

    @property
    def is_fully_computed(self) -> bool:
        """Whether the step that was packed last computes its last token, so that the next one can be sampled."""
        return self.cache_len == self.total_len

    @property
    def has_token_in_flight(self) -> bool:
        """Whether a step has sampled a token that the launching thread does not know yet."""
        return len(self.known) < self.total_len

    @property
    def may_be_forced(self) -> bool:
        """Whether thinking that lasts too long may force the next token."""
        return self.thinking is not None and self.thinking.may_force(self.output_len)

    def add_sampled(self) -> list[PromptChunk] | None:
        """Count a token that the device has sampled. Returns the logprobs of the prompt with the first one."""
        self.total_len += 1
        parts, self.prompt_chunks = self.prompt_chunks, None
        return parts

    def prompt_targets(self, count: int) -> list[int]:
        """The prompt tokens whose logprobs follow from computing the next ``count`` tokens, if they are wanted."""
        if self.prompt_chunks is None:
            return []
        targets = self.token_ids[self.cache_len + 1 : min(self.cache_len + 1 + count, self.prompt_len)]
        ids: list[int] = targets.tolist()
        return ids

    def forbidden_next(self) -> list[int]:
        return self.rules.forbidden_after(self.token_ids, self.output_len)

    def forced_next(self) -> int | None:
        """The token that must come next, if any."""
        if self.thinking is None or not self.may_be_forced:
            return None
        return self.thinking.forced_after(self.token_ids[self.prompt_len :].tolist())


# A row of a step, the request that gets its token, and the logprobs of the prompt if this is the first token and they
# are requested. It is a plain tuple, like TokenUpdate, because every step makes one for each request.
SampledRow = tuple[int, InferReq, list[PromptChunk] | None]
# A request, its sampled token and the tokens that its grammar forces after it, and whether the grammar limits the next.
TokenUpdate = tuple[InferReq, list[int], bool]


class PromptTargets(NamedTuple):
    """The tokens of a request's prompt whose logprobs a step computes."""

    req: InferReq
    start: int  # the row of the step whose logits are those of the first target; the others follow
    targets: list[int]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as one array of integers, padded to a shape."""

    inputs: np.ndarray  # int32: see step_input.py
    shape: StepShape
    reqs: list[InferReq]
    prompt_targets: list[PromptTargets]

    def prompt_logprobs(self, device: torch.device) -> StepPromptLogprobs | None:
        """The logprobs of prompts that the step computes. Each request gets its chunk of them."""
        if not self.prompt_targets:
            return None
        rows = [row for one in self.prompt_targets for row in range(one.start, one.start + len(one.targets))]
        targets = [target for one in self.prompt_targets for target in one.targets]
        k = max(one.req.sampling.prompt_logprobs or 0 for one in self.prompt_targets)
        logprobs = StepPromptLogprobs(rows, targets, k, device)
        begin = 0
        for req, _, own in self.prompt_targets:
            assert req.prompt_chunks is not None
            req.prompt_chunks.append(PromptChunk(logprobs, slice(begin, begin + len(own))))
            begin += len(own)
        return logprobs


class InferBatch:
    """All requests of a worker by id, and the token that was sampled last for each."""

    def __init__(
        self,
        req_manager: ReqManager,
        padding_slot: int,
        device: torch.device,
        shares_prefixes: bool = True,
        has_kv: bool = True,
    ) -> None:
        """``shares_prefixes``: steps pass groups of requests that begin with the same slots to attention.

        Without a KV cache (``has_kv``), attention reads the step itself: the slot of a token is its row there.
        """
        self._req_manager = req_manager
        self.padding_slot = padding_slot  # it changes with the size of the KV pool
        self.windowed_padding_slot: int | None = None  # None: there is no windowed pool
        self._device = device
        self._reqs: dict[int, InferReq] = {}
        self._prefixes: SharedPrefixes[InferReq] = SharedPrefixes()
        self.shares_prefixes = shares_prefixes
        self._has_kv = has_kv
        self.lora_slots = 0  # on the device
        self.req_to_token = req_manager.req_to_token
        self.last_ids = torch.zeros(req_manager.max_reqs + 1, dtype=torch.int64, device=device)  # by row

    def add(self, new: NewReq, grammar: ReqGrammar | None = None, thinking: ThinkingBudget | None = None) -> None:
        row = self._req_manager.alloc()
        known, cached = GrowingArray(new.token_ids), int32s(new.cached_slots)
        prompt_len = len(known) - new.output_len
        req = InferReq(
            new.req_id,
            row,
            known,
            prompt_len,
            new.sampling,
            new.seed,
            new.eos_ids,
            new.stopping,
            grammar,
            thinking,
            cache_len=len(cached),
            output=None if grammar is None else GrammarOutput(new, grammar),
            lora_slot=new.lora_slot,
        )
        req.leading_slots[: len(cached)] = cached
        if len(cached):
            self.req_to_token[row, : len(cached)] = to_device(req.leading_slots[: len(cached)], self._device)
            self._add_windowed(row, len(cached), int32s(new.cached_windowed_slots))
        self._reqs[new.req_id] = req

    @property
    def windowed_req_to_token(self) -> Tensor | None:
        return self._req_manager.windowed_req_to_token

    def _add_windowed(self, row: int, end: int, slots: Int32Array) -> None:
        """``slots``: of the windowed pool, of the tokens up to ``end``.

        Attention may read some tokens before those, with weight 0. They get the first of the slots, which is finite.
        """
        if self.windowed_req_to_token is None:
            return
        begin = end - len(slots)
        margin = min(begin, ops.WINDOW_MARGIN)
        padded = np.concatenate((np.repeat(slots[:1], margin), slots))
        self.windowed_req_to_token[row, begin - margin : end] = to_device(padded, self._device)

    def apply(self, updates: Iterable[TokenUpdate]) -> None:
        """Append collected tokens. Sampled ones count in ``total_len`` already. A request may have left meanwhile."""
        for req, token_ids, is_constrained in updates:
            if len(token_ids) == 1:
                req.known.append(token_ids[0])
            else:
                req.known.extend(token_ids)
            req.total_len += len(token_ids) - 1
            req.is_constrained = is_constrained

    def take_sampled(self, reqs: Sequence[InferReq]) -> list[SampledRow]:
        """The rows of the step that was packed last whose tokens were sampled. Their tokens are in flight now."""
        return [(row, req, req.add_sampled()) for row, req in enumerate(reqs) if req.cache_len == req.total_len]

    def remove(self, req_id: int) -> None:
        req = self._reqs.pop(req_id, None)  # it may be unknown if the step that brought it failed
        if req is not None:
            self._req_manager.free(req.row)
            self._prefixes.discard(req)

    def clear(self) -> None:
        """Remove all requests, also one whose ``add`` was interrupted."""
        self._reqs.clear()
        self._prefixes = SharedPrefixes()
        self._req_manager.free_all()

    def pack(
        self,
        rows: Sequence[StepRow],
        captured_shape: Callable[[StepShape], StepShape],
        windowed_slots: Int32Array | Sequence[int] = (),
    ) -> PackedStep:
        """The input of a step. Its tokens count as cached from now on, and its requests may be in another order.

        ``captured_shape`` returns the shape to pad to. A step that computes logprobs of prompts keeps its shape,
        because no captured step computes them. ``windowed_slots``: as in Step.
        """
        windowed_of = _by_req(rows, list(windowed_slots))
        self._record_prompts(rows)
        rows, groups = self._arrange(rows)
        reqs = [self._reqs[row.req_id] for row in rows]
        q_len = np.array([len(row.slots) for row in rows], dtype=np.int32)
        count = int(q_len.sum())
        start = np.cumsum(q_len, dtype=np.int32) - q_len
        prompt_targets = _prompt_targets(reqs, start.tolist(), q_len.tolist())
        has_decodes, has_prompts = bool((q_len == 1).any()), bool((q_len > 1).any())
        if not self._has_kv:
            has_decodes, has_prompts = False, True
        has_lora = self.lora_slots > 0 and any(req.lora_slot >= 0 for req in reqs)
        num_slots = self.lora_slots if has_lora else 0
        shape = StepShape(count, len(rows), has_decodes, has_prompts, bool(groups), num_slots)
        shape = shape if prompt_targets else captured_shape(shape)
        inputs, columns = padded_input(shape, self._padding)

        table_rows = np.array([req.row for req in reqs], dtype=np.int32)
        ready = np.array([req.cache_len for req in reqs], dtype=np.int32)
        tokens = {
            "row": np.repeat(table_rows, q_len),
            "position": np.arange(count) + np.repeat(ready - start, q_len),
            "slot": [slot for row in rows for slot in row.slots] if self._has_kv else np.arange(count),
            "token_id": [token for req, row in zip(reqs, rows, strict=True) for token in _ids(req, len(row.slots))],
        }
        pack(columns, tokens, reqs, {"row": table_rows, "start": start, "seq_len": ready + q_len, "ready_len": ready})
        if groups:
            columns.groups[: len(groups), : len(SharedRows._fields)] = groups
        if columns.lora_groups is not None:
            lora_slots = np.repeat([req.lora_slot for req in reqs], q_len)
            write_groups(columns.lora_rows, columns.lora_groups, lora_slots, shape.tokens)
        if columns.windowed_slots is not None:
            columns.windowed_slots[:count] = [slot for row in rows for slot in windowed_of[row.req_id]]

        for req, row in zip(reqs, rows, strict=True):
            req.cache_len += len(row.slots)
        return PackedStep(inputs, shape, reqs, prompt_targets)

    def _record_prompts(self, rows: Sequence[StepRow]) -> None:
        """Record the slots of prompts. Other requests may share them from the next step on."""
        if not self.shares_prefixes:
            return
        for req, row in ((self._reqs[row.req_id], row) for row in rows):
            left = len(req.leading_slots) - req.cache_len
            if left > 0:
                req.leading_slots[req.cache_len : req.cache_len + len(row.slots)] = row.slots[:left]
            if 0 < left <= len(row.slots):
                self._prefixes.add(req, req.leading_slots)

    def _arrange(self, rows: Sequence[StepRow]) -> tuple[Sequence[StepRow], list[SharedRows]]:
        """The rows of a decode step, with requests that share a prefix next to each other, and their groups."""
        if not self.shares_prefixes or len(rows) < MIN_SHARING or any(len(row.slots) != 1 for row in rows):
            return rows, []
        reqs = [self._reqs[row.req_id] for row in rows]
        if self.lora_slots and any(req.lora_slot >= 0 for req in reqs):
            return rows, []  # no captured step has both adapters and shared prefixes
        order, groups = self._prefixes.arrange(reqs)
        return [rows[place] for place in order], groups

    def padding(self, shape: StepShape) -> np.ndarray:
        """The input of a step that computes only padding."""
        return padded_input(shape, self._padding)[0]

    @property
    def _padding(self) -> Padding:
        return Padding(self._req_manager.padding_row, self.padding_slot, self.windowed_padding_slot)


def _by_req(rows: Sequence[StepRow], windowed_slots: Sequence[int]) -> dict[int, Sequence[int]]:
    """The slots of each row, by request: rows may be arranged in another order. Empty without a windowed pool."""
    if not windowed_slots:
        return {}
    ends = accumulate(len(row.slots) for row in rows)
    return {row.req_id: windowed_slots[end - len(row.slots) : end] for row, end in zip(rows, ends, strict=True)}


def _prompt_targets(reqs: Sequence[InferReq], starts: Sequence[int], counts: Sequence[int]) -> list[PromptTargets]:
    wanted = [entry for entry in zip(reqs, starts, counts, strict=True) if entry[0].prompt_chunks is not None]
    found = [PromptTargets(req, start, req.prompt_targets(count)) for req, start, count in wanted]
    return [one for one in found if one.targets]


def _ids(req: InferReq, count: int) -> list[int]:
    """The ids of the next ``count`` tokens to compute. The last one may be in flight."""
    if count == 1:
        return [req.known.item(req.cache_len) if req.cache_len < len(req.known) else LAST_SAMPLED]
    known: list[int] = req.token_ids[req.cache_len : req.cache_len + count].tolist()
    return known if len(known) == count else [*known, LAST_SAMPLED]
