"""Checkpoints that store the experts of a layer as two tensors, read as if each expert had its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightserve.common.checkpoint.reader import CheckpointTensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def with_experts_apart(
    checkpoint: Iterable[CheckpointTensor], hidden_size: int, width: int
) -> Iterator[CheckpointTensor]:
    """Tensors ``[experts, out, in]`` or ``[experts, in, out]`` become views ``[out, in]``; gates come before ups."""
    shapes = {GATE_UP: (2 * width, hidden_size), DOWN: (hidden_size, width)}
    for tensor in checkpoint:
        end = next((end for end in shapes if tensor.name.endswith(end)), None)
        if end is None or tensor.tensor.ndim != 3:
            yield tensor
            continue
        is_transposed = tensor.tensor.shape[1:] == shapes[end][::-1] != shapes[end]
        stacked = tensor.tensor.transpose(1, 2) if is_transposed else tensor.tensor
        names = ("gate_proj", "up_proj") if end == GATE_UP else ("down_proj",)
        prefix = tensor.name.rpartition(".")[0]
        for number, expert in enumerate(stacked):
            for name, linear in zip(names, expert.chunk(len(names)), strict=True):
                yield tensor._replace(name=f"{prefix}.{number}.{name}.weight", tensor=linear)
