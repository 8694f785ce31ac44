"""The flags of every command, as completion scripts need them. They come from the parsers of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

from lightserve.cli.bench import BENCHMARKS
from lightserve.cli.main import COMMANDS

SHELLS = ("bash", "fish", "zsh")


@dataclass(frozen=True)
class Flag:
    name: str  # with its dashes, in the spelling of --help
    spellings: tuple[str, ...]  # all of them
    help: str
    takes_value: bool
    choices: tuple[str, ...]

    @property
    def dashed(self) -> tuple[str, ...]:
        """For people who type dashes, as other servers have them."""
        return tuple(one for one in self.spellings if "_" not in one)


@dataclass(frozen=True)
class CommandFlags:
    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()  # that may follow the command; empty: a path


def all_commands() -> list[CommandFlags]:
    words = {"bench": tuple(BENCHMARKS), "completion": SHELLS}
    return [
        CommandFlags(name, command.help, tuple(_flags_of(command.module)), words.get(name, ()))
        for name, command in COMMANDS.items()
    ]


def _flags_of(module: str) -> Iterable[Flag]:
    """A command without flags has no function ``arguments``."""
    make_parser = getattr(import_module(module), "arguments", None)
    return [] if make_parser is None else [_flag(action) for action in make_parser()._actions if action.option_strings]


def _flag(action: argparse.Action) -> Flag:
    spellings = tuple(one for one in action.option_strings if one.startswith("--"))
    choices = tuple(map(str, action.choices or ()))
    return Flag(spellings[0], spellings, (action.help or "").replace("%%", "%"), action.nargs != 0, choices)
