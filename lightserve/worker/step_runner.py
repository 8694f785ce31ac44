"""Computes a step: a function of one array of integers, captured as a graph for frequent shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import HiddenStates, KvGroupInput, ModelInput, TpPartBaseModel
from lightserve.common.device import Device, Graphs, in_host_memory, to_device
from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.media import Sight
from lightserve.utils.progress import Progress
from lightserve.worker.batch.images import PackedImages
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.batch.step_input import AFTER_IMAGES, StepColumns, StepShape, columns_of
from lightserve.worker.captured_shapes import (
    draft_shape_for,
    draft_shapes,
    graph_shape_for,
    graph_shapes,
    mixed_draft_shapes,
)
from lightserve.worker.sampling.logprobs import StepPromptLogprobs
from lightserve.worker.sampling.step_masks import StepMasks
from lightserve.worker.speculation.draft_input import DraftRows, draft_padding
from lightserve.worker.speculation.state_replay import StateReplay

MAX_REPEATED = 16  # requests of a decode that is repeated: more of them compute for so long that calls cost little

SampledAt = tuple[Tensor, Tensor, Tensor]  # of each row: temperature, seed and position, as ops.sample takes them


class HeadInput(NamedTuple):
    """What a draft head reads of a step."""

    step: ModelInput
    states: Tensor  # [tokens, width]

    @classmethod
    def of(cls, step: ModelInput, states: Tensor) -> HeadInput:
        """Without the plans of attention: they take memory, for as long as a captured step lives."""
        groups = tuple([replace(group, attn=replace(group.attn, plans={})) for group in step.kv_groups])
        return cls(replace(step, attn=replace(step.attn, plans={}), kv_groups=groups), states)


StatesOfModel = Callable[[HiddenStates, Tensor], Tensor]  # what a head reads, from the states before and after the norm


class StepOut(NamedTuple):
    logits: Tensor  # [requests, tokens of this rank]: see TpPartBaseModel.gather_logits
    tokens: Tensor  # [requests] int64, sampled by temperature and masks alone
    columns: StepColumns  # of the input
    drafts: DraftRows | None = None  # of a step with drafts, whose rows are tokens and not requests
    for_head: HeadInput | None = None  # if the model has a draft head
    replay: StateReplay | None = None  # if states of recurrent layers have not seen the tokens with drafts yet


ComputeDrafts = Callable[[Tensor, StepShape], StepOut]


class StepRunner:
    def __init__(self, model: TpPartBaseModel, batch: InferBatch, device: Device) -> None:
        self._model = model
        self._batch = batch
        self._device = device
        self.states_of_model: StatesOfModel | None = None  # for a draft head; None: there is none
        self.for_head: HeadInput | None = None  # of the step whose logits were computed last
        self._ranges = device.profile(model.device).graphs if model.captures_graphs else None
        self._graphs: Graphs[StepShape, StepOut] | None = None
        self._num_drafts = 0  # of a request in a captured step, at most
        self._compute_drafts: ComputeDrafts | None = None
        self._captures_images = False
        # a graph would wait for other stages inside, and groups have steps of different shapes
        if self._ranges is not None and model.pp.size == 1 and model.args.parallel.dp.size == 1:
            self._graphs = device.graphs(self._compute)
        has_one_rank = model.tp.size == model.pp.size == model.args.parallel.dp.size == 1
        self._repeater = ops.new_repeater() if model.captures_graphs and has_one_rank else None

    def capture_drafts(self, num_drafts: int, compute: ComputeDrafts) -> int:
        """Capture steps with drafts too. Returns the most tokens of such a step, 0 without graphs."""
        if self._graphs is None or self._ranges is None:
            return 0
        self._num_drafts, self._compute_drafts = num_drafts, compute
        return max((self._ranges.max_draft_tokens, *self._ranges.tokens))

    def capture_images(self) -> None:
        """Capture steps with prompts that may have images, if no token of them sees later ones."""
        images = self._batch.images
        if self._graphs is None or self._ranges is None or images is None or images.sight is not Sight.NONE:
            return
        self._captures_images = True
        images.make_room(self._ranges.tokens[-1])

    def launch_every_shape(self) -> None:
        """Launch every kernel of the steps that ``capture`` will capture, and those of masks."""
        with self._model.distinct_layers_only():
            for shape in self._to_capture():
                _launch_masks(self._compute(self._padding(shape), shape).logits)

    def capture(self) -> None:
        if self._graphs is not None:
            self.launch_every_shape()
            shapes = self._to_capture()
            with Progress("CUDA graphs", len(shapes), unit="items") as progress:
                self._graphs.capture(self._examples(shapes, progress))

    def drop_captured(self) -> None:
        """The addresses of the KV cache change, which they contain."""
        for captured in (self._graphs, self._repeater):
            if captured is not None:
                captured.clear()

    def _examples(self, shapes: list[StepShape], progress: Progress) -> Iterator[tuple[StepShape, Tensor]]:
        """Shapes with their inputs. The next one is asked for when the one before is captured."""
        for shape in shapes:
            yield shape, self._padding(shape)
            progress.advance(1)

    def _to_capture(self) -> list[StepShape]:
        """The largest first: smaller ones then reuse its memory."""
        if self._graphs is None or self._ranges is None:
            return []
        max_reqs = self._model.req_manager.max_reqs
        shapes = list(graph_shapes(max_reqs, self._ranges, self._batch.shares_prefixes))
        if self._captures_images:
            shapes = [shape._replace(has_images=shape.has_prompts) for shape in shapes]
        has_head = self.states_of_model is not None
        shapes += draft_shapes(max_reqs, self._ranges, self._num_drafts, has_head)
        if self._batch.states is None:  # states see only accepted tokens, which a step with prompts finds on the host
            shapes += mixed_draft_shapes(max_reqs, self._ranges, self._num_drafts, has_head)
        slots = self._batch.lora_slots
        with_adapters = [shape._replace(lora_slots=slots) for shape in shapes if slots and not shape.has_shared]
        return sorted(shapes + with_adapters, reverse=True)

    def _padding(self, shape: StepShape) -> Tensor:
        inputs = self._batch.padding(shape)
        if shape.num_drafts:
            inputs = np.concatenate((inputs, draft_padding(shape)))
        return to_device(inputs, self._model.device)

    def captured_shape(self, shape: StepShape) -> StepShape:
        """The captured shape to pad this one to, or this shape if there is none."""
        if self._graphs is None or self._ranges is None or self._is_observed:
            return shape._replace(num_drafts=0, next_drafts=0)
        if shape.num_drafts:
            larger = draft_shape_for(shape, self._ranges, self._num_drafts, self.states_of_model is not None)
            is_captured = larger is not None and larger in self._graphs
            return larger if larger is not None and is_captured else shape._replace(num_drafts=0, next_drafts=0)
        can_have_images = shape.has_images or (self._captures_images and shape.has_prompts)
        # a graph saves more than reading a prefix once
        for wanted in (shape, shape._replace(has_shared=False)) if shape.has_shared else (shape,):
            larger = graph_shape_for(wanted._replace(has_images=can_have_images), self._ranges)
            if larger is not None and larger in self._graphs:
                return larger
        return shape

    @property
    def _is_observed(self) -> bool:
        """Somebody looks at intermediate values, which a captured step does not report."""
        return self._model.observer is not None

    @torch.inference_mode()
    def run(
        self,
        inputs: np.ndarray,
        shape: StepShape,
        prompts: StepPromptLogprobs | None = None,
        masks: StepMasks | None = None,
        images: PackedImages | None = None,
    ) -> StepOut:
        is_captured = self._graphs is not None and shape in self._graphs
        if is_captured and prompts is None and not self._is_observed:
            if images is not None and self._batch.images is not None:
                self._batch.images.load(images)
            out = self.replay(inputs, shape)
            if masks is None:
                return out
            return self._sample(out.logits, out.columns, masks)._replace(for_head=out.for_head)
        inputs_on_device = to_device(inputs, self._model.device)
        if self._repeater is not None and self._is_plain_decode(shape) and not self._is_observed:
            return self._sample(*self._repeater(self._forward, inputs_on_device, shape), masks)
        return self._sample(*self._forward(inputs_on_device, shape, prompts, images), masks)

    def _is_plain_decode(self, shape: StepShape) -> bool:
        plain = StepShape(shape.requests, shape.requests, has_decodes=True, has_prompts=False)
        return shape == plain and shape.tokens <= MAX_REPEATED and self.states_of_model is None

    def replay(self, inputs: np.ndarray, shape: StepShape) -> StepOut:
        """A step that is captured."""
        assert self._graphs is not None
        return self._graphs.replay(shape, in_host_memory(self._device, inputs))

    @torch.inference_mode()
    def _compute(self, inputs: Tensor, shape: StepShape) -> StepOut:
        """The function that is captured."""
        if shape.num_drafts:
            assert self._compute_drafts is not None
            return self._compute_drafts(inputs, shape)
        return self._sample(*self._forward(inputs, shape))

    def _forward(
        self,
        inputs: Tensor,
        shape: StepShape,
        prompts: StepPromptLogprobs | None = None,
        images: PackedImages | None = None,
    ) -> tuple[Tensor, StepColumns]:
        columns = self.columns(inputs, shape)
        return self.logits(self.model_input(columns, shape, images), prompts), columns

    def logits(self, step: ModelInput, prompts: StepPromptLogprobs | None) -> Tensor:
        """Of this rank's tokens. ``prompts`` gets those that it wants."""
        hidden = self._model.hidden_states(step)
        if prompts is not None:
            prompts.compute(partial(self._model.logits, hidden), self._model.config.vocab_size)
        if self.states_of_model is None:
            return self._model.local_logits(hidden)
        return self._logits_and_states(step, hidden, self.states_of_model)

    def _logits_and_states(self, step: ModelInput, hidden: HiddenStates, states_of_model: StatesOfModel) -> Tensor:
        """Every token passes the last norm, not only those with logits."""
        rows = hidden.infer_state.logit_rows()
        final = self._model.final_states(hidden)
        self.for_head = HeadInput.of(step, states_of_model(hidden, final))
        return self._model.logits_of(final if rows is None else final[rows])

    def run_empty(self, group_tokens: tuple[int, ...]) -> None:
        """Compute the experts of this rank in a step in which only other attention groups have tokens."""
        if any(group_tokens):
            shape = StepShape(1, 1, has_decodes=True, has_prompts=False, group_tokens=group_tokens)
            hidden = self.hidden_states(self._batch.padding(shape), shape)
            if not self._model.pp.is_last:
                self._model.send_to_next_stage(hidden)

    def run_stage(
        self,
        inputs: np.ndarray,
        shape: StepShape,
        images: PackedImages | None = None,
        num_keys: Int32Array | None = None,
    ) -> None:
        """Compute the layers of a pipeline stage that is not the last one."""
        self._model.send_to_next_stage(self.hidden_states(inputs, shape, images, num_keys))

    def hidden_states(
        self,
        inputs: np.ndarray,
        shape: StepShape,
        images: PackedImages | None = None,
        num_keys: Int32Array | None = None,
    ) -> HiddenStates:
        """Of all tokens of a step, for a model that computes no text. ``num_keys``: see ``AttnBatch.b_num_keys``."""
        columns = self.columns(to_device(inputs, self._model.device), shape)
        step = self.model_input(columns, shape, images)
        if num_keys is not None:
            step = replace(step, attn=replace(step.attn, b_num_keys=to_device(num_keys, self._model.device)))
        return self._model.hidden_states(step)

    def columns(self, inputs: Tensor, shape: StepShape) -> StepColumns:
        return columns_of(inputs, shape, has_states=self._batch.states is not None)

    def model_input(self, columns: StepColumns, shape: StepShape, images: PackedImages | None = None) -> ModelInput:
        """Write the slots of the step's tokens to ``req_to_token``, and find the tokens that were sampled last."""
        token_columns, reqs = columns.tokens, columns.reqs
        tokens = ops.StepTokens(
            token_columns["row"], token_columns["position"], token_columns["slot"], token_columns["token_id"]
        )
        input_ids = ops.place_tokens(tokens, self._batch.req_to_token, self._batch.last_ids)
        attn = ops.AttnBatch(
            self._batch.req_to_token,
            reqs["row"],
            reqs["start"],
            reqs["seq_len"],
            reqs["ready_len"],
            has_decodes=shape.has_decodes and not shape.num_drafts,
            shared_prefixes=columns.groups,
            see_until=self._see_until(images, tokens),
        )
        rotary_positions = self._rotary_positions(tokens)
        of_step = None
        if columns.images is not None and self._batch.images is not None:
            of_step = self._batch.images.of_step(columns.images, images, rotary_positions)
        return ModelInput(
            input_ids,
            tokens.positions,
            tokens.slots,
            attn,
            is_prefill=shape.has_prompts,
            kv_groups=self._group_inputs(tokens, columns, attn),
            lora=_lora_rows(columns, shape),
            states=_state_batch(columns, shape),
            group_tokens=shape.group_tokens,
            rotary_positions=rotary_positions,
            images=of_step,
        )

    def _see_until(self, images: PackedImages | None, tokens: ops.StepTokens) -> Tensor | None:
        """Of tokens after images it is their own position, which drafts make known here only."""
        if images is None or images.see_until is None:
            return None
        last_seen = to_device(images.see_until, self._model.device)
        return torch.where(last_seen == AFTER_IMAGES, tokens.positions, last_seen)

    def _rotary_positions(self, tokens: ops.StepTokens) -> Tensor | None:
        """After images. None: of no model, or of one where they are those in the sequence."""
        images = self._batch.images
        if images is None or images.rotary_offsets is None:
            return None
        return tokens.positions + images.rotary_offsets.index_select(0, tokens.rows)

    def _group_inputs(
        self, tokens: ops.StepTokens, columns: StepColumns, attn: ops.AttnBatch
    ) -> tuple[KvGroupInput, ...]:
        """Of the KV groups with pools of their own."""
        inputs = []
        for table, slots in zip(self._batch.group_req_to_token, columns.group_slots, strict=True):
            ops.place_tokens(replace(tokens, slots=slots), table, self._batch.last_ids)
            # a shared prefix may lie before the windows
            inputs.append(KvGroupInput(slots, replace(attn, req_to_token=table, shared_prefixes=None, plans={})))
        return tuple(inputs)

    def _sample(self, logits: Tensor, columns: StepColumns, masks: StepMasks | None = None) -> StepOut:
        reqs = columns.reqs
        sampled = self.sample(logits, (reqs["temperature"], reqs["seed"], reqs["seq_len"]), masks)
        self._batch.last_ids.index_copy_(0, reqs["row"].long(), sampled)
        return StepOut(logits, sampled, columns, for_head=self.for_head)

    def sample(self, logits: Tensor, rows: SampledAt, masks: StepMasks | None) -> Tensor:
        """A token of each row of logits, by temperature and masks alone."""
        if masks is not None:
            return ops.sample(self._model.gather_logits(logits), *rows, masks.for_step(len(logits)))
        return self._sample_parts(logits, *rows)

    def _sample_parts(self, logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor) -> Tensor:
        """Every rank finds the best of its tokens. The ranks exchange those, not their logits."""
        tp = self._model.tp
        if tp.size == 1:
            return ops.sample(logits, b_temperature, b_seed, b_position)
        head = self._model.pre_post_weight.lm_head
        rank_best = ops.sample_part(logits[:, : head.count], b_temperature, b_seed, b_position, head.first_id)
        return ops.best_of_parts(tp.all_gather(rank_best).view(len(logits), tp.size, 2))


def _state_batch(columns: StepColumns, shape: StepShape) -> ops.StateBatch | None:
    if columns.states is None:
        return None
    states = columns.states
    batch_of = partial(ops.StateBatch, states.start, states.read_row, states.write_row)
    if shape.num_drafts:
        return batch_of(max_tokens=shape.num_drafts + 1)
    if not shape.has_prompts:
        return batch_of(max_tokens=1)
    return batch_of(max_tokens=shape.tokens, snapshots=ops.Snapshots(states.snapshot_row, states.snapshot_len))


def _lora_rows(columns: StepColumns, shape: StepShape) -> ops.LoraRows | None:
    if columns.lora_groups is None:
        return None
    return ops.LoraRows(columns.lora_rows, columns.lora_groups, ops.lora_group_rows(shape.tokens))


@torch.inference_mode()
def _launch_masks(logits: Tensor) -> None:
    """Launch the kernels of masks, with masks that change nothing."""
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    bitmask = rows.new_full((len(logits), -(-logits.shape[1] // 32)), -1)
    ops.sample(logits, rows.float(), rows.long(), rows, ops.TokenMasks(rows, bitmask))
    ops.mask_logits(logits.float(), rows, bitmask)
