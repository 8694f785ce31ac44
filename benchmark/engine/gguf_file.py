"""Writes a GGUF file of another type or shape than the default model's, to measure packed weights beside llama.cpp.

    python -m benchmark.engine.gguf_file q8.gguf --type Q8_0
    python -m benchmark.engine.gguf_file q4k.gguf --type Q4_K --shape 300m

The first has the default model's weights, rounded again. A shape has random weights, since blocks of Q4_K need rows of
256 numbers, and the default model's tokenizer. llama.cpp and LightServe read either.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from lightserve.model_files.source import resolve

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK, SUB_BLOCK = 256, 32  # numbers of Q4_K
SPREAD = 0.02  # of random weights


class Shape(NamedTuple):
    """Of a Llama with heads of 64."""

    layers: int
    hidden: int
    wide: int
    heads: int
    kv_heads: int


SHAPES = {"tiny": Shape(2, 256, 512, 4, 2), "300m": Shape(24, 1024, 2816, 16, 4), "1b": Shape(16, 2048, 8192, 32, 8)}
HEAD_DIM = 64


def quantize_q4_k(x: Floats) -> Bytes:
    """Rows of blocks ``[rows, bytes]``: value = d * scale * code - dmin * minimum, scales and minima in 6 bits."""
    blocks = x.reshape(-1, BLOCK // SUB_BLOCK, SUB_BLOCK)
    least = -np.minimum(blocks.min(-1), 0)
    scales = (blocks.max(-1).clip(0) + least) / 15
    d, six_bit_scales = _in_six_bits(scales)
    dmin, six_bit_least = _in_six_bits(least)
    steps = d.astype(np.float32) * six_bit_scales
    shifted = blocks + (dmin.astype(np.float32) * six_bit_least)[..., None]
    codes = np.rint(shifted / np.where(steps > 0, steps, 1)[..., None]).clip(0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, SUB_BLOCK)  # a byte has a code of both sub-blocks
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(blocks), -1)
    parts = (d.view(np.uint8), dmin.view(np.uint8), _packed_scales(six_bit_scales, six_bit_least), packed)
    blocks_of_bytes: Bytes = np.concatenate(parts, axis=1)
    return blocks_of_bytes.reshape(len(x), -1)


def _in_six_bits(values: Floats) -> tuple[NDArray[np.float16], Bytes]:
    factor = (values.max(-1, keepdims=True) / 63).astype(np.float16)
    divisor = np.where(factor > 0, factor, 1).astype(np.float32)
    return factor, np.rint(values / divisor).clip(0, 63).astype(np.uint8)


def _packed_scales(scales: Bytes, least: Bytes) -> Bytes:
    """12 bytes: the upper two bits of the last four of each are above the first four's six bits."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = least[:, :4] | least[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return np.concatenate((first, second, third), axis=1)


def quantize(x: Floats, kind: GGMLQuantizationType) -> Bytes:
    if kind == GGMLQuantizationType.Q4_K:
        return quantize_q4_k(x)
    quantized: Bytes = quants.quantize(x, kind)
    return quantized


def save(path: Path, kind: GGMLQuantizationType, shape: Shape | None = None) -> None:
    """With the weights of the default model, or random ones in ``shape``."""
    reader = gguf.GGUFReader(resolve(None).path)
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, {} if shape is None else _fields_of(shape))
    for name, tensor in _stored(reader) if shape is None else _random(shape, reader):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changes: dict[str, int]) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *of_items = field.types
        value: Any = changes.get(name, field.contents())
        writer.add_key_value(name, value, kind, sub_type=of_items[-1] if of_items else None)


def _fields_of(shape: Shape) -> dict[str, int]:
    return {
        "llama.block_count": shape.layers,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.wide,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": HEAD_DIM,
    }


def _stored(reader: gguf.GGUFReader) -> Iterator[tuple[str, Floats]]:
    for tensor in reader.tensors:
        yield tensor.name, quants.dequantize(tensor.data, tensor.tensor_type)


def _random(shape: Shape, reader: gguf.GGUFReader) -> Iterator[tuple[str, Floats]]:
    generator = np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Floats:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(SPREAD)

    ones = np.ones(shape.hidden, dtype=np.float32)
    kv = shape.kv_heads * HEAD_DIM
    yield "token_embd.weight", weight(len(reader.fields["tokenizer.ggml.tokens"].data), shape.hidden)
    yield "output_norm.weight", ones
    for layer in range(shape.layers):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", ones
        yield f"{at}.ffn_norm.weight", ones
        for name, rows in (("q", shape.heads * HEAD_DIM), ("k", kv), ("v", kv)):
            yield f"{at}.attn_{name}.weight", weight(rows, shape.hidden)
        yield f"{at}.attn_output.weight", weight(shape.hidden, shape.heads * HEAD_DIM)
        yield f"{at}.ffn_gate.weight", weight(shape.wide, shape.hidden)
        yield f"{at}.ffn_up.weight", weight(shape.wide, shape.hidden)
        yield f"{at}.ffn_down.weight", weight(shape.hidden, shape.wide)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", choices=("Q8_0", "Q4_0", "Q4_1", "Q4_K"), default="Q8_0")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    args = parser.parse_args(argv)
    save(args.path, GGMLQuantizationType[args.type], SHAPES.get(args.shape))


if __name__ == "__main__":
    main()
