"""The header of a safetensors file: enough to check that the file is complete before anything loads."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class TensorInfo(NamedTuple):
    dtype: str  # F32, BF16, ...
    shape: tuple[int, ...]
    end: int  # bytes after the header


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors in ``path``. Raises ModelFilesError if the file is truncated or not safetensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if 8 + length > size or length > MAX_HEADER_BYTES:
                raise _damaged(path, f"its header needs {length} bytes, the file has {size}")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror}); fix that or download it again") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    tensors = _tensors_of(path, entries)
    n_bytes = max((tensor.end for tensor in tensors.values()), default=0)
    if 8 + length + n_bytes != size:
        raise _damaged(path, f"{8 + length + n_bytes} bytes expected, {size} found")
    return tensors


def tensor_bytes(path: Path) -> int:
    """Total bytes of the tensors in ``path``."""
    return max((tensor.end for tensor in read_header(path).values()), default=0)


def _tensors_of(path: Path, entries: Any) -> dict[str, TensorInfo]:
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a JSON object")
    return {name: _tensor_of(path, name, entry) for name, entry in entries.items() if name != "__metadata__"}


def _tensor_of(path: Path, name: str, entry: Any) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
            all(type(length) is int and length >= 0 for length in shape)
            and 0 <= start <= end
            and _fits(math.prod(shape), end - start)
        ):
            return TensorInfo(dtype, tuple(shape), end)
    raise _damaged(path, f"its header has an invalid entry for tensor {name[:100]}")


def _fits(count: int, n_bytes: int) -> bool:
    """Whether ``count`` numbers of 4 bits to 16 bytes each can take ``n_bytes``."""
    return count <= 2 * n_bytes and n_bytes <= 16 * count


def _damaged(path: Path, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{path}: the safetensors file is truncated or damaged ({reason}); download it again")
