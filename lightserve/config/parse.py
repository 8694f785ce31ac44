"""Command line -> frozen config. Each flag takes its name, default and help from a field of the config."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import Field, fields
from importlib import import_module
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from lightserve.config.config_file import read_config_file
from lightserve.config.dotted_flags import joined_fields
from lightserve.config.help_text import HelpFormatter, ShowHelp
from lightserve.config.option import FlagGroup, default_of, types_of_options
from lightserve.config.server import ServerConfig
from lightserve.utils import former_names
from lightserve.utils.spelling import nearest

C = TypeVar("C")
MODULE = "python -m lightserve.server.api_server"
METAVARS = {int: "N", float: "X", str: "TEXT"}
FILE_SUFFIXES = ("_file", "_certfile", "_keyfile", "_certs", "_config", "chat_template")
FIRST = ("model_dir", "host", "port", "model_name", "api_key")  # of the common flags in --help


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, and suggests the nearest known flag for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def parse(
        self, argv: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(argv, namespace or argparse.Namespace())
        for flag in unknown:
            self.reject_unknown(flag)
        return parsed

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+)[^:]*:", r"\1:", message)  # one spelling of several
        self.exit(2, f"lightserve: {message} (--help lists the flags)\n")

    def hide(self, names: Collection[str]) -> None:
        """Take flags of other commands out of --help. They are still parsed, so that a refusal can say why."""
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def reject_unknown(self, flag: str) -> NoReturn:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        near = nearest(flag, (option for action in shown for option in action.option_strings))
        self.error(f"unknown argument {flag}" + (f"; did you mean {near}?" if near else ""))


def parse_server(argv: Sequence[str] | None = None, prog: str = MODULE) -> ServerConfig:
    """Parse the server's flags. Those of --config count unless the command line has them too."""
    parser = server_parser(prog)
    argv = joined_fields(sys.argv[1:] if argv is None else argv)
    namespace = parser.parse(argv)
    if namespace.model is not None and namespace.model_dir not in (None, namespace.model):
        parser.error(f"two models: {namespace.model} and --model_dir {namespace.model_dir}; name one")
    if namespace.config is not None:
        options = [action for action in parser._actions if action.dest in option_types()]
        namespace = parser.parse(argv, argparse.Namespace(**read_config_file(namespace.config, options)))
    if namespace.model is not None:
        namespace.model_dir = namespace.model
    parts: dict[str, type[Any]] = get_type_hints(ServerConfig)
    return ServerConfig(**{name: config_from_args(config_class, namespace) for name, config_class in parts.items()})


def server_parser(prog: str = MODULE, common: Sequence[str] = ()) -> Parser:
    """The server's flags, in the groups of ``--help``. ``common``: further flags of its first group."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a model over HTTP. Flags may be written with dashes instead of underscores.",
        add_help=False,
    )
    for title, specs in _by_group((*common, *FIRST)).items():
        group = parser.add_argument_group(title)
        if title == FlagGroup.COMMON:
            group.add_argument("model", metavar="MODEL", nargs="?", help="the same as --model_dir; write it first")
        for spec, kind in specs:
            _add_flag(group, spec, kind)
        if title == FlagGroup.COMMON:
            _add_flags_of_the_parser(group)
    return parser


def _by_group(first: Sequence[str]) -> dict[FlagGroup, list[tuple[Field[Any], Any]]]:
    """The options of the server. ``first``: names that the group of common flags begins with, whatever theirs is."""
    options = option_types()
    named = [options.pop(name) for name in first]
    groups = {
        group: [option for option in options.values() if option[0].metadata["group"] == group] for group in FlagGroup
    }
    return {**groups, FlagGroup.COMMON: [*named, *groups[FlagGroup.COMMON]]}


def _add_flags_of_the_parser(group: argparse._ActionsContainer) -> None:
    """What is no option of the server itself."""
    group.add_argument("--config", metavar="FILE", help="YAML file with flags; those on the command line win")
    group.add_argument("-h", "--help", action=ShowHelp, help="show the common flags")
    show_all = ("--help_all", "--help-all")
    group.add_argument(*show_all, action=ShowHelp, is_full=True, help="show all flags")


def option_types() -> dict[str, tuple[Field[Any], Any]]:
    """The field and the type of every option of the server, by name."""
    options: dict[str, tuple[Field[Any], Any]] = {}
    for section in get_type_hints(ServerConfig).values():
        kinds = types_of_options(section)
        options |= {spec.name: (spec, kinds[spec.name]) for spec in fields(section)}
    return options


def add_flags(parser: argparse._ActionsContainer, config_class: type[Any]) -> None:
    """Add one flag per field, with underscores and with dashes, and with the names that other servers use."""
    kinds = types_of_options(config_class)
    for spec in fields(config_class):
        _add_flag(parser, spec, kinds[spec.name])


def _add_flag(parser: argparse._ActionsContainer, spec: Field[Any], kind: Any) -> None:
    names = [spec.name, *spec.metadata["aliases"]]
    spellings = dict.fromkeys(f"--{s}" for name in names for s in (name, name.replace("_", "-")))
    parser.add_argument(*spellings, dest=spec.name, **_arguments_of(spec, kind), **_help_of(spec))
    for name in former_names.FLAGS.get(spec.name, ()):
        hidden = {"default": default_of(spec), "help": argparse.SUPPRESS}
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")),
            dest=spec.name,
            **_arguments_of(spec, kind),
            **hidden,
        )


def config_from_args(config_class: type[C], namespace: argparse.Namespace) -> C:
    names = [spec.name for spec in fields(config_class)]  # type: ignore[arg-type]
    return config_class(**{name: getattr(namespace, name) for name in names})


def _help_of(spec: Field[Any]) -> dict[str, Any]:
    text = spec.metadata["help"]
    if aliases := spec.metadata["aliases"]:
        text += "; also " + ", ".join(f"--{alias.replace('_', '-')}" for alias in aliases)
    return {"default": default_of(spec), "help": text.replace("%", "%%")}


def _arguments_of(spec: Field[Any], kind: Any) -> dict[str, Any]:
    """What argparse needs to parse a value of this type."""
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": "store_true"}
    if registry := spec.metadata["choices_from"]:
        module, _, name = registry.partition(":")
        values = getattr(import_module(module), name)
        return {"choices": values() if isinstance(values, type) else list(values)}
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        return {"type": kind, "nargs": "+", "metavar": METAVARS[kind]}
    return {"type": kind, "metavar": "FILE" if spec.name.endswith(FILE_SUFFIXES) else METAVARS[kind]}
