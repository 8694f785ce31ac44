"""Failed allocations as errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightserve.errors import ServerError

# Torch has no class of its own for a failed allocation on a CPU. On x86 it says "can't allocate memory", on ARM "not
# enough memory: you tried to allocate 4096 bytes".
CPU_MESSAGES = ("can't allocate memory", "not enough memory")


@contextmanager
def explain_out_of_memory(remedy: str) -> Iterator[None]:
    """Within it a failed allocation raises a ``ServerError`` that ends with ``remedy``."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise ServerError(f"not enough memory ({reason}); {remedy}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MESSAGES)
