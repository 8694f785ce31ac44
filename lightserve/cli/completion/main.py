"""``lightserve completion SHELL``: a script that completes commands, flags and their values."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.cli.completion.flags import SHELLS, all_commands
from lightserve.cli.completion.scripts import SCRIPTS
from lightserve.config.parse import Parser

HOW_TO = """\
bash: lightserve completion bash > ~/.local/share/bash-completion/completions/lightserve
zsh:  lightserve completion zsh > _lightserve, in a folder of $fpath
fish: lightserve completion fish > ~/.config/fish/completions/lightserve.fish"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="lightserve completion", description="Print a completion script for a shell.", epilog=HOW_TO)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    args = parser.parse(argv)
    print(SCRIPTS[args.shell](all_commands()), end="")
    return 0
