"""The input of a step as one int32 array: one copy brings it to the device.

The array is made of columns, with one value per token or per request. A column is declared once, in TOKEN_COLUMNS or
REQ_COLUMNS, with its name, type and the default for padding. ``pack`` and ``columns_of`` follow the declaration. A
request column whose values the batch does not compute is read from the attribute of the same name of InferReq, so a new
column is one line here and a field there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.worker.batch.shared_prefixes import MAX_GROUPS
from lightserve.worker.batch.state_rows import StateColumns

GROUP_FIELDS = 4  # of int32: see ops.AttnBatch.shared_prefixes
ALIGNED = 4  # every column begins at a multiple of 16 bytes: Triton compiles a kernel again for one that does not
WORD_BYTES = 4
STATE_REQ_COLUMNS = len(StateColumns._fields) - 1  # all but the first tokens of requests
IMAGE_AXES = 3  # of rotary positions
IMAGE_COLUMNS = IMAGE_AXES + 2
AFTER_IMAGES = -1  # in place of a position
NO_VECTOR = -1  # in place of a row of vectors

Values = Sequence[float] | np.ndarray


class StepShape(NamedTuple):
    """The shape of a step. The kernels that it launches depend on nothing else."""

    tokens: int
    requests: int
    has_decodes: bool  # some requests compute one token
    has_prompts: bool  # some requests compute several
    has_shared: bool = False  # some of the decodes form groups that share a prefix
    lora_slots: int = 0  # slots for adapters on the device, if some requests use one; otherwise 0
    group_tokens: tuple[int, ...] = ()  # of each attention group; empty: there is one, or all have the same step
    # Of a request, at most, in a captured step with drafts; 0: another step. With ``has_decodes`` the captured step has
    # room for prompts, otherwise every token is a decode or a draft after it.
    num_drafts: int = 0
    next_drafts: int = 0  # that a head computes after such a captured step; 0: there is no head
    has_images: bool = False  # some tokens are of images or before them; a captured step then has room for them

    @property
    def lora_groups(self) -> int:
        """Groups of rows with one adapter, at most."""
        return ops.max_lora_groups(self.tokens, self.lora_slots, ops.lora_group_rows(self.tokens))


class Padding(NamedTuple):
    """Where the padding of a step goes. Nothing reads it."""

    row: int  # of req_to_token
    slot: int  # of the KV cache
    group_slots: tuple[int, ...] = ()  # of each KV group that has a pool of tokens
    has_states: bool = False  # the model has recurrent layers; padding reads and writes no row


class Column(NamedTuple):
    name: str
    dtype: str  # a name that numpy and torch share, of 4 or 8 bytes
    default: float | Callable[[StepShape, Padding], Any]  # the value of padding


def _padding_start(shape: StepShape, padding: Padding) -> Any:
    """Padding requests of a decode step have one token each; those of other steps have none."""
    return shape.tokens if shape.has_prompts else np.arange(shape.requests)


TOKEN_COLUMNS = (
    Column("row", "int32", lambda shape, padding: padding.row),  # of req_to_token
    Column("position", "int32", 0),
    Column("slot", "int32", lambda shape, padding: padding.slot),  # of the KV cache
    Column("token_id", "int32", 0),  # or ops.step.LAST_SAMPLED
)
REQ_COLUMNS = (
    Column("row", "int32", lambda shape, padding: padding.row),  # of req_to_token
    Column("start", "int32", _padding_start),  # its first token in the step
    Column("seq_len", "int32", lambda shape, padding: 0 if shape.has_prompts else 1),  # after the step
    Column("ready_len", "int32", 0),  # before the step
    Column("temperature", "float32", 0.0),  # by which the step samples; 0: greedily
    Column("seed", "int64", 0),
)


class ImageColumns(NamedTuple):
    """int32 of each token of a step."""

    positions: Any  # [IMAGE_AXES, tokens] by rotary axis; AFTER_IMAGES: see BatchImages.rotary_offsets
    vector_row: Any  # [tokens] of StepImages.vectors; NO_VECTOR: it is not of an image
    next_row: Any  # [tokens] the same of the token after each


class StepColumns(NamedTuple):
    """Views of the input of a step, on the host or the device."""

    tokens: dict[str, Any]  # column name: [tokens]
    reqs: dict[str, Any]  # column name: [requests]
    groups: Any = None  # [MAX_GROUPS, GROUP_FIELDS] int32 of shared prefixes, if the shape has them
    group_slots: tuple[Any, ...] = ()  # [tokens] int32 of each KV group that has a pool of tokens
    lora_rows: Any = None  # [tokens] int32 of ops.LoraRows, if the shape has them
    lora_groups: Any = None  # [3, groups] int32 of ops.LoraRows, if the shape has them
    states: StateColumns | None = None  # if the model has recurrent layers
    images: ImageColumns | None = None  # if the shape has them


def columns_of(inputs: np.ndarray | Tensor, shape: StepShape, has_states: bool = False) -> StepColumns:
    tokens, first = _views(inputs, 0, TOKEN_COLUMNS, shape.tokens)
    reqs, first = _views(inputs, first, REQ_COLUMNS, shape.requests)
    groups = None
    if shape.has_shared:
        begin, first = first, first + MAX_GROUPS * GROUP_FIELDS
        groups = inputs[begin:first].reshape(MAX_GROUPS, GROUP_FIELDS)
    lora_rows = lora_groups = None
    if shape.lora_slots:
        lora_rows = inputs[first : first + shape.tokens]
        first += _aligned(shape.tokens)
        lora_groups = inputs[first : first + 3 * shape.lora_groups].reshape(3, shape.lora_groups)
        first += _aligned(3 * shape.lora_groups)
    images = None
    if shape.has_images:
        begin, first = first, first + IMAGE_COLUMNS * _aligned(shape.tokens)
        of_images = inputs[begin:first].reshape(IMAGE_COLUMNS, -1)[:, : shape.tokens]
        images = ImageColumns(of_images[:IMAGE_AXES], of_images[IMAGE_AXES], of_images[IMAGE_AXES + 1])
    states = None
    if has_states:
        starts, width = _aligned(shape.requests + 1), _aligned(shape.requests)
        in_reqs = range(first + starts, first + starts + STATE_REQ_COLUMNS * width, width)
        begins = [(first, shape.requests + 1), *((begin, shape.requests) for begin in in_reqs)]
        states = StateColumns(*(inputs[begin : begin + count] for begin, count in begins))
        first += starts + STATE_REQ_COLUMNS * width
    group_slots = tuple(
        [inputs[begin : begin + shape.tokens] for begin in range(first, len(inputs), _aligned(shape.tokens))]
    )
    return StepColumns(tokens, reqs, groups, group_slots, lora_rows, lora_groups, states, images)


def padded_input(shape: StepShape, padding: Padding) -> tuple[np.ndarray, StepColumns]:
    """The input of a step that computes only padding, and its columns, where values can be written."""
    in_groups = len(padding.group_slots) * _aligned(shape.tokens)
    in_states = _aligned(shape.requests + 1) + STATE_REQ_COLUMNS * _aligned(shape.requests)
    inputs = np.zeros(_input_size(shape) + in_states * padding.has_states + in_groups, dtype=np.int32)
    columns = columns_of(inputs, shape, padding.has_states)
    for slots, slot in zip(columns.group_slots, padding.group_slots, strict=True):
        slots[:] = slot
    if columns.lora_groups is not None:
        columns.lora_groups[0] = ops.NO_LORA
    if columns.images is not None:
        columns.images.positions[:] = AFTER_IMAGES
        columns.images.vector_row[:] = columns.images.next_row[:] = NO_VECTOR
    if columns.states is not None:
        columns.states.read_row[:] = columns.states.write_row[:] = columns.states.snapshot_row[:] = ops.NO_ROW
        if not shape.has_prompts:  # padding requests have one token each; otherwise none
            columns.states.start[:] = np.arange(shape.requests + 1)
    for declared, views in ((TOKEN_COLUMNS, columns.tokens), (REQ_COLUMNS, columns.reqs)):
        for name, _, default in declared:
            if callable(default):
                views[name][:] = default(shape, padding)
            elif default:
                views[name][:] = default
    return inputs, columns


def pack(
    columns: StepColumns, tokens: Mapping[str, Values], reqs: Sequence[Any], computed: Mapping[str, Values]
) -> None:
    """Write the values of the first tokens and requests; the rest stays padding.

    ``tokens`` and ``computed`` have values by the name of a column. Other columns are attributes of ``reqs``.
    """
    for name, view in columns.tokens.items():
        view[: len(tokens[name])] = tokens[name]
    for name, view in columns.reqs.items():
        view[: len(reqs)] = computed[name] if name in computed else [getattr(req, name) for req in reqs]


def _views(
    inputs: np.ndarray | Tensor, first: int, columns: tuple[Column, ...], count: int
) -> tuple[dict[str, Any], int]:
    """The columns that begin at ``first``, and where the next ones begin."""
    types: Any = torch if isinstance(inputs, Tensor) else np
    views: dict[str, Any] = {}
    width = _aligned(count)
    for name, dtype, _ in columns:
        if dtype == "int32":
            views[name] = inputs[first : first + count]
            first += width
        else:
            words = _words(dtype)
            views[name] = inputs[first : first + words * count].view(getattr(types, dtype))
            first += words * width
    return views, first


@lru_cache
def _words(dtype: str) -> int:
    return np.dtype(dtype).itemsize // WORD_BYTES


def _input_size(shape: StepShape) -> int:
    """Integers in the input of a step, without those of KV groups."""
    tokens = sum(_words(column.dtype) for column in TOKEN_COLUMNS) * _aligned(shape.tokens)
    reqs = sum(_words(column.dtype) for column in REQ_COLUMNS) * _aligned(shape.requests)
    groups = MAX_GROUPS * GROUP_FIELDS if shape.has_shared else 0
    lora = _aligned(shape.tokens) + _aligned(3 * shape.lora_groups) if shape.lora_slots else 0
    images = IMAGE_COLUMNS * _aligned(shape.tokens) if shape.has_images else 0
    return tokens + reqs + groups + lora + images


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
