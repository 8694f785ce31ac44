"""An adapter whose load lasts until the test ends it: its file of weights is a named pipe, which the worker reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightserve.model_files.lora.adapter import WEIGHTS_FILE
from test.lora_files import write_adapter
from test.waiting import wait_until

SIZES = {"model.layers.0.self_attn.q_proj": (64, 64)}


def write_held(folder: Path) -> Path:
    """The pipe of a new adapter. Its load fails when it ends, because the pipe has no weights."""
    pipe = write_adapter(folder, SIZES) / WEIGHTS_FILE
    pipe.unlink()
    os.mkfifo(pipe)
    return pipe


@contextmanager
def held_load(pipe: Path) -> Iterator[Callable[[], None]]:
    """Wait until a worker reads the pipe. The load is in flight until the end of the block, or a call of the result."""
    opened: list[int] = []

    def is_read() -> bool:
        try:
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # an error if nobody reads
        except OSError:
            return False
        return True

    def end() -> None:
        while opened:
            os.close(opened.pop())

    wait_until(is_read)
    try:
        yield end
    finally:
        end()
