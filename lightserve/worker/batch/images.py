"""The images of a worker's requests: where their tokens stand, and which rows of the arena have their embeddings.

The rotary positions of such a prompt have three axes. A token of an image has the row and the column in which it is
there; text has one position on all axes, which goes on after the largest one before it. So the positions after the last
image differ from those in the sequence by one number for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common.basemodel import StepImages, TpPartBaseModel
from lightserve.common.device import host_memory, to_device
from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array, int32s
from lightserve.messages.media import ImageRows, Sight
from lightserve.model_files.config.images import sight_of
from lightserve.worker.batch.arena import Arena
from lightserve.worker.batch.step_input import AFTER_IMAGES, IMAGE_AXES, NO_VECTOR, ImageColumns

NOT_ENCODED = -1  # in place of a row of the arena


class PackedImages(NamedTuple):
    """The tokens of images in a step, on the host."""

    arena_rows: Int32Array  # of the tokens of images, one request after the other; with a draft head, also one behind
    vector_row: Int32Array  # [tokens of the step] of ``arena_rows``; NO_VECTOR: it is not of an image
    next_row: Int32Array  # the same of the token after each
    positions: Int64Array  # [IMAGE_AXES, tokens of the step]; AFTER_IMAGES: see BatchImages.rotary_offsets
    see_until: Int32Array | None = None  # [tokens of the step] as in ops.AttnBatch, or AFTER_IMAGES; None: as causal

    def write(self, columns: ImageColumns) -> None:
        """The step may have more tokens: padding."""
        count = len(self.vector_row)
        columns.positions[:, :count] = self.positions
        columns.vector_row[:count], columns.next_row[:count] = self.vector_row, self.next_row


@dataclass(frozen=True, slots=True)
class ReqImages:
    tokens: Int64Array  # places in the prompt, in order
    arena_rows: Int32Array  # of each; NOT_ENCODED: its KV was cached
    positions: Int64Array  # [3, tokens up to the end of the last image]
    last_seen: Int64Array | None = None  # [the same] by each, if tokens see later ones

    @property
    def end(self) -> int:
        """After the last image."""
        length: int = self.positions.shape[1]
        return length

    @property
    def offset(self) -> int:
        """Of the rotary positions after the last image."""
        largest: int = self.positions.max().item()
        return largest + 1 - self.end


def positions_of(images: Sequence[ImageRows]) -> Int64Array:
    """By axis, of all tokens up to the end of the last image."""
    parts: list[Int64Array] = []
    length = position = first = 0
    for image in images:
        for number, (start, count) in enumerate(image.spans):
            if not image.rows:
                start += count  # its tokens have positions as text has
            text = np.arange(start - length) + position
            parts.append(np.stack((text, text, text)))
            length, position = start, position + len(text)
            if image.rows:
                if number == 0 or not image.times:
                    first = position
                time = image.times[number] if image.times else 0
                rows, columns = np.divmod(np.arange(count), image.columns)
                parts.append(np.stack((np.full_like(rows, time), rows, columns)) + first)
                length, position = start + count, first + max(time + 1, image.rows, image.columns)
    return np.concatenate(parts, axis=1)


def last_seen(images: Sequence[ImageRows]) -> Int64Array:
    """By all tokens up to the end of the last image, if those of a span see each other."""
    last = np.arange(max(image.end for image in images))
    for image in images:
        for start, count in image.spans:
            last[start : start + count] = start + count - 1
    return last


def whole_prompt(images: Sequence[ImageRows], prompt_len: int) -> ReqImages:
    """Of a request whose prompt sees itself. It may have no images."""
    behind = ImageRows(((prompt_len, 0),), 0, 0, NO_INT32)
    req = req_images([*images, behind])
    return replace(req, last_seen=np.full(prompt_len, prompt_len - 1))


def req_images(images: Sequence[ImageRows]) -> ReqImages:
    places = [np.arange(start, start + count) for image in images for start, count in image.spans]
    counts = [sum(count for _, count in image.spans) for image in images]
    arena_rows = [
        int32s(image.arena_rows) if len(image.arena_rows) else np.full(count, NOT_ENCODED, dtype=np.int32)
        for image, count in zip(images, counts, strict=True)
    ]
    return ReqImages(np.concatenate(places), np.concatenate(arena_rows), positions_of(images))


class BatchImages:
    def __init__(
        self, arena: Arena, max_reqs: int, device: torch.device, has_axes: bool, sight: Sight = Sight.NONE
    ) -> None:
        """``arena``: what the encoder computed of all images."""
        self._arena = arena
        self._device = device
        self._max_reqs = max_reqs
        self.sight = sight
        self._has_head = False  # a draft head reads the embedding after each token
        self._reqs: dict[int, ReqImages] = {}  # by row of the batch
        self._unfinished: set[int] = set()  # of these, rows whose images may not all be computed
        # by row, on the device: what to add to positions after the images; None: the model has one axis
        self.rotary_offsets = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device) if has_axes else None
        self._reads_vectors = True  # False: those are of other pipeline stages
        self._captured_vectors = torch.empty(0, dtype=arena.dtype)  # that captured steps read, on the device

    @classmethod
    def of_model(cls, model: TpPartBaseModel, arena: Arena, has_head: bool = False) -> BatchImages:
        """``has_head``: a draft head reads the embedding after each token."""
        has_axes, max_reqs = model.rotary_axes is not None, model.req_manager.max_reqs
        images = cls(arena, max_reqs, model.device, has_axes, sight_of(model.config.hf))
        images._has_head = has_head
        num_added, *_ = arena.row_shape  # the embedding, and what the first layers add
        images._reads_vectors = model.pp.is_first or has_head or model.layers_infer[0].layer_num + 1 < num_added
        return images

    def enter(self, row: int, images: Sequence[ImageRows], prompt_len: int) -> None:
        """A request begins to use a row of the batch."""
        before, req = self._reqs.pop(row, None), self._new_req(images, prompt_len)
        self._unfinished.discard(row)
        if req is not None:
            self._reqs[row] = req
            self._unfinished.add(row)
        if self.rotary_offsets is not None and (before is not None or req is not None):
            # copied from pinned memory: a number would wait for the step in flight
            self.rotary_offsets[row : row + 1] = to_device(int32s([self._offset_of(row)]), self._device)

    def _new_req(self, images: Sequence[ImageRows], prompt_len: int) -> ReqImages | None:
        """None: it has no images, and its tokens see no later ones."""
        if self.sight is Sight.PROMPT:
            return whole_prompt(images, prompt_len)
        if not images:
            return None
        req = req_images(images)
        return replace(req, last_seen=last_seen(images)) if self.sight is Sight.IMAGE else req

    def _offset_of(self, row: int) -> int:
        images = self._reqs.get(row)
        return 0 if images is None else images.offset

    def pack(self, rows: Int64Array, q_len: Int64Array, ready: Int64Array) -> PackedImages | None:
        """What a step computes of images; None: all its tokens come after the images of their requests."""
        if not self._unfinished:  # as in most steps
            return None
        starts = np.cumsum(q_len) - q_len
        unfinished = [index for index, row in enumerate(rows.tolist()) if self._is_unfinished(row, ready[index])]
        if not unfinished:
            return None
        num_tokens = int(q_len.sum())
        by_axis = np.full((IMAGE_AXES, num_tokens), AFTER_IMAGES, dtype=np.int64)
        see_until = None if self.sight is Sight.NONE else np.full(num_tokens, AFTER_IMAGES, dtype=np.int32)
        vector_row = np.full(num_tokens, NO_VECTOR, dtype=np.int32)
        next_row, arena_rows = vector_row.copy(), NO_INT32
        for index in unfinished:
            images, begin, first = self._reqs[int(rows[index])], int(ready[index]), int(starts[index])
            end = min(begin + int(q_len[index]), images.end)
            by_axis[:, first : first + end - begin] = images.positions[:, begin:end]
            if see_until is not None and images.last_seen is not None:
                see_until[first : first + end - begin] = images.last_seen[begin:end]
            read = slice(*np.searchsorted(images.tokens, (begin, end + self._has_head)))
            tokens = images.tokens[read] - begin
            numbers = np.arange(len(tokens)) + len(arena_rows)
            is_in_step, follows = tokens < end - begin, tokens > 0
            vector_row[first + tokens[is_in_step]] = numbers[is_in_step]
            next_row[first + tokens[follows] - 1] = numbers[follows]
            arena_rows = np.concatenate((arena_rows, images.arena_rows[read]))
        return PackedImages(_encoded(arena_rows), vector_row, next_row, by_axis, see_until)

    def _is_unfinished(self, row: int, ready_len: int) -> bool:
        if row in self._unfinished and ready_len >= self._reqs[row].end:
            self._unfinished.remove(row)
        return row in self._unfinished

    def make_room(self, max_tokens: int) -> None:
        """Steps of at most so many tokens will be captured."""
        room = max_tokens + self._max_reqs * self._has_head
        shape = (room, *self._arena.row_shape)
        self._captured_vectors = torch.zeros(shape, dtype=self._arena.dtype, device=self._device)

    def load(self, packed: PackedImages) -> None:
        """Copy the embeddings of the next step to where a captured one reads them."""
        vectors = self._vectors(packed)
        self._captured_vectors[: len(vectors)].copy_(vectors, non_blocking=True)

    def of_step(
        self, columns: ImageColumns, packed: PackedImages | None, rotary_positions: Tensor | None
    ) -> StepImages:
        """``packed``: None in a captured step, which reads what ``load`` copies.

        ``rotary_positions``: those after images, of all tokens of the step. Drafts make them known here only.
        """
        positions = columns.positions
        if rotary_positions is not None:
            positions = torch.where(positions == AFTER_IMAGES, rotary_positions, positions)
        if packed is None:
            vectors = self._captured_vectors
        else:
            vectors = self._vectors(packed).to(self._device, non_blocking=True)
        return StepImages(columns.vector_row, vectors, positions, columns.next_row)

    def _vectors(self, packed: PackedImages) -> Tensor:
        """In host memory. At least one, which may mean nothing: a step may compute only text before images."""
        arena_rows = packed.arena_rows if self._reads_vectors else NO_INT32
        vectors = host_memory((max(len(arena_rows), 1), *self._arena.row_shape), self._arena.dtype, self._device)
        if len(arena_rows):
            self._arena.read(arena_rows, vectors)
        else:
            vectors.zero_()
        return vectors


def _encoded(arena_rows: Int32Array) -> Int32Array:
    if (arena_rows == NOT_ENCODED).any():
        raise ValueError("a step computes tokens of an image whose embeddings were not announced")
    return arena_rows
