"""A request in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.common import ops
from lightserve.messages.int_arrays import GrowingArray, Int32Array
from lightserve.messages.params import SamplingParams, StoppingParams
from lightserve.worker.batch.req_columns import ReqColumns, ReqLengths
from lightserve.worker.sampling.grammar import GrammarOutput, ReqGrammar
from lightserve.worker.sampling.logprobs import NO_CANDIDATE, PromptChunk
from lightserve.worker.sampling.req_rules import ReqRules
from lightserve.worker.sampling.thinking import ThinkingBudget

DEFAULT_STOPPING = StoppingParams()


@dataclass(eq=False)
class InferReq(ReqLengths):
    """A request in the worker. The thread that launches steps owns it; only ``output`` belongs to the collector."""

    req_id: int
    row: int  # of req_to_token
    known: GrowingArray  # its known tokens, without those in the tail of its row
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    stopping: StoppingParams = DEFAULT_STOPPING
    grammar: ReqGrammar | None = None
    thinking: ThinkingBudget | None = None
    draft_ids: Sequence[int] = ()  # its last tokens, as far as they are drafts: see drafted_req.py
    counted_len: int = 0  # tokens that SeenTokens has counted
    output: GrammarOutput | None = None  # None: no grammar
    lora_slot: int = ops.NO_LORA  # of its adapter
    # [tokens as it entered] int32, filled up to cache_len; other requests may begin with the same slots
    leading_slots: np.ndarray = field(init=False)
    is_constrained: bool = field(init=False)  # a grammar limits what may follow token_ids
    temperature: float = field(init=False)  # by which the step itself samples; 0: greedily
    rules: ReqRules = field(init=False)
    is_plain: bool = field(init=False)  # its tokens are returned without details
    returned_experts: int = field(init=False)  # tokens whose experts were returned, if they are wanted
    prompt_chunks: list[PromptChunk] | None = field(init=False)  # None: the prompt's logprobs are not wanted, or done

    def __post_init__(self) -> None:
        self.rules = ReqRules(self.sampling, self.stopping, self.eos_ids)
        self.columns, self.columns_row = ReqColumns(1), 0
        self.known_len = self.total_len = len(self.known)
        self.is_constrained = self.grammar is not None
        self.is_plain = self.output is None and self.sampling.logprobs is None and not self.sampling.routed_experts
        self.leading_slots = np.empty(self.total_len, dtype=np.int32)
        has_first_token = self.output_len > 0  # the prompt's logprobs came with it
        self.returned_experts = self.total_len - 1 if has_first_token else 0  # those of a preempted request came too
        is_wanted = self.sampling.prompt_logprobs is not None and not has_first_token
        self.prompt_chunks = [] if is_wanted else None
        # the step's own token is not used if Sampler samples the request, so no noise is computed for it
        is_greedy = self.sampling.is_greedy or self.rules.needs_sampler
        self.temperature = 0.0 if is_greedy else self.sampling.temperature

    @property
    def token_ids(self) -> Int32Array:
        """Its tokens, without the sampled one that is still in flight."""
        self.flush()
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
        return self.known_len < self.total_len

    @property
    def may_be_forced(self) -> bool:
        """Whether thinking that lasts too long may force the next token."""
        return self.thinking is not None and self.thinking.may_force(self.output_len)

    def move_to(self, columns: ReqColumns, row: int) -> None:
        """Have its numbers in another row."""
        self.flush()
        columns.copy_row(row, self.columns, self.columns_row)
        self.columns, self.columns_row = columns, row

    @property
    def reads_tokens(self) -> bool:
        """Whether its tokens so far, or their number, change how the next one is sampled."""
        return self.sampling.depends_on_output or self.stopping.min_new_tokens > 0

    def flush(self) -> None:
        """Append the tokens in the tail of its row to its own array."""
        token_ids = self.columns.known.take(self.columns_row)
        if len(token_ids):
            self.known.extend(token_ids)

    def add_known(self, token_ids: Sequence[int]) -> None:
        self.flush()
        self.known.extend(token_ids)
        self.known_len += len(token_ids)
        self.columns.last_known[self.columns_row] = token_ids[-1]

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

    def candidates_of(self, count: int) -> Int32Array | None:
        """Those of the next ``count`` targets, ``[count, candidates]``; None: it has none."""
        wanted = self.sampling.prompt_candidates
        if wanted is None:
            return None
        rows = np.frombuffer(wanted.ids, np.int32).reshape(-1, wanted.count)
        first = self.cache_len - wanted.start
        known = rows[max(first, 0) : max(first + count, 0)]
        return np.concatenate((np.full((count - len(known), wanted.count), NO_CANDIDATE, np.int32), known))

    def forbidden_next(self) -> list[int]:
        return self.rules.forbidden_after(self.token_ids, self.output_len)

    def forced_next(self) -> int | None:
        """The token that must come next, if any."""
        if self.thinking is None or not self.may_be_forced:
            return None
        return self.thinking.forced_after(self.token_ids[self.prompt_len :].tolist())
