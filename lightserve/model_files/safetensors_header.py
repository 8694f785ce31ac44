"""The head of a safetensors file: enough to see whether the file is whole before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from lightserve.errors import ModelFilesError


def tensor_bytes(path: Path) -> int:
    """How many bytes of tensors ``path`` holds; a file cut short, or no safetensors file at all, is refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise _damaged(path, f"its header wants {length} bytes of {size}")
        try:
            entries = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _damaged(path, "its header is not safetensors JSON") from error
    n_bytes = int(max(ends, default=0))
    if 8 + length + n_bytes != size:
        raise _damaged(path, f"{8 + length + n_bytes} bytes wanted, {size} found")
    return n_bytes


def _damaged(path: Path, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{path}: the safetensors file is truncated or damaged ({reason}); fetch it again")
