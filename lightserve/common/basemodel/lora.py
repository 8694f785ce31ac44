"""LoRA adapters on the device: a slot for each, with its matrices for every linear that takes adapters.

All matrices of a slot lie in one block of memory, so that one copy brings an adapter to the device. The model's linears
find theirs there. Which rows of a step use which slot is in ``LoraPool.rows`` while the step is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import safetensors
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.quantization import LinearSpec
from lightserve.errors import AdapterError
from lightserve.model_files.lora.adapter import Adapter, LinearSize, LoraModule

ALIGNED = 64  # numbers: every matrix begins at a multiple of 128 bytes


@dataclass(frozen=True, slots=True)
class LoraArgs:
    """What a model needs to take adapters."""

    slots: int  # adapters on the device
    rank: int  # of the slots; adapters may have less
    checked: tuple[Adapter, ...] = ()  # they must fit the model, which is checked before the weights are loaded


class LinearLora:
    """The adapters of one linear."""

    def __init__(self, pool: LoraPool, spec: LinearSpec, begin: int) -> None:
        self.spec = spec
        self.row_factors: Tensor | None = None  # by which the rows of the linear itself were multiplied
        self._pool = pool
        rank = pool.rank
        self._a_shape = (len(spec.parts) * rank, spec.num_columns)
        self._b_shape = (spec.out_size, rank)
        self._a_begin = begin
        self._b_begin = _aligned(begin + self._a_shape[0] * self._a_shape[1])
        self.end = _aligned(self._b_begin + self._b_shape[0] * self._b_shape[1])
        self.weights: ops.LoraWeights | None = None  # None: the pool is not allocated

    @property
    def active(self) -> tuple[ops.LoraWeights, ops.LoraRows] | None:
        """The adapters of the step that is computed, and the rows that use them; None: no row does."""
        if self._pool.rows is None or self.weights is None:
            return None
        return self.weights, self._pool.rows

    def set_row_factors(self, factors: Tensor) -> None:
        """Adapters that were filled before have the factors of the weights before."""
        if self.row_factors is None:
            self.row_factors = factors
        else:
            self.row_factors.copy_(factors)

    def allocate(self, slots: Tensor) -> None:
        ends = [weight_rows.stop for _, weight_rows in self.spec.parts_with_rows()]
        self.weights = ops.LoraWeights(*self.matrices(slots), tuple(ends))

    def matrices(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """A ``[..., parts * rank, columns]`` and B ``[..., rows, rank]``, views of ``blocks`` ``[..., block size]``."""
        a_end, b_end = (
            begin + shape[0] * shape[1]
            for begin, shape in ((self._a_begin, self._a_shape), (self._b_begin, self._b_shape))
        )
        return (
            blocks[..., self._a_begin : a_end].unflatten(-1, self._a_shape),  # type: ignore[no-untyped-call]
            blocks[..., self._b_begin : b_end].unflatten(-1, self._b_shape),  # type: ignore[no-untyped-call]
        )

    def fill(self, block: Tensor, part_index: int, module: LoraModule, a: Tensor, b: Tensor) -> None:
        """Write the adapter of one part into ``block``, whose other numbers are 0."""
        all_a, all_b = self.matrices(block)
        linear_part, weight_rows = list(self.spec.parts_with_rows())[part_index]
        first = part_index * self._pool.rank
        all_a[first : first + module.rank] = a[:, self.spec.columns]
        rows = b[linear_part.rows].float() * module.scale
        if self.row_factors is not None:
            rows *= self.row_factors[weight_rows].cpu()[:, None]
        all_b[weight_rows, : module.rank] = rows


class LoraPool:
    def __init__(self, args: LoraArgs, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = args.slots
        self.rank = args.rank
        self.dtype = dtype
        self.device = device
        self.rows: ops.LoraRows | None = None  # of the step that is computed; None: it uses no adapter
        self._linears: list[LinearLora] = []
        self._blocks: Tensor | None = None

    def linear(self, spec: LinearSpec) -> LinearLora:
        """Reserve room for the adapters of a linear. Before ``allocate``."""
        made = LinearLora(self, spec, self.block_size)
        self._linears.append(made)
        return made

    @property
    def block_size(self) -> int:
        """Numbers of a slot."""
        return self._linears[-1].end if self._linears else 0

    def allocate(self) -> None:
        self._blocks = torch.zeros(self.slots, self.block_size, dtype=self.dtype, device=self.device)
        for linear in self._linears:
            linear.allocate(self._blocks)

    def sizes(self) -> dict[str, LinearSize]:
        """The linears that take adapters, by their names in the checkpoint."""
        parts = ((linear.spec, linear_part) for linear in self._linears for linear_part in linear.spec.parts)
        return {linear_part.prefix: LinearSize(linear_part.out_size, spec.in_size) for spec, linear_part in parts}

    def fill(self, block: Tensor, adapter: Adapter) -> None:
        """Write this rank's part of an adapter into ``block`` ``[block_size]`` on the host."""
        block.zero_()
        by_name: dict[str, list[tuple[LinearLora, int]]] = {}
        for linear in self._linears:
            for number, linear_part in enumerate(linear.spec.parts):
                by_name.setdefault(linear_part.prefix, []).append((linear, number))
        for name, module, a, b in read_matrices(adapter):
            for linear, number in by_name.get(name, ()):  # none: another pipeline stage has it
                linear.fill(block, number, module, a, b)

    def put(self, slot: int, block: Tensor) -> None:
        """Copy an adapter into its slot. On a GPU the copy waits for the steps before, and later steps for it."""
        assert self._blocks is not None
        self._blocks[slot].copy_(block, non_blocking=True)


@contextmanager
def uses_adapters(pool: LoraPool | None, rows: ops.LoraRows | None) -> Iterator[None]:
    """Let the linears add what the adapters of a step contribute."""
    if pool is None:
        yield
        return
    pool.rows = rows
    try:
        yield
    finally:
        pool.rows = None


def read_matrices(adapter: Adapter) -> list[tuple[str, LoraModule, Tensor, Tensor]]:
    """Each module with its A and B, as views of the file where possible."""
    try:
        with safetensors.safe_open(adapter.file, framework="pt") as tensors:
            return [
                (name, module, tensors.get_tensor(module.a), tensors.get_tensor(module.b))
                for name, module in adapter.modules.items()
            ]
    except (safetensors.SafetensorError, OSError) as error:
        raise AdapterError(f"{adapter.file}: not readable ({error}); copy the adapter again") from error


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
