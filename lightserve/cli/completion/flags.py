"""The flags of every command, as completion scripts need them. They come from the parsers of the commands."""

from __future__ import annotations

import argparse
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
        return tuple(spelling for spelling in self.spellings if "_" not in spelling)


@dataclass(frozen=True)
class CommandFlags:
    name: str  # "serve", or "bench serve" for a word behind a command
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()  # that may follow the command; empty: a path


def all_commands() -> list[CommandFlags]:
    words = {"bench": tuple(BENCHMARKS), "cluster": ("keygen",), "completion": SHELLS}
    commands = [
        CommandFlags(name, command.help, _flags_of(f"{command.module}:arguments"), words.get(name, ()))
        for name, command in COMMANDS.items()
    ]
    commands += [
        CommandFlags(f"bench {name}", benchmark.help, _flags_of(benchmark.parser))
        for name, benchmark in BENCHMARKS.items()
        if benchmark.parser is not None
    ]
    return commands


def _flags_of(make_parser: str) -> tuple[Flag, ...]:
    """The flags of a parser, which ``module:function`` makes. A command without flags has no such function."""
    module, _, function = make_parser.partition(":")
    try:
        parser = getattr(import_module(module), function)()
    except (ModuleNotFoundError, AttributeError):  # an extra that is not installed
        return ()
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return tuple(_flag(action) for action in shown if action.option_strings)


def _flag(action: argparse.Action) -> Flag:
    spellings = tuple(spelling for spelling in action.option_strings if spelling.startswith("--"))
    choices = tuple(map(str, action.choices or ()))
    return Flag(spellings[0], spellings, (action.help or "").replace("%%", "%"), action.nargs != 0, choices)
