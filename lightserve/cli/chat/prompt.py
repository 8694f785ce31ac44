"""Reads what the user types: with line editing, history and completion of commands where readline exists."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightserve.utils.terminal import Style

MAX_HISTORY = 1000  # lines that are kept between chats
QUOTES = '"""'  # begins and ends a message of several lines

readline: Any = None
with contextlib.suppress(ImportError):  # Python may be built without it
    import readline


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "lightserve" / "chat_history"


@contextlib.contextmanager
def line_editing(commands: Sequence[str], history: Path | None) -> Iterator[None]:
    """Within it, ``input`` completes ``commands`` and remembers lines, also those of earlier chats."""
    if readline is None or not sys.stdin.isatty():
        yield
        return
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(commands, text, state))
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(MAX_HISTORY)
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
    try:
        yield
    finally:
        if history is not None:
            _save_history(history)


def _completion(commands: Sequence[str], text: str, state: int) -> str | None:
    matches = [name for name in commands if text.startswith("/") and name.startswith(text)]
    return f"{matches[state]} " if state < len(matches) else None


def _save_history(path: Path) -> None:
    """Only this user may read it. A disk that is full or read-only costs the history, not the chat."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        readline.write_history_file(path)


def read_message(style: Style) -> str:
    """One message. Raises EOFError at the end of the input."""
    is_interactive = sys.stdin.isatty()
    line = input(_prompt(style, "> ") if is_interactive else "")
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(_prompt(style, ". ") if is_interactive else ""))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _prompt(style: Style, text: str) -> str:
    """readline must know which characters take no room: they are between \\x01 and \\x02."""
    if not style.has_colors or readline is None:
        return text
    return f"\x01{style.begin('bold')}\x02{text}\x01{style.end}\x02"
