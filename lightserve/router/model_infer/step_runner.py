"""A step as a function of one array of integers, which is captured for the shapes that come often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import ModelInput, TpPartBaseModel
from lightserve.common.cuda_graph import CudaGraphs
from lightserve.common.device import DeviceKind, to_device
from lightserve.router.model_infer.infer_batch import InferBatch
from lightserve.router.model_infer.prompt_scores import StepScores
from lightserve.router.model_infer.step_input import StepShape, columns_of

# Decode steps are padded to one of these; a step of few rows costs what reading the weights costs.
DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Steps with prompts: launching larger ones from Python takes less time than computing them.
TOKENS = (64, 128, 256, 384, 512)
PROMPTS = 8
REQUESTS = (24, 40, 72, 136, 264)  # of steps in which others decode


class StepOut(NamedTuple):
    logits: Tensor  # [requests, vocab]
    tokens: Tensor  # [requests] int64, chosen by temperature alone


class StepRunner:
    def __init__(self, model: TpPartBaseModel, batch: InferBatch, kind: DeviceKind) -> None:
        self._model = model
        self._batch = batch
        self._graphs: CudaGraphs[StepShape, StepOut] | None = CudaGraphs(self._compute) if kind.has_graphs else None

    def rehearse(self) -> None:
        """Launch every step that ``capture`` will capture."""
        for shape in self._to_capture():
            self._compute(self._padding(shape), shape)

    def capture(self) -> None:
        for shape in self._to_capture():
            assert self._graphs is not None
            self._graphs.capture(shape, self._padding(shape))

    def _to_capture(self) -> list[StepShape]:
        """The largest first: the smaller ones then find their memory in the pool."""
        if self._graphs is None:
            return []
        return sorted(graph_shapes(self._model.req_manager.max_reqs), reverse=True)

    def _padding(self, shape: StepShape) -> Tensor:
        return to_device(self._batch.padding(shape), self._model.device)

    def fit(self, shape: StepShape) -> StepShape:
        """The smallest captured shape that holds this one, or this one."""
        larger = padded(shape)
        return shape if larger is None or self._graphs is None or larger not in self._graphs else larger

    @torch.inference_mode()
    def run(self, inputs: np.ndarray, shape: StepShape, scores: StepScores | None = None) -> StepOut:
        if scores is None and self._graphs is not None and shape in self._graphs:
            return self._graphs.replay(shape, torch.from_numpy(inputs).pin_memory())
        return self._compute(to_device(inputs, self._model.device), shape, scores)

    @torch.inference_mode()
    def _compute(self, inputs: Tensor, shape: StepShape, scores: StepScores | None = None) -> StepOut:
        batch = self._batch
        columns = columns_of(inputs, shape, torch.float32, torch.int64)
        tokens = ops.StepTokens(*columns.tokens)
        input_ids = ops.place_tokens(tokens, batch.req_to_token, batch.last_ids)
        attn = ops.AttnBatch(batch.req_to_token, *columns.requests, has_decodes=shape.has_decodes)
        watch = None if scores is None else partial(scores.compute, vocab=self._model.config.vocab_size)
        step = ModelInput(
            input_ids, tokens.positions, tokens.slots, attn, is_prefill=shape.has_prompts, watch_logits=watch
        )
        logits = self._model.forward(step)
        chosen = ops.choose(logits, columns.temperature, columns.seed, attn.b_seq_len)
        batch.last_ids.index_copy_(0, attn.b_req_idx.long(), chosen)
        return StepOut(logits, chosen)


def graph_shapes(max_reqs: int) -> Iterator[StepShape]:
    """All that are worth capturing for a server that runs ``max_reqs`` requests at once."""
    most = _at_least(max_reqs, DECODES) or DECODES[-1]
    for count in DECODES:
        if count <= most:
            yield StepShape(count, count, has_decodes=True, has_prompts=False)
    for tokens in TOKENS:
        yield StepShape(tokens, PROMPTS, has_decodes=False, has_prompts=True)
        for requests in REQUESTS:
            if requests < min(tokens, most + PROMPTS + 1):
                yield StepShape(tokens, requests, has_decodes=True, has_prompts=True)


def padded(shape: StepShape) -> StepShape | None:
    """The smallest of all graph shapes that holds this one."""
    if not shape.has_prompts:
        count = _at_least(shape.requests, DECODES)
        return None if count is None else StepShape(count, count, has_decodes=True, has_prompts=False)
    tokens = _at_least(shape.tokens, TOKENS)
    if tokens is None:
        return None
    if not shape.has_decodes and shape.requests <= PROMPTS:
        return StepShape(tokens, PROMPTS, has_decodes=False, has_prompts=True)
    requests = _at_least(shape.requests, REQUESTS)
    if requests is None or requests >= TOKENS[-1]:
        return None
    tokens = max(tokens, _at_least(requests + 1, TOKENS) or tokens)
    return StepShape(tokens, requests, has_decodes=True, has_prompts=True)


def _at_least(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)
