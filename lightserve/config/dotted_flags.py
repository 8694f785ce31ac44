"""vLLM's flags for single fields of --speculative_config: --speculative-config.method mtp, and --spec-method mtp."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lightserve.errors import OptionError

FLAG = re.compile(r"--speculative[-_]config(?:=(.*))?", re.DOTALL)
FIELD = re.compile(r"--(?:speculative[-_]config\.(\w+)|spec-(method|model|tokens))(?:=(.*))?", re.DOTALL)
SHORT = {"tokens": "num_speculative_tokens"}  # what --spec-tokens sets; the other names are those of their fields


def joined_fields(argv: Sequence[str]) -> list[str]:
    """The arguments with one --speculative_config in place of the flags of its fields."""
    fields: dict[str, Any] = {}
    others: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if field := FIELD.fullmatch(argument):
            dotted, short, value = field.groups()
            fields[dotted or SHORT.get(short, short)] = _value(argument, value, rest)
        else:
            others.append(argument)
    if not fields:
        return others
    return [*_without_flag(others, fields), "--speculative_config", json.dumps(fields)]


def _value(argument: str, value: str | None, rest: Iterator[str]) -> Any:
    if value is None:
        value = next(rest, None)
    if value is None:
        raise OptionError(f"{argument}: its value is missing")
    try:
        return json.loads(value)
    except ValueError:
        return value


def _without_flag(argv: Sequence[str], fields: dict[str, Any]) -> list[str]:
    """Move the fields of a --speculative_config among the arguments to ``fields``, as far as these lack them."""
    others: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if flag := FLAG.fullmatch(argument):
            given = _value(argument, flag[1], rest)
            if not isinstance(given, dict):
                raise OptionError(f"speculative_config={given!r} has no fields, and flags set some; leave out one")
            fields |= {name: value for name, value in given.items() if name not in fields}
        else:
            others.append(argument)
    return others
