"""Command line -> frozen config. Each flag takes its name, default and help from a field of the config."""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from lightserve.config import ServerConfig
from lightserve.server.config_file import read_config_file
from lightserve.server.flag_groups import COMMON, grouped
from lightserve.server.help_text import HelpFormatter, ShowHelp
from lightserve.utils.spelling import nearest

C = TypeVar("C")
MODULE = "python -m lightserve.server.api_server"
METAVARS = {int: "N", float: "X", str: "TEXT"}
FILE_SUFFIXES = ("_file", "_certfile", "_keyfile", "_certs", "_config", "chat_template")


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
    types_by_name = option_types()
    for title, names in grouped(types_by_name, common).items():
        group = parser.add_argument_group(title)
        if title == COMMON:
            group.add_argument("model", metavar="MODEL", nargs="?", help="the same as --model_dir; write it first")
        for name in names:
            _add_flag(group, *types_by_name[name])
        if title == COMMON:
            _add_flags_of_the_parser(group)
    return parser


def _add_flags_of_the_parser(group: argparse._ActionsContainer) -> None:
    """What is no option of the server itself."""
    group.add_argument("--config", metavar="FILE", help="YAML file with flags; those on the command line win")
    group.add_argument("-h", "--help", action=ShowHelp, help="show the common flags")
    show_all = ("--help_all", "--help-all")
    group.add_argument(*show_all, action=ShowHelp, is_full=True, help="show all flags")


def option_types() -> dict[str, tuple[Field[Any], Any]]:
    """The field and the type of every option of the server, by name."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    for config_class in get_type_hints(ServerConfig).values():
        hints = get_type_hints(config_class)
        found |= {spec.name: (spec, hints[spec.name]) for spec in fields(config_class)}
    return found


def add_flags(parser: argparse._ActionsContainer, config_class: type[Any]) -> None:
    """Add one flag per field, with underscores and with dashes, and with the names that other servers use."""
    hints = get_type_hints(config_class)
    for spec in fields(config_class):
        _add_flag(parser, spec, hints[spec.name])


def _add_flag(parser: argparse._ActionsContainer, spec: Field[Any], hint: Any) -> None:
    names = [spec.name, *spec.metadata.get("aliases", ())]
    spellings = dict.fromkeys(f"--{s}" for name in names for s in (name, name.replace("_", "-")))
    parser.add_argument(*spellings, dest=spec.name, **_kind_of(spec.name, hint), **_help_of(spec))


def config_from_args(config_class: type[C], namespace: argparse.Namespace) -> C:
    names = [spec.name for spec in fields(config_class)]  # type: ignore[arg-type]
    return config_class(**{name: getattr(namespace, name) for name in names})


def _help_of(spec: Field[Any]) -> dict[str, Any]:
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    text = spec.metadata.get("help", "")
    if aliases := spec.metadata.get("aliases"):
        text += "; also " + ", ".join(f"--{alias.replace('_', '-')}" for alias in aliases)
    return {"default": default, "help": text.replace("%", "%%")}


def _kind_of(name: str, hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (types.UnionType, Union):  # a Literal or None is of the second kind
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": "store_true"}
    if name == "router_policy":
        from lightserve.router.policy import POLICIES  # here, because it imports numpy

        return {"choices": list(POLICIES)}
    if name == "cluster_policy":
        from lightserve.cluster.routing import POLICIES as DISPATCH_POLICIES

        return {"choices": list(DISPATCH_POLICIES)}
    if get_origin(hint) is list:
        kind = get_args(hint)[0]
        return {"type": kind, "nargs": "+", "metavar": METAVARS[kind]}
    return {"type": hint, "metavar": "FILE" if name.endswith(FILE_SUFFIXES) else METAVARS[hint]}
