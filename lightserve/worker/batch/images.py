"""The images of a worker's requests: where their tokens stand, and which rows of the arena have their embeddings.

The rotary positions of such a prompt have three axes. A token of an image has the row and the column in which it is
there; text has one position on all axes, which goes on after the largest one before it. So the positions after the last
image differ from those in the sequence by one number for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common.basemodel import StepImages, TpPartBaseModel
from lightserve.common.device import host_memory, to_device
from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array, int32s
from lightserve.messages.media import ImageRows, Sight
from lightserve.model_files.config.images import sight_of, vectors_per_token

NOT_ENCODED = -1  # in place of a row of the arena
AFTER_IMAGES = -1  # in place of a position


class PackedImages(NamedTuple):
    """The tokens of images in a step, on the host."""

    tokens: Int64Array  # their places in the step
    arena_rows: Int32Array  # the same
    positions: Int64Array  # [3, tokens of the step]; AFTER_IMAGES: see BatchImages.rotary_offsets
    see_until: Int32Array | None = None  # [tokens of the step] as in ops.AttnBatch, or AFTER_IMAGES; None: as causal


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
        self, arena: Tensor, max_reqs: int, device: torch.device, has_axes: bool, sight: Sight = Sight.NONE
    ) -> None:
        """``arena``: what the encoder computed of all images, ``[rows, vectors, hidden]``, in shared memory."""
        self._arena = arena
        self._device = device
        self.sight = sight
        self._reqs: dict[int, ReqImages] = {}  # by row of the batch
        self._unfinished: set[int] = set()  # of these, rows whose images may not all be computed
        # by row, on the device: what to add to positions after the images; None: the model has one axis
        self.rotary_offsets = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device) if has_axes else None

    @classmethod
    def of_model(cls, model: TpPartBaseModel, arena: mmap) -> BatchImages:
        config = model.config
        rows = torch.frombuffer(arena, dtype=model.args.dtype)
        hidden, vectors = config.hidden_size, vectors_per_token(config.hf)
        count = len(rows) // (vectors * hidden)
        embeddings = rows[: count * vectors * hidden].view(count, vectors, hidden)
        has_axes = model.rotary_axes is not None
        return cls(embeddings, model.req_manager.max_reqs, model.device, has_axes, sight_of(config.hf))

    def enter(self, row: int, images: Sequence[ImageRows], prompt_len: int) -> None:
        """A request begins to use a row of the batch."""
        before, req = self._reqs.pop(row, None), self._new_req(images, prompt_len)
        self._unfinished.discard(row)
        if req is not None:
            self._reqs[row] = req
            self._unfinished.add(row)
        if self.rotary_offsets is not None and (before is not None or req is not None):
            self.rotary_offsets[row] = self._offset_of(row)

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

    def pack(self, rows: Int64Array, q_len: Int64Array, ready: Int64Array, num_tokens: int) -> PackedImages | None:
        """What a step computes of images; None: all its tokens come after the images of their requests.

        ``num_tokens``: with padding.
        """
        if not self._unfinished:  # as in most steps
            return None
        starts = np.cumsum(q_len) - q_len
        unfinished = [index for index, row in enumerate(rows.tolist()) if self._is_unfinished(row, ready[index])]
        if not unfinished:
            return None
        by_axis = np.full((3, num_tokens), AFTER_IMAGES, dtype=np.int64)
        see_until = None if self.sight is Sight.NONE else np.full(num_tokens, AFTER_IMAGES, dtype=np.int32)
        tokens, arena_rows = [], []
        for index in unfinished:
            images, begin, first = self._reqs[int(rows[index])], int(ready[index]), int(starts[index])
            end = min(begin + int(q_len[index]), images.end)
            by_axis[:, first : first + end - begin] = images.positions[:, begin:end]
            if see_until is not None and images.last_seen is not None:
                see_until[first : first + end - begin] = images.last_seen[begin:end]
            inside = slice(*np.searchsorted(images.tokens, (begin, end)))
            tokens.append(images.tokens[inside] - begin + first)
            arena_rows.append(images.arena_rows[inside])
        return PackedImages(np.concatenate(tokens), _encoded(np.concatenate(arena_rows)), by_axis, see_until)

    def _is_unfinished(self, row: int, ready_len: int) -> bool:
        if row in self._unfinished and ready_len >= self._reqs[row].end:
            self._unfinished.remove(row)
        return row in self._unfinished

    def of_step(self, packed: PackedImages, rotary_positions: Tensor | None) -> StepImages:
        """``rotary_positions``: those after images, of all tokens of the step. Drafts make them known here only."""
        embeddings = host_memory((len(packed.arena_rows), *self._arena.shape[1:]), self._arena.dtype, self._device)
        torch.index_select(self._arena, 0, torch.from_numpy(packed.arena_rows.astype(np.int64)), out=embeddings)
        positions = to_device(packed.positions, self._device)
        if rotary_positions is not None:
            positions = torch.where(positions == AFTER_IMAGES, rotary_positions.long(), positions)
        vectors = embeddings.to(self._device, non_blocking=True)
        return StepImages(to_device(packed.tokens, self._device), vectors, positions)


def _encoded(arena_rows: Int32Array) -> Int32Array:
    if (arena_rows == NOT_ENCODED).any():
        raise ValueError("a step computes tokens of an image whose embeddings were not announced")
    return arena_rows
