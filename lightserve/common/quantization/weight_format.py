"""The contract for formats of quantised checkpoints, and what gathers the tensors of a linear while they are loaded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightserve.common.checkpoint.piece import ANY_SIZE, FLOATS, Piece, whole
from lightserve.common.ops import INT4_GROUPS, QuantizedWeight, group_of_columns
from lightserve.common.quantization.linear_method import LinearPart, LinearSpec
from lightserve.errors import CheckpointError, ModelFilesError
from lightserve.model_files.quantization import Scheme

__all__ = [
    "ANY_SIZE",
    "FORMATS",
    "RawLinear",
    "RawTensor",
    "WeightFormat",
    "format_of",
    "own_group_size",
    "raw_pieces",
    "reads",
]


class RawTensor(NamedTuple):
    """A tensor of a quantised linear as the checkpoint stores it."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    other_shapes: tuple[tuple[int, ...], ...] = ()  # in which some checkpoints store it


class WeightFormat(ABC):
    """Reads linears of one scheme. The constructor takes the scheme."""

    has_input_order = False  # whether the columns of the weight are not in the order of the inputs
    # Every raw tensor has a row for each output, so that some of them can be converted without the others.
    has_row_per_output: ClassVar[bool] = False

    def group_size(self, in_size: int) -> int | None:
        """Inputs with the same scale, in what ``convert`` returns; None: all of a row."""
        return None

    @abstractmethod
    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        """The tensors of a whole linear by what follows its name: ``weight`` is the tensor ``PREFIX.weight``.

        Raises ModelFilesError if a linear of that size cannot be stored like this.
        """

    @abstractmethod
    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight ``[out, in]`` of a whole linear; of some outputs, if ``has_row_per_output``."""

    def input_order(self, raw: Mapping[str, Tensor]) -> Tensor | None:
        """Which input each column of ``convert`` multiplies, int64 ``[in]``, if ``has_input_order``."""
        return None

    @abstractmethod
    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        """Memory for what ``convert`` returns, or for a part of it. ``device`` may be ``meta``."""

    def in_final_layout(self, weight: QuantizedWeight, spec: LinearSpec) -> QuantizedWeight:
        """Memory that products of ``spec`` read, from that of ``empty``. No weight was loaded yet."""
        return weight


FORMATS: dict[type[Scheme], Callable[..., WeightFormat]] = {}
F = TypeVar("F", bound=type[WeightFormat])


def reads(scheme: type[Scheme]) -> Callable[[F], F]:
    """Register the format of a scheme."""

    def register(format_class: F) -> F:
        FORMATS[scheme] = format_class
        return format_class

    return register


def format_of(scheme: Scheme) -> WeightFormat:
    return FORMATS[type(scheme)](scheme)


def own_group_size(
    weight_format: WeightFormat, name: str, in_size: int, columns: slice, remedy: str = "use a smaller --tp"
) -> int | None:
    """The group size of the inputs ``columns`` of a rank; None: one group.

    A group that ranks cut becomes smaller ones, so that both ranks have its scale.
    """
    group = weight_format.group_size(in_size)
    if group is None:
        return None
    if in_size % group:
        raise ModelFilesError(f"{name}: {in_size} inputs are no whole groups of {group}")
    of_rank, least = group_of_columns(group, columns), min(INT4_GROUPS)
    if of_rank < min(group, least):
        raise ModelFilesError(
            f"{name}: a rank has the inputs {columns.start} to {columns.stop}, which cuts groups of {group} into "
            f"groups of {of_rank}; the least is {least}; {remedy}"
        )
    return of_rank


class RawLinear:
    """Gathers the tensors of one linear, and hands them over once all have arrived. A ``Consumer`` of the loader."""

    def __init__(
        self,
        prefix: str,
        names: Mapping[str, RawTensor],
        device: torch.device,
        store: Callable[[Mapping[str, Tensor]], None],
        fill_dummy: Callable[[torch.Generator], None],
    ) -> None:
        self.device = device
        self._prefix = prefix
        self._count = len(names)
        self._store = store
        self._fill_dummy: Callable[[torch.Generator], None] | None = fill_dummy
        self._raw: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def receive(self, name: str, tensor: Tensor) -> object:
        with self._lock:
            self._raw[name.removeprefix(f"{self._prefix}.")] = tensor
            if len(self._raw) < self._count:
                return None
            raw, self._raw = self._raw, {}
        try:
            self._store(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{self._prefix}: {error}") from error
        return raw

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Called for each tensor; the first call fills all."""
        if self._fill_dummy is not None:
            self._fill_dummy(generator)
            self._fill_dummy = None


def raw_pieces(
    linear_part: LinearPart, weight_format: WeightFormat, raw_tensors: Mapping[str, RawTensor], consumer: RawLinear
) -> Iterator[Piece]:
    """The tensors of one part of a linear. Where each has a row for each output, only this rank's rows are read."""
    cut = (lambda tensor: tensor[linear_part.rows]) if weight_format.has_row_per_output else whole
    for suffix, raw in raw_tensors.items():
        name = f"{linear_part.prefix}.{suffix}"
        yield Piece(name, raw.shape, None, cut, raw.dtypes, consumer=consumer, other_shapes=raw.other_shapes)
