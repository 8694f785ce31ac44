"""Failed allocations as errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightserve.common.device.base import bound_device
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
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        raise ServerError(f"not enough memory ({reason}); {remedy}") from error


def out_of_memory_reason(error: RuntimeError) -> str | None:
    """None: ``error`` is another one."""
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MESSAGES):
        return str(error).splitlines()[0]
    platform = bound_device()
    return None if platform is None or platform.driver is None else platform.driver.out_of_memory(error)
