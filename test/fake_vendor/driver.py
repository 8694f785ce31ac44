"""What the driver of "fake" says, which tests choose by variables of the environment."""

from __future__ import annotations

import os

import torch

MISSING = "FAKE_DRIVER_MISSING"  # why this machine has no such device
PROBLEM = "FAKE_DRIVER_PROBLEM"  # of a device that is there
PINNED_LIMIT = "FAKE_PINNED_LIMIT"  # bytes of an allocation in host memory


class FakeDriver:
    def problem(self, device: torch.device) -> str | None:
        return os.environ.get(PROBLEM)

    def out_of_memory(self, error: RuntimeError) -> str | None:
        text = str(error)
        return text.partition("FAKE_ERROR_12: ")[2] or None


def allocate(num_bytes: int) -> None:
    """As the driver fails: by an error that is no ``torch.OutOfMemoryError``."""
    limit = int(os.environ.get(PINNED_LIMIT, num_bytes))
    if num_bytes > limit:
        raise RuntimeError(f"FAKE_ERROR_12: {num_bytes} bytes do not fit the {limit} that are left on bank 0")
