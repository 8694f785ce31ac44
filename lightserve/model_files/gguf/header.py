"""The header of a GGUF file: its metadata and the positions of its tensors. A model may have several files.

``gguf.GGUFReader`` makes a numpy array of every vocabulary entry: it takes 2.4 s for SmolLM2's 49k tokens, this module
0.1 s, and each process reads the header at start.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf.shards import shard_names

READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SHOWN = 5  # missing files in an error

# types of tokens in tokenizer.ggml.token_type
CONTROL = 3  # never part of plain text
USER_DEFINED = 4  # always matched as a whole, but decoded as ordinary text


class Encoding(NamedTuple):
    """ggml packs ``block`` numbers into ``n_bytes`` bytes."""

    name: str
    block: int
    n_bytes: int


ENCODINGS = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    20: Encoding("IQ4_NL", 32, 18),
    23: Encoding("IQ4_XS", 256, 136),
    30: Encoding("BF16", 1, 2),
    39: Encoding("MXFP4", 32, 17),
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


class TensorEntry(NamedTuple):
    name: str
    shape: tuple[int, ...]  # in torch's order: rows first
    encoding: Encoding
    path: Path  # of the file that has it
    offset: int  # bytes from the start of the file

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block * self.encoding.n_bytes


@dataclass(frozen=True)
class GgufHeader:
    path: Path  # the first file
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]  # of all files
    other_paths: tuple[Path, ...] = ()  # of a split model

    @property
    def paths(self) -> list[Path]:
        return [self.path, *self.other_paths]

    @property
    def architecture(self) -> Any:
        """The prefix of the metadata of the model."""
        return self.metadata.get("general.architecture")

    def floats(self, name: str) -> list[float]:
        """The values of a small F32 tensor."""
        entry = self.tensors[name]
        if entry.encoding.name != "F32":
            raise ModelFilesError(f"{self.path}: tensor {name} is {entry.encoding.name}, not F32; convert it again")
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            return list(struct.unpack(f"<{math.prod(entry.shape)}f", file.read(entry.n_bytes)))


def read_gguf_header(path: Path) -> GgufHeader:
    """Of a whole model. ``path`` may be any of its files."""
    header = _read_file(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise _truncated(path)
    if count <= 1:
        return header
    first, *others = _shards(path, count)
    return _joined(header if first == path else _read_file(first), [_read_file(shard) for shard in others])


def _shards(path: Path, count: int) -> list[Path]:
    names = shard_names(path.name)
    if len(names) != count:
        raise ModelFilesError(
            f"{path}: one of {count} files of a split GGUF, whose names must end with -00001-of-{count:05}.gguf and so "
            "on; rename them"
        )
    shards = [path.with_name(name) for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        listed = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        raise ModelFilesError(
            f"{path}: the model is split into {count} files; {listed} not found beside it; fetch it too"
        )
    return shards


def _joined(first: GgufHeader, others: list[GgufHeader]) -> GgufHeader:
    """The first file has the metadata of the model."""
    headers = [first, *others]
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    num_tensors = sum(len(header.tensors) for header in headers)
    wanted = first.metadata.get("split.tensors.count", num_tensors)
    if not len(tensors) == num_tensors == wanted:
        raise ModelFilesError(
            f"{first.path}: its {len(headers)} files have {num_tensors} tensors with {len(tensors)} names instead of "
            f"{wanted}; they are not of one model: fetch all of them again"
        )
    return replace(first, tensors=tensors, other_paths=tuple(header.path for header in others))


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_magic(path, data)
            return _parse(path, data)
    except (struct.error, EOFError, OverflowError, IndexError, TypeError, RecursionError) as error:
        raise _truncated(path) from error  # TypeError: a metadata field has an unexpected type
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelFilesError(f"{path}: cannot be read as GGUF ({error}); download it again") from error


def _check_magic(path: Path, data: mmap.mmap) -> None:
    if data[:4] != b"GGUF":
        raise ModelFilesError(
            f"{path}: not a GGUF file (it starts with {data[:4]!r}); use a .gguf file or a Hugging Face folder"
        )
    (version,) = struct.unpack_from("<I", data, 4)
    if version not in READABLE_VERSIONS:
        raise ModelFilesError(f"{path}: GGUF version {version} is not supported; convert it to version 3")


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data, 8)
    n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(n_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    raw = [_read_tensor_entry(path, cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _truncated(path)
    start = -(-cursor.position // alignment) * alignment
    tensors = {entry.name: entry._replace(offset=start + entry.offset) for entry in raw}
    if any(entry.offset + entry.n_bytes > len(data) for entry in tensors.values()):
        raise _truncated(path)
    return GgufHeader(path, metadata, tensors)


def _read_tensor_entry(path: Path, cursor: _Cursor) -> TensorEntry:
    name = cursor.string()
    n_dims = cursor.scalar("I")
    shape = tuple(reversed(cursor.scalars("Q", n_dims)))
    code = cursor.scalar("I")
    encoding = ENCODINGS.get(code)
    if encoding is None:
        supported = ", ".join(known.name for known in ENCODINGS.values())
        raise ModelFilesError(
            f"{path}: tensor {name} has type {_type_name(code)}; supported types: {supported}; "
            "make a file of one of them with llama-quantize"
        )
    if shape[-1] % encoding.block:
        raise ModelFilesError(
            f"{path}: tensor {name} has rows of {shape[-1]}; {encoding.name} needs multiples of {encoding.block}"
        )
    return TensorEntry(name, shape, encoding, path, cursor.scalar("Q"))


def _type_name(code: int) -> str:
    from gguf.constants import (
        GGMLQuantizationType,  # here, because the import takes 0.1 s and only this message needs it
    )

    try:
        return str(GGMLQuantizationType(code).name)
    except ValueError:
        return f"{code} (unknown)"


def _truncated(path: Path) -> ModelFilesError:
    return ModelFilesError(f"{path}: the GGUF file is truncated or damaged; download it again")


class _Cursor:
    """Reads little-endian values in sequence. Raises EOFError or struct.error past the end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        if self.position + size > len(self._data):
            raise EOFError
        values = struct.unpack_from(f"<{count}{code}", self._data, self.position)
        self.position += size
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position = self._data, self.position  # locals: this loop runs for every token and merge
        read_length: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (length,) = read_length(data, position)
            position += 8 + length
            texts.append(data[position - length : position].decode("utf-8", "replace"))
        if position > len(data):
            raise EOFError
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            return self._array(item_kind, count)
        if kind not in _SCALARS:
            raise EOFError  # no such type exists: the file is damaged
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        if kind in _SCALARS:
            return list(self.scalars(_SCALARS[kind], count))
        return [self.value(kind) for _ in range(count)]
