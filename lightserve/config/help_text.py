"""How ``--help`` looks: one spelling of each flag, its default once."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

HELP_COLUMN = 30  # where the text of a flag begins
MAX_WIDTH = 110  # wider lines are hard to read


class HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN, width=_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Flags also work with dashes, and some under the names of other servers. The help has one spelling."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flag = "--help" if "--help" in action.option_strings else action.option_strings[0]
        return flag if action.nargs == 0 else f"{flag} {self._format_args(action, action.dest.upper())}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """A text with line breaks keeps them."""
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help with the default. An option without a fixed default describes it in its own text."""
        text = action.help or ""
        if not action.option_strings or action.default is False or action.default in (None, [], "", argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


class ShowHelp(argparse.Action):
    """``--help`` shows the first group and the names of the other flags; ``--help_all`` shows every group."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str = "", is_full: bool = False) -> None:
        super().__init__(option_strings, dest=dest, default=argparse.SUPPRESS, nargs=0, help=help)
        self._is_full = is_full

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help() if self._is_full else short_help(parser), end="")
        parser.exit()


def short_help(parser: argparse.ArgumentParser) -> str:
    """The first group, and the names of the flags in the others."""
    first, *others = [group for group in parser._action_groups if _names(group._group_actions)]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(parser.description)
    formatter.start_section(first.title)
    formatter.add_arguments(first._group_actions)
    formatter.end_section()
    lines = [f"  {group.title}: {_names(group._group_actions)}" for group in others]
    wrapped = [textwrap.fill(line, _width(), subsequent_indent="    ", break_on_hyphens=False) for line in lines]
    return "\n".join([formatter.format_help(), "Further flags, explained by --help_all:", *wrapped, ""])


def _width() -> int:
    return min(shutil.get_terminal_size().columns - 2, MAX_WIDTH)


def _names(actions: Iterable[argparse.Action]) -> str:
    shown = (action for action in actions if action.option_strings and action.help != argparse.SUPPRESS)
    return " ".join(action.option_strings[0] for action in shown)
