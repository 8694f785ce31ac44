"""A field of the configuration that is also a flag: its default, help, group, other names and limits in one place."""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, field, fields
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightserve.errors import OptionError


class FlagGroup(StrEnum):
    """The groups of ``--help_all`` and docs/flags.md, in their order."""

    COMMON = "Common flags"
    MODEL_FILES = "Model files"
    COMPUTATION = "Memory and computation"
    LORA = "LoRA adapters"
    PARALLEL = "Several devices or machines"
    SCHEDULING = "Scheduling"
    HTTP = "HTTP"
    BATCHES = "Files and batches"
    RL = "Reinforcement learning"
    KEYS = "Keys and TLS"
    OBSERVABILITY = "Logs and metrics"
    FAULTS = "Faults and shutdown"
    DEVELOPMENT = "Development"


def option(
    default: Any, help: str, *aliases: str, group: FlagGroup, choices_from: str | None = None, **limits: int
) -> Any:
    """A field that is also a flag. ``aliases`` are its names in other servers.

    ``limits``: at_least and at_most of a number. ``choices_from``: the registry that has its values, or a class that
    makes it, as module:NAME; it is imported only to parse flags.
    """
    metadata = {"help": help, "aliases": aliases, "group": group, "choices_from": choices_from, **limits}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(spec: Field[Any]) -> Any:
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


def changed_options(section: Any) -> dict[str, Any]:
    """The options of a part of the configuration that differ from their defaults."""
    values = {spec.name: (getattr(section, spec.name), default_of(spec)) for spec in fields(section)}
    return {name: value for name, (value, default) in values.items() if value != default}


def types_of_options(config_class: type[Any]) -> dict[str, Any]:
    """By name. Of an option that may be None: its type otherwise."""
    return {name: _not_none(hint) for name, hint in get_type_hints(config_class).items()}


def _not_none(hint: Any) -> Any:
    if get_origin(hint) in (types.UnionType, Union):  # a Literal or None is of the second kind
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def check_options(section: Any) -> None:
    """Raise an OptionError if a value is not among its choices or not within its limits."""
    kinds = types_of_options(type(section))
    for spec in fields(section):
        value = getattr(section, spec.name)
        if value is None and default_of(spec) is None:
            continue
        _check_choice(spec.name, value, kinds[spec.name])
        _check_limits(spec, value)


def _check_choice(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise OptionError(f"{name}={value!r}: must be one of {', '.join(get_args(hint))}")


def _check_limits(spec: Field[Any], value: Any) -> None:
    least, most = spec.metadata.get("at_least"), spec.metadata.get("at_most")
    if value is None:
        return
    if least is not None and not least <= value < float("inf"):
        raise OptionError(f"{spec.name}={value}: must be at least {least}")
    if most is not None and value > most:
        raise OptionError(f"{spec.name}={value}: must be at most {most}")
