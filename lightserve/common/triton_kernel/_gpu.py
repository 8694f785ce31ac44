"""The GPU that kernels are launched on. Wrappers choose tiles that fit it; the tiles were tuned on an H200."""

from __future__ import annotations

from functools import cache

import triton

from lightserve.common import ops
from lightserve.common.device.profile import H200, Profile

active = H200  # a process uses one GPU

SLACK_BYTES = 2048  # of shared memory, for slots and sums beside the tiles


def use_profile(profile: Profile) -> None:
    """Choose tiles for this GPU from now on. A device calls it when it binds its ops."""
    global active
    active = profile


def uses_asm() -> bool:
    """Whether kernels may hold assembly. Triton's interpreter cannot run it, whatever the device has."""
    return ops.active_traits().has_inline_ptx and not triton.knobs.runtime.interpret


def fits(tile_bytes: int, num_stages: int, resident_bytes: int = 0) -> bool:
    """Whether a pipelined loop has room in shared memory.

    ``tile_bytes``: what one iteration loads; ``resident_bytes``: what stays during the loop. Triton keeps one tile less
    than there are stages. On Hopper it may keep all of them, and all of our loops have room for that there.
    """
    return _needed(tile_bytes, num_stages, resident_bytes) <= active.shared_bytes


def stages_that_fit(tile_bytes: int, num_stages: int, resident_bytes: int = 0) -> int:
    """The most stages, up to ``num_stages``, for which a pipelined loop has room; at least 1."""
    return _stages(tile_bytes, num_stages, resident_bytes, active.shared_bytes)


@cache
def _stages(tile_bytes: int, num_stages: int, resident_bytes: int, shared_bytes: int) -> int:
    stages = range(num_stages, 1, -1)
    return next((count for count in stages if _needed(tile_bytes, count, resident_bytes) <= shared_bytes), 1)


def _needed(tile_bytes: int, num_stages: int, resident_bytes: int) -> int:
    return max(num_stages - 1, 1) * tile_bytes + resident_bytes + SLACK_BYTES


def programs_per_multiprocessor(on_h200: int) -> int:
    """How many programs a multiprocessor runs at once, given the number on an H200. Shared memory limits them."""
    return max(round(on_h200 * active.shared_bytes / H200.shared_bytes), 1)
