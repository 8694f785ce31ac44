"""Command line -> frozen config. Each flag takes its name, default and help from a field of the config."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from lightserve.config import ServerConfig

C = TypeVar("C")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help. An option without a fixed default describes it in its own text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, [], "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, and suggests the nearest known flag for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(argv)
        for flag in unknown:
            self.reject_unknown(flag)
        return namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lightserve: {message} (--help lists the flags)\n")

    def reject_unknown(self, flag: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(flag.split("=")[0], known, n=1)
        self.error(f"unknown argument {flag}" + (f"; did you mean {near[0]}?" if near else ""))


def parse_server(argv: Sequence[str] | None = None) -> ServerConfig:
    """Parse the server's flags. The help groups them by the process that needs them."""
    prog = "python -m lightserve.server.api_server"
    parser = Parser(prog=prog, usage="%(prog)s [flags]", description="Serve a model over HTTP.")
    parts: dict[str, type[Any]] = get_type_hints(ServerConfig)
    for name, config_class in parts.items():
        add_flags(parser.add_argument_group(name, config_class.__doc__), config_class)
    namespace = parser.parse(argv)
    return ServerConfig(**{name: config_from_args(config_class, namespace) for name, config_class in parts.items()})


def add_flags(parser: argparse._ActionsContainer, config_class: type[Any]) -> None:
    """Add one flag per field, with underscores and with dashes, and with the names that other servers use."""
    hints = get_type_hints(config_class)
    for spec in fields(config_class):
        names = [spec.name, *spec.metadata.get("aliases", ())]
        spellings = dict.fromkeys(f"--{s}" for name in names for s in (name, name.replace("_", "-")))
        parser.add_argument(*spellings, dest=spec.name, **_kind_of(hints[spec.name]), **_help_of(spec))


def config_from_args(config_class: type[C], namespace: argparse.Namespace) -> C:
    names = [spec.name for spec in fields(config_class)]  # type: ignore[arg-type]
    return config_class(**{name: getattr(namespace, name) for name in names})


def _help_of(spec: Field[Any]) -> dict[str, Any]:
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    return {"default": default, "help": spec.metadata.get("help", "").replace("%", "%%")}


def _kind_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (types.UnionType, Union):  # a Literal or None is of the second kind
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is list:
        return {"type": get_args(hint)[0], "nargs": "+"}
    return {"type": hint}
