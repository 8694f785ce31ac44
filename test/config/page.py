"""Writes docs/flags.md: all flags of the server by group, from the fields of the configuration.

python -m test.config.page
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from lightserve.config.option import FlagGroup, default_of
from lightserve.config.parse import option_types, server_parser

PAGE = Path(__file__).parent.parent.parent / "docs" / "flags.md"
INTRODUCTION = """\
# Flags

All flags of `lightserve serve`, in the groups of `--help_all`. `lightserve engine` and
`lightserve deploy` take most of them: see their `--help`. Dashes work as well as underscores, and
[a file](command_line.md#a-file-with-flags) can have the flags too.

`python -m test.config.page` writes this page from the fields in `lightserve/config`, and a test
compares it.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *_groups()])


def _groups() -> Iterator[str]:
    specs = [spec for spec, _ in option_types().values()]
    choices = {action.dest: action.choices for action in server_parser()._actions}
    for group in FlagGroup:
        yield f"## {group}\n"
        yield from (_entry(spec, choices[spec.name]) for spec in specs if spec.metadata["group"] == group)
        yield ""


def _entry(spec: Field[Any], choices: Iterable[Any] | None) -> str:
    default, aliases = default_of(spec), [f"`--{alias.replace('_', '-')}`" for alias in spec.metadata["aliases"]]
    notes = [] if choices is None else [", ".join(choices)]
    notes += [] if default is False or default in (None, "", []) else [f"default {default}"]
    notes += [f"also {', '.join(aliases)}"] if aliases else []
    shown = f"`--{spec.name}`" + (f" ({'; '.join(notes)})" if notes else "")
    text = f"- {shown}: {_markdown(spec.metadata['help'])}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _markdown(text: str) -> str:
    """With flags and JSON as code."""
    text = re.sub(r"\{.*\}", lambda found: f"`{found[0]}`", text)
    text = re.sub(r"(?<![\w`])--[a-z]\w*", lambda found: f"`{found[0]}`", text)
    return re.sub(r"(?<=[ ;])\*(?=[:.])", r"\\*", text)


if __name__ == "__main__":
    PAGE.write_text(page())
