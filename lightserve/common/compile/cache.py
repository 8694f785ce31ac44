"""The folder in which Triton keeps compiled kernels. Triton fails at the first kernel if it cannot write there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


def use_writable_cache(fallback: str) -> None:
    """Use ``fallback``, which need not exist, if Triton's folder is read-only. Call it before Triton is imported."""
    folder = _folder()
    error = _write_error(folder)
    if error is not None:
        logger.warning("kernels are compiled at every start: the Triton cache %s is not writable (%s)", folder, error)
        os.environ["TRITON_CACHE_DIR"] = fallback


def was_compiled(kernel: str) -> bool:
    """Whether the cache holds a kernel of this name, for any shapes."""
    return any(Path(_folder()).glob(f"*/{kernel}.json"))


def _folder() -> str:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def _write_error(folder: str) -> str | None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
