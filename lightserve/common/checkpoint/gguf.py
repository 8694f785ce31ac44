"""GGUF tensors with the names, row order and float32 values that transformers gives them. Linears may stay packed.

They are decoded in torch because ``gguf.quants`` is four times slower: 0.8 s against 0.2 s for SmolLM2 on two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightserve.common.checkpoint.gguf_blocks import CHUNK, decode, one_thread
from lightserve.common.checkpoint.gguf_recurrent import FORMS, TILED, of_key_heads
from lightserve.errors import CheckpointError
from lightserve.model_files.gguf.architectures import GgufArchitecture, Join, JoinedTensor, RowOrder, architecture_of
from lightserve.model_files.gguf.header import GgufHeader, TensorEntry
from lightserve.model_files.gguf.names import GgufTensor, model_tensors
from lightserve.model_files.gguf.packing import stays_packed

Named = tuple[str, Tensor]
# the shape of the packed bytes, or None to expand the tensor
ReadTensor = Callable[[GgufTensor, tuple[int, ...] | None], Tensor]


def gguf_tensors(header: GgufHeader, config: dict[str, Any], is_packed: bool = False) -> Iterator[Named]:
    """``is_packed``: linears are views of the file, uint8 ``[rows, bytes of a row]``."""

    @cache
    def mapped(path: Path) -> Tensor:
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def read(tensor: GgufTensor, packed_shape: tuple[int, ...] | None) -> Tensor:
        entry = tensor.entry
        if packed_shape is None:
            return _read(entry)
        return mapped(entry.path)[entry.offset : entry.offset + entry.n_bytes].view(packed_shape)

    yield from _renamed(header, config, is_packed, read)


def gguf_metadata(header: GgufHeader, config: dict[str, Any], is_packed: bool = False) -> Iterator[Named]:
    """The same tensors on the meta device."""

    def read(tensor: GgufTensor, packed_shape: tuple[int, ...] | None) -> Tensor:
        dtype = torch.float32 if packed_shape is None else torch.uint8
        return torch.empty(packed_shape or tensor.entry.shape, dtype=dtype, device="meta")

    yield from _renamed(header, config, is_packed, read)


def gguf_bytes(header: GgufHeader, is_packed: bool = False) -> int:
    """Of what `gguf_tensors` yields."""
    architecture = architecture_of(header)
    tensors = model_tensors(header, architecture)
    packed = [is_packed and stays_packed(header, architecture, tensor) for tensor in tensors]
    sizes = zip(tensors, packed, strict=True)
    return sum(tensor.entry.n_bytes if keeps else 4 * math.prod(tensor.entry.shape) for tensor, keeps in sizes)


def _renamed(header: GgufHeader, config: dict[str, Any], is_packed: bool, read: ReadTensor) -> Iterator[Named]:
    """The tensors in file order, as in transformers. A joined tensor comes when its last part was read."""
    architecture = architecture_of(header)
    waiting: dict[str, dict[str, Tensor]] = {}
    for named in model_tensors(header, architecture):
        shape = _packed_shape(named.entry) if is_packed and stays_packed(header, architecture, named) else None
        tensor = read(named, shape)
        if shape is None or architecture.row_orders.get(named.base_name) is not RowOrder.TILED_VALUE_COLUMNS:
            tensor = _undo_converter(header, architecture, named, tensor, config)  # the format reorders packed columns
        joined = named.joined
        if joined is None:
            yield from _with_names(named.targets, tensor)
            continue
        parts = waiting.setdefault(f"{named.prefix}{joined.name}", {})
        parts[named.key] = tensor
        if len(parts) == len(joined.parts):
            del waiting[f"{named.prefix}{joined.name}"]
            yield f"{named.prefix}{joined.name}", _join(joined, parts, config)
    if waiting:
        lacking = next(iter(waiting))
        raise CheckpointError(f"{header.path}: tensors are missing for {lacking}; convert the model again")


def _packed_shape(entry: TensorEntry) -> tuple[int, ...]:
    *rows, columns = entry.shape
    return *rows, columns // entry.encoding.block * entry.encoding.n_bytes


def _with_names(targets: Sequence[str], tensor: Tensor) -> Iterator[Named]:
    pieces = tensor.chunk(len(targets), dim=max(tensor.dim() - 2, 0)) if len(targets) > 1 else [tensor]
    for name, piece in zip(targets, pieces, strict=True):
        if "*" in name:
            yield from ((name.replace("*", str(number)), expert) for number, expert in enumerate(piece))
        elif name.endswith("shared_expert_gate.weight"):
            yield name, piece.view(1, -1)  # llama.cpp drops dimensions of 1
        else:
            yield name, piece


def _undo_converter(
    header: GgufHeader, architecture: GgufArchitecture, named: GgufTensor, tensor: Tensor, config: dict[str, Any]
) -> Tensor:
    if architecture.has_norms_plus_one and named.key.endswith("_norm.weight") and named.base_name != "ssm_norm":
        return tensor - 1
    form, order = architecture.forms.get(named.key), architecture.row_orders.get(named.base_name)
    if form is not None:
        tensor = FORMS[form](tensor)
    if order in TILED:
        return TILED[order](tensor, config)
    heads, kv_heads = (_of_layer(config, key, named.layer) for key in ("num_attention_heads", "num_key_value_heads"))
    match order:
        case RowOrder.ROTARY_PAIRS:
            count = heads if named.base_name == "attn_q" else kv_heads
            _check_rows(header, named.entry.name, tensor, 2 * count)
            return _halves(tensor, count)
        case RowOrder.QKV_BLOCKS:
            _check_rows(header, named.entry.name, tensor, heads + 2 * kv_heads)
            return _by_kv_head(tensor, heads, kv_heads)
        case RowOrder.TRANSPOSED if named.kind == "weight":
            return tensor.transpose(-1, -2)
    return tensor


def _join(joined: JoinedTensor, parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    tensors = [parts[key] for key in joined.parts]
    if joined.how is Join.KEY_HEADS:
        qkv, z = tensors
        return of_key_heads(qkv, z, config)
    return JOINS[joined.how](*tensors)


def _of_layer(config: dict[str, Any], key: str, layer: int) -> int:
    """A pruned model has a number for each layer."""
    value: Any = config.get(key) or config["num_attention_heads"]
    return int(value[layer] if isinstance(value, list) else value)


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


def _by_kv_head(tensor: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    """Reorder rows from (all q, all k, all v) to (its q, k, v) of each KV head."""
    dim = tensor.shape[0] // (n_heads + 2 * n_kv_heads)
    blocks = tensor.split_with_sizes([n_heads * dim, n_kv_heads * dim, n_kv_heads * dim])
    return torch.cat([block.reshape(n_kv_heads, -1, *tensor.shape[1:]) for block in blocks], dim=1).flatten(0, 1)


def _latent(k: Tensor, v: Tensor) -> Tensor:
    """From [heads, rank, key size] and [heads, value size, rank] to [heads * (key size + value size), rank]."""
    return torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """From [experts, rows, ...] each to [experts, ..., 2 * rows] with rows of both in turn."""
    rows = torch.stack([gate, up], dim=2).flatten(1, 2)
    return rows.transpose(1, -1)


JOINS: dict[Join, Callable[..., Tensor]] = {
    Join.ROWS: lambda *parts: torch.cat(parts),
    Join.EXPERT_ROWS: lambda *parts: torch.cat(parts, dim=1),
    Join.LATENT: _latent,
    Join.ALTERNATING: _alternating,
}


def _read(entry: TensorEntry) -> Tensor:
    """Read and decode one tensor in chunks, so that memory holds it only once."""
    name, block, block_bytes = entry.encoding
    n_blocks = math.prod(entry.shape) // block
    out = torch.empty(n_blocks, block, dtype=torch.float32)
    with entry.path.open("rb") as file, one_thread():
        file.seek(entry.offset)
        for begin in range(0, n_blocks, CHUNK // block):
            rows = out[begin : begin + CHUNK // block]
            raw = bytearray(len(rows) * block_bytes)
            if file.readinto(raw) != len(raw):
                raise CheckpointError(f"{entry.path}: tensor {entry.name} is truncated; fetch the file again")
            decode(name, torch.frombuffer(raw, dtype=torch.uint8).view(len(rows), block_bytes), rows)
    return out.view(entry.shape)
