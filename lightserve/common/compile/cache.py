"""Where Triton keeps the kernels that it has compiled. Where it cannot write, it would fail at the first of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


def use_writable_cache(fallback: str) -> None:
    """Before Triton is imported: choose ``fallback``, which need not exist, where Triton's own choice is read-only."""
    chosen = _folder()
    reason = _why_not(chosen)
    if reason is not None:
        logger.warning("kernels are compiled at every start: %s cannot be written (%s)", chosen, reason)
        os.environ["TRITON_CACHE_DIR"] = fallback


def was_compiled(kernel: str) -> bool:
    """Whether a kernel of this name is there, for whatever shapes."""
    return any(Path(_folder()).glob(f"*/{kernel}.json"))


def _folder() -> str:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def _why_not(folder: str) -> str | None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
