"""Computes a step: a function of one array of integers, captured as a graph for frequent shapes."""

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
from lightserve.common.device import DeviceKind, pinned, to_device
from lightserve.worker.infer_batch import MIN_SHARING, InferBatch
from lightserve.worker.sampling.logprobs import StepPromptLogprobs
from lightserve.worker.sampling.step_masks import StepMasks
from lightserve.worker.step_input import StepColumns, StepShape, columns_of

# Decode steps are padded to one of these; a step of few rows costs what reading the weights costs.
DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Steps with prompts. Launching one from Python takes up to 29 ms, which computing more than 1,024 tokens hides: those
# are captured only where many decode, who make launching slower and all wait for it.
TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536)
HIDING = 1024  # tokens: more of them hide launching
MANY_REQUESTS = 128
MOST_PADDING = 256  # tokens: to compute so many takes no longer than launching saves
PROMPTS = 8
REQUESTS = (24, 40, 72, 136, 264)  # of steps in which others decode


class StepOut(NamedTuple):
    logits: Tensor  # [requests, vocab]
    tokens: Tensor  # [requests] int64, sampled by temperature and masks alone
    columns: StepColumns  # of the input


class StepRunner:
    def __init__(self, model: TpPartBaseModel, batch: InferBatch, kind: DeviceKind) -> None:
        self._model = model
        self._batch = batch
        self._graphs: CudaGraphs[StepShape, StepOut] | None = CudaGraphs(self._compute) if kind.has_graphs else None

    def launch_every_shape(self) -> None:
        """Launch every kernel of the steps that ``capture`` will capture, and those of masks."""
        with self._model.one_layer_of_each_kind():
            for shape in self._to_capture():
                _launch_masks(self._compute(self._padding(shape), shape).logits)

    def capture(self) -> None:
        if self._graphs is not None:
            self.launch_every_shape()
            self._graphs.capture((shape, self._padding(shape)) for shape in self._to_capture())

    def _to_capture(self) -> list[StepShape]:
        """The largest first: smaller ones then reuse its memory."""
        if self._graphs is None:
            return []
        shapes = graph_shapes(self._model.req_manager.max_reqs, self._batch.shares_prefixes)
        return sorted(shapes, reverse=True)

    def _padding(self, shape: StepShape) -> Tensor:
        return to_device(self._batch.padding(shape), self._model.device)

    def fit(self, shape: StepShape) -> StepShape:
        """The smallest captured shape that holds this one, or this one."""
        larger = padded(shape)
        return shape if larger is None or self._graphs is None or larger not in self._graphs else larger

    @torch.inference_mode()
    def run(
        self,
        inputs: np.ndarray,
        shape: StepShape,
        prompts: StepPromptLogprobs | None = None,
        masks: StepMasks | None = None,
    ) -> StepOut:
        if prompts is None and self._graphs is not None and shape in self._graphs:
            out = self._graphs.replay(shape, pinned(inputs))
            return out if masks is None else self._sample(out.logits, out.columns, masks)
        return self._sample(*self._forward(to_device(inputs, self._model.device), shape, prompts), masks)

    @torch.inference_mode()
    def _compute(self, inputs: Tensor, shape: StepShape) -> StepOut:
        """The function that is captured."""
        return self._sample(*self._forward(inputs, shape))

    def _forward(
        self, inputs: Tensor, shape: StepShape, prompts: StepPromptLogprobs | None = None
    ) -> tuple[Tensor, StepColumns]:
        columns = columns_of(inputs, shape)
        own, reqs = columns.tokens, columns.reqs
        tokens = ops.StepTokens(own["row"], own["position"], own["slot"], own["token_id"])
        input_ids = ops.place_tokens(tokens, self._batch.req_to_token, self._batch.last_ids)
        attn = ops.AttnBatch(
            self._batch.req_to_token,
            reqs["row"],
            reqs["start"],
            reqs["seq_len"],
            reqs["ready_len"],
            has_decodes=shape.has_decodes,
            shared_prefixes=columns.groups,
        )
        watch = None if prompts is None else partial(prompts.compute, vocab=self._model.config.vocab_size)
        step = ModelInput(
            input_ids, tokens.positions, tokens.slots, attn, is_prefill=shape.has_prompts, watch_logits=watch
        )
        return self._model.forward(step), columns

    def _sample(self, logits: Tensor, columns: StepColumns, masks: StepMasks | None = None) -> StepOut:
        reqs = columns.reqs
        token_masks = None if masks is None else masks.for_step(len(logits))
        sampled = ops.choose(logits, reqs["temperature"], reqs["seed"], reqs["seq_len"], token_masks)
        self._batch.last_ids.index_copy_(0, reqs["row"].long(), sampled)
        return StepOut(logits, sampled, columns)


@torch.inference_mode()
def _launch_masks(logits: Tensor) -> None:
    """Launch the kernels of masks, with masks that change nothing."""
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    bitmask = rows.new_full((len(logits), -(-logits.shape[1] // 32)), -1)
    ops.choose(logits, rows.float(), rows.long(), rows, ops.TokenMasks(rows, bitmask))
    ops.mask_logits(logits.float(), rows, bitmask)


def graph_shapes(max_reqs: int, shares_prefixes: bool = True) -> Iterator[StepShape]:
    """The shapes that are worth capturing for a server that runs ``max_reqs`` requests at once."""
    most = _at_least(max_reqs, DECODES) or DECODES[-1]
    for count in DECODES:
        if count <= most:
            yield StepShape(count, count, has_decodes=True, has_prompts=False)
        if shares_prefixes and MIN_SHARING <= count <= most:
            yield StepShape(count, count, has_decodes=True, has_prompts=False, has_shared=True)
    for tokens in TOKENS:
        if tokens <= HIDING:
            yield StepShape(tokens, PROMPTS, has_decodes=False, has_prompts=True)
        for requests in REQUESTS:
            if requests < min(tokens, most + PROMPTS + 1) and (tokens <= HIDING or requests > MANY_REQUESTS):
                yield StepShape(tokens, requests, has_decodes=True, has_prompts=True)


def padded(shape: StepShape) -> StepShape | None:
    """The smallest graph shape that holds this one."""
    if not shape.has_prompts:
        count = _at_least(shape.requests, DECODES)
        return None if count is None else shape._replace(tokens=count, requests=count)
    tokens = _at_least(shape.tokens, TOKENS)
    if tokens is None or tokens - shape.tokens > MOST_PADDING:
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
