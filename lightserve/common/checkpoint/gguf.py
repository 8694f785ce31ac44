"""GGUF tensors with the names, row order and float32 values that transformers gives them.

They are decoded in torch because ``gguf.quants`` is four times slower: 0.8 s against 0.2 s for SmolLM2 on two cores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightserve.common.checkpoint.gguf_decoders import DECODERS
from lightserve.errors import CheckpointError
from lightserve.model_files.gguf_architectures import GgufArchitecture, RowOrder, architecture_of
from lightserve.model_files.gguf_header import GgufHeader, TensorEntry

# Numbers decoded at a time. From 32768 numbers on torch splits work over threads, and on shared cores these threads
# wait for each other: SmolLM2 on two busy cores took 1.6 s with this value and 22 s with 1 << 19.
CHUNK = (1 << 15) - 256

_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_OTHER_TENSOR = re.compile(r"(?P<part>\w+)\.(?P<kind>weight|bias)")


def gguf_tensors(header: GgufHeader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    with header.path.open("rb") as file:
        for entry, name in _wanted(header):
            yield from _each_expert(name, _as_in_transformers(header, entry.name, _read(file, entry), config))


def gguf_metadata(header: GgufHeader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors on the meta device."""
    for entry, name in _wanted(header):
        tensor = torch.empty(entry.shape, device="meta")
        yield from _each_expert(name, _as_in_transformers(header, entry.name, tensor, config))


def gguf_bytes(header: GgufHeader) -> int:
    return sum(4 * math.prod(entry.shape) for entry, _ in _wanted(header))


def _wanted(header: GgufHeader) -> list[tuple[TensorEntry, str]]:
    """The tensors of the model in file order, with their names in transformers."""
    architecture = architecture_of(header)
    entries = sorted(header.tensors.values(), key=lambda entry: entry.offset)
    return [
        (entry, _name(header, architecture, entry.name)) for entry in entries if not _is_skipped(architecture, entry)
    ]


def _is_skipped(architecture: GgufArchitecture, entry: TensorEntry) -> bool:
    """Rotary factors are in the config."""
    return "rope_freqs" in entry.name or entry.name.partition(".")[0] in architecture.copies


def _name(header: GgufHeader, architecture: GgufArchitecture, name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name) or _OTHER_TENSOR.fullmatch(name)
    part = architecture.tensors.get(match["part"]) if match else None
    if match is None or part is None:
        model_type = architecture.model_type
        raise CheckpointError(f"{header.path}: tensor {name} belongs to no {model_type} model; convert it again")
    layer = match.groupdict().get("layer")
    prefix = "" if layer is None else f"{architecture.layers}.{layer}."
    return f"{prefix}{part}.{match['kind']}"


def _as_in_transformers(header: GgufHeader, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Undo what GGUF converters change."""
    if architecture_of(header).has_norms_plus_one and name.endswith("_norm.weight"):
        return tensor - 1
    return _reorder(header, name, tensor, config)


def _each_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the experts, which llama.cpp stores as one; any other tensor as it is."""
    if "*" in name:
        yield from ((name.replace("*", str(number)), expert) for number, expert in enumerate(tensor))
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor.view(1, -1)  # llama.cpp drops dimensions of 1
    else:
        yield name, tensor


def _reorder(header: GgufHeader, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Undo the row permutations of GGUF converters."""
    match = _LAYER_TENSOR.fullmatch(name)
    part = match["part"] if match else ""
    match architecture_of(header).row_orders.get(part):
        case RowOrder.ROTARY_PAIRS:
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            _check_rows(header, name, tensor, 2 * heads)
            return _halves(tensor, heads)
        case RowOrder.QKV_BLOCKS:
            _check_rows(header, name, tensor, 3 * config["num_attention_heads"])
            return _by_head(tensor, config["num_attention_heads"])
    return tensor


def _check_rows(header: GgufHeader, name: str, tensor: Tensor, divisor: int) -> None:
    rows = tensor.shape[0]
    if rows % divisor:
        raise CheckpointError(
            f"{header.path}: tensor {name} has {rows} rows, no multiple of {divisor}; convert it again"
        )


def _halves(tensor: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved rotary pairs (0, d/2, 1, d/2 + 1, ...) to two halves."""
    pairs = tensor.reshape(n_heads, tensor.shape[0] // n_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _by_head(tensor: Tensor, n_heads: int) -> Tensor:
    """Reorder rows from (all q, all k, all v) to (q, k, v) of each head."""
    thirds = tensor.reshape(3, n_heads, tensor.shape[0] // n_heads // 3, *tensor.shape[1:])
    return thirds.transpose(0, 1).reshape(tensor.shape)


def _read(file: BinaryIO, entry: TensorEntry) -> Tensor:
    """Read and decode one tensor in chunks, so that memory holds it only once."""
    name, block, block_bytes = entry.encoding
    decode = DECODERS[name]
    n_blocks = math.prod(entry.shape) // block
    out = torch.empty(n_blocks, block, dtype=torch.float32)
    file.seek(entry.offset)
    for rows in out.split_with_sizes(_chunk_sizes(n_blocks, CHUNK // block)):
        raw = bytearray(len(rows) * block_bytes)
        if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name}: tensor {entry.name} is truncated; fetch the file again")
        decode(torch.frombuffer(raw, dtype=torch.uint8).view(len(rows), block_bytes), rows)
    return out.view(entry.shape)


def _chunk_sizes(total: int, chunk: int) -> list[int]:
    whole, rest = divmod(total, chunk)
    return [chunk] * whole + ([rest] if rest else [])
