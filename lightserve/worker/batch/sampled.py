"""The requests of a step that get tokens, and where their tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, NO_INT64, Int32Array, Int64Array, int64s
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.routed_experts import NO_EXPERTS, StepExperts
from lightserve.worker.sampling.logprobs import PromptChunk


class SampledRow(NamedTuple):
    row: int  # of the step's logits; the first of a request with drafts
    req: InferReq
    prompt_chunks: list[PromptChunk] | None  # logprobs of the prompt, if they are requested and this is the first token
    drafts: int = 0  # that the step computes


class TokenUpdate(NamedTuple):
    req: InferReq
    token_ids: list[int]  # accepted drafts, a sampled token, and tokens that the grammar forces after it
    is_constrained: bool  # the grammar limits the next one
    drafts: int = 0  # that the step has computed
    accepted: int = 0


class TokenOnlyRows(NamedTuple):
    """The requests of a step whose tokens are returned without details, in columns."""

    indices: Int64Array  # rows of the step's logits; the first of a request with drafts
    rows: Int64Array  # of the batch
    generations: Int64Array  # ReqColumns.entry
    req_ids: Int64Array
    drafts: Int64Array = NO_INT64  # that the step computes; empty: none


NO_TOKEN_ONLY_ROWS = TokenOnlyRows(NO_INT64, NO_INT64, NO_INT64, NO_INT64)


class Sampled(NamedTuple):
    """The requests of a step that get a token. Unfinished prompts get none."""

    with_details: Sequence[SampledRow]
    plain: TokenOnlyRows = NO_TOKEN_ONLY_ROWS
    experts: StepExperts = NO_EXPERTS

    @property
    def req_ids(self) -> Int64Array:
        return np.concatenate((self.plain.req_ids, int64s([row.req.req_id for row in self.with_details])))


class StepUpdates(NamedTuple):
    """The tokens of a step, for the thread that launches steps."""

    with_details: Sequence[TokenUpdate]
    plain: TokenOnlyRows
    plain_token_ids: Int32Array
    plain_counts: Int32Array = NO_INT32  # tokens of each request, if the step has drafts; empty: one
