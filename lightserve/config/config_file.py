"""``--config``: flags in a YAML file, one key per flag.

model: Qwen/Qwen3-8B
port: 8080
api_key: [first, second]
no_web: true
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightserve.errors import OptionError
from lightserve.utils.spelling import nearest


def read_config_file(path: str, options: Sequence[argparse.Action]) -> dict[str, Any]:
    """The values of the file by the name of their option. Raises a OptionError that names the file and the key."""
    by_key = {flag.lstrip("-"): option for option in options for flag in option.option_strings}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        option = by_key.get(str(key))
        if option is None:
            near = nearest(str(key), by_key)
            hint = f"did you mean {near}?" if near else "lightserve serve --help_all lists the flags"
            raise OptionError(f"{path}: unknown key {str(key)[:100]!r}; {hint}")
        if option.dest in values:
            raise OptionError(f"{path}: {key} sets {option.dest} a second time; remove one of the two")
        try:
            values[option.dest] = _value(option, value)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{path}: {key}: {value!r} is not {_expected(option)}") from error
    return {name: value for name, value in values.items() if value is not None}


def _mapping(path: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    except yaml.YAMLError as error:
        raise OptionError(f"--config {path}: not YAML ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: must have one `flag: value` per line, not a {type(content).__name__}")
    return content


def _value(option: argparse.Action, value: Any) -> Any:
    """The value as the command line would give it; None: the default."""
    if value is None:
        return None
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError
        return value
    if option.nargs == "+":
        return [_scalar(option, item) for item in (value if isinstance(value, list) else [value])]
    return _scalar(option, value)


def _scalar(option: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool):  # YAML reads on and off as booleans
        value = "on" if value else "off"
        if value not in (option.choices or ()):
            raise TypeError
    if isinstance(value, dict) and option.type is str:  # a flag that takes a JSON object
        value = json.dumps(value)
    if not isinstance(value, str | int | float):
        raise TypeError
    if option.choices is not None and value not in option.choices:
        raise ValueError
    return option.type(str(value)) if callable(option.type) else value


def _expected(option: argparse.Action) -> str:
    if option.choices is not None:
        return f"one of {', '.join(map(str, option.choices))}"
    if option.nargs == 0:
        return "true or false"
    kind = {int: "a whole number", float: "a number"}
    return kind.get(option.type, "a text") if isinstance(option.type, type) else "a text"
