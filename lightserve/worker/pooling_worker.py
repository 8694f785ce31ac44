"""One rank of a model that computes embeddings or scores: a request ends with the step that computes its last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lightserve.common.basemodel import Pooler
from lightserve.common.device import copy_to_host
from lightserve.common.device.base import AsyncCopy
from lightserve.config import WorkerConfig
from lightserve.errors import ModelFilesError
from lightserve.messages.control import PoolingLimits
from lightserve.messages.int_arrays import Int32Array, int32s
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import Embedding, NewReq, ReqFailed, Step, StepResult, StepRow
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.texts import mask_id_of
from lightserve.model_files.source import ModelSource
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer
from lightserve.worker.batch.infer_batch import PackedStep
from lightserve.worker.rpc import GetResult
from lightserve.worker.step_runner import StepRunner
from lightserve.worker.worker import ModelWorker

NOT_FINITE = "numerical error: the result has numbers that are not finite"


class PoolingWorker(ModelWorker):
    """A step passes batch, model, pooler and head. There is nothing to sample."""

    def _init_steps(self, config: WorkerConfig, source: ModelSource) -> None:
        pooling = self._pooling_config
        self._runner = StepRunner(self.model, self._batch, self._platform)
        rows = self.model.req_manager.max_reqs + 1
        self._pooler = Pooler(pooling.pooling, self.model_config.hidden_size, rows, self._device)
        late = pooling.late
        self._expansion_id: int | None = None  # of the tokens behind a query that it does not see
        if late is not None and late.expands_queries and not late.sees_expansion:
            self._expansion_id = mask_id_of(load_tokenizer(source))
        self._answer_ids: Tensor | None = None
        if pooling.answers is not None:
            self._answer_ids = torch.tensor(_answer_ids(source, pooling.answers), device=self._device)

    @property
    def _pooling_config(self) -> PoolingConfig:
        if self.pooling is None:
            raise ModelFilesError("the model generates text; it has no pooling")
        return self.pooling

    @property
    def pooling_limits(self) -> PoolingLimits:
        pooling = self._pooling_config
        is_per_token = self._pooler.kind == "tokens"
        return PoolingLimits(pooling.size, pooling.needs_whole_prompt, self.model.has_kv, str(pooling), is_per_token)

    def warm_up(self) -> None:
        self._platform.compile_kernels(self._device, self._launch_every_kernel)
        self._run_warm_up_steps()

    def capture(self) -> None:
        """Steps are not captured: a graph has one shape, and texts of any lengths are computed together.

        A small model pays for that: on an H200, steps of the shape of Qwen3-Embedding-0.6B are bound by launches.
        """

    def _launch_every_kernel(self) -> None:
        with self.model.distinct_layers_only():
            self._run_warm_up_steps()

    def _run_warm_up_steps(self) -> None:
        prompts = self._platform.warm_up_prompts
        for step in _warm_up_steps(prompts, self.model.req_manager.max_reqs, self.max_req_total_len):
            self.run(step)

    def reset(self) -> None:
        self._batch.clear()

    def launch(self, step: Step) -> GetResult:
        self._platform.set_current(self._device)
        for req_id in step.free:
            self._batch.remove(req_id)
        for new in step.new:
            self._batch.add(new)
        if not step.num_rows:
            return StepResult
        packed = self._batch.pack(step, lambda shape: shape)
        if not self.model.pp.is_last:
            self._runner.run_stage(packed.inputs, packed.shape, num_keys=self._num_keys(packed))
            return StepResult  # the last stage has the results
        if self._pooler.kind == "tokens":
            ends = list(accumulate(req.total_len for req in packed.reqs))
            ended = [(slice(end - req.total_len, end), req.req_id) for end, req in zip(ends, packed.reqs, strict=True)]
        else:
            rows = [(slice(row, row + 1), req) for row, req in enumerate(packed.reqs)]
            ended = [(row, req.req_id) for row, req in rows if req.is_fully_computed]
        return partial(_result, copy_to_host(self._compute(packed)), ended)

    def _num_keys(self, packed: PackedStep) -> Int32Array | None:
        """See ``AttnBatch.b_num_keys``. None: no request of the step ends with tokens that expand it."""
        if self._expansion_id is None:
            return None
        seen = [_len_without_end(req.token_ids, self._expansion_id) for req in packed.reqs]
        if all(count == req.total_len for count, req in zip(seen, packed.reqs, strict=True)):
            return None
        return int32s(seen)

    @torch.inference_mode()
    def _compute(self, packed: PackedStep) -> Tensor:
        """The results of all requests of the step, ``[requests, size]``. Those of unfinished prompts are not used.

        If tokens have vectors, ``[tokens, size]``.
        """
        hidden = self._runner.hidden_states(packed.inputs, packed.shape, num_keys=self._num_keys(packed))
        if self._answer_ids is not None:
            return self.model.logits(hidden).index_select(1, self._answer_ids).float()
        attn = hidden.infer_state.attn
        pooled = self._pooler.pool(self.model.final_states(hidden, self._pooler.rows(attn)), attn)
        return self.model.pre_post_weight.pooling_head.forward(pooled)


def _result(copy: AsyncCopy, ended: list[tuple[slice, int]]) -> StepResult:
    """Wait for the results of a step. Each request that ended has some rows."""
    (values,) = copy.tensors()
    is_finite = values.isfinite().all(dim=1).numpy()
    numbers = values.numpy()
    return StepResult(
        failed=[ReqFailed(req_id, 500, NOT_FINITE) for rows, req_id in ended if not is_finite[rows].all()],
        embeddings=[Embedding(req_id, numbers[rows].tobytes()) for rows, req_id in ended if is_finite[rows].all()],
    )


def _len_without_end(ids: Int32Array, token_id: int) -> int:
    """Without the run of this token at the end; the whole length if there is nothing else."""
    others = np.flatnonzero(ids != token_id)
    return int(others[-1]) + 1 if len(others) else len(ids)


def _answer_ids(source: ModelSource, answers: tuple[str, ...]) -> list[int]:
    tokenizer = load_tokenizer(source)
    ids = [tokenizer.token_to_id(answer) for answer in answers]
    missing = [answer for answer, token_id in zip(answers, ids, strict=True) if token_id is None]
    if missing:
        raise ModelFilesError(f"{source.path}: the tokenizer has no token {missing[0]!r}, by which the model scores")
    return [token_id for token_id in ids if token_id is not None]


def _warm_up_steps(prompts: Sequence[int], max_reqs: int, max_len: int) -> Iterator[Step]:
    """For a worker without requests: one of each length, then all of them together."""
    lengths = [length for length in prompts if length <= max_len][:max_reqs]
    for group in ([length] for length in lengths), [lengths] if len(lengths) > 1 else []:
        for prompt_lengths in group:
            yield from _whole_prompts(prompt_lengths)


def _whole_prompts(lengths: list[int]) -> Iterator[Step]:
    ids = [-1 - i for i in range(len(lengths))]
    new = [NewReq(i, [0] * n, SamplingParams(), seed=0) for i, n in zip(ids, lengths, strict=True)]
    ends = accumulate(lengths)
    rows = [StepRow(i, list(range(end - n, end))) for i, n, end in zip(ids, lengths, ends, strict=True)]
    yield Step(rows, new)
    yield Step([], free=ids)
