"""GGUF tensors with the names, row order and float32 values that transformers gives them.

They are decoded in torch because ``gguf.quants`` is four times slower: 0.8 s against 0.2 s for SmolLM2 on two cores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

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
            yield name, _reorder(header, entry.name, _read(file, entry), config)


def gguf_metadata(header: GgufHeader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors on the meta device."""
    for entry, name in _wanted(header):
        yield name, _reorder(header, entry.name, torch.empty(entry.shape, device="meta"), config)


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
    decode = _DECODERS[name]
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


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, then 16 bytes: low nibbles are the first half, high nibbles the second."""
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, a minimum, then nibbles as in Q4_0."""
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """Eight groups of 32 with a 6-bit scale and minimum each, one scale for all of these, 128 bytes of nibbles."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, top = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat([low & 0x3F, (top & 0x0F) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([high & 0x3F, (top >> 4) | ((high >> 6) << 4)], dim=1)
    groups = out.view(-1, 8, 32)
    _nibbles(blocks[:, 16:].reshape(-1, 32), out.view(-1, 64))
    groups.mul_((scales * _half(blocks, 0)).unsqueeze(-1))
    groups.sub_((minima * _half(blocks, 2)).unsqueeze(-1))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles, 64 of upper bit pairs, a signed scale per 16 numbers, one scale for all of these."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # half, nibble pair, lane
    upper = blocks[:, 128:192].reshape(-1, 2, 32)
    lanes = out.view(-1, 2, 4, 32)  # half, quarter, lane
    for quarter in range(4):
        nibble = (low[:, :, quarter % 2] >> (4 * (quarter // 2))) & 0x0F
        lanes[:, :, quarter] = nibble | (((upper >> (2 * quarter)) & 3) << 4)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    out.view(-1, 16, 16).sub_(32).mul_(scales.unsqueeze(-1))


def _nibbles(packed: Tensor, out: Tensor) -> None:
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, as a column of float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
