"""Completion scripts. They contain all words, so that Tab starts no Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightserve.cli.completion.flags import CommandFlags, Flag

HELP_LENGTH = 70  # characters of a flag's description


def bash(commands: Sequence[CommandFlags]) -> str:
    cases = "\n".join(_bash_case(command) for command in commands)
    names = " ".join([*(command.name for command in _first(commands)), "--help", "--version"])
    return f"""\
# Completion of lightserve for bash. An empty reply completes paths.
_lightserve() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} flags="" dashed="" words=""
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{names}" -- "$current"))
        return
    fi
    local command=${{COMP_WORDS[1]}}
    if [[ $command == bench && $COMP_CWORD -gt 2 ]]; then
        command="bench ${{COMP_WORDS[2]}}"
    fi
    case $command in
{cases}
    esac
    if [[ $current == --*-* ]]; then
        words=$dashed
    elif [[ $current == -* ]]; then
        words=$flags
    elif [[ $COMP_CWORD -ne 2 ]]; then
        words=""
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _lightserve lightserve
"""


def _bash_case(command: CommandFlags) -> str:
    with_choices = [flag for flag in command.flags if flag.choices]
    replies = "".join(
        f"            {'|'.join(flag.spellings)})\n"
        f'                COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$current"))\n'
        "                return ;;\n"
        for flag in with_choices
    )
    with_value = [spelling for flag in command.flags if flag.takes_value for spelling in flag.spellings]
    if with_value:
        free = [spelling for spelling in with_value if not any(spelling in flag.spellings for flag in with_choices)]
        replies += f"            {'|'.join(free)})\n                return ;;\n" if free else ""
    inner = f"        case $previous in\n{replies}        esac\n" if replies else ""
    flags = " ".join(flag.name for flag in command.flags)
    dashed = " ".join(spelling for flag in command.flags for spelling in flag.dashed)
    words = " ".join(command.words)
    return f'    "{command.name}")\n{inner}        flags="{flags}" dashed="{dashed}" words="{words}" ;;'


def zsh(commands: Sequence[CommandFlags]) -> str:
    described = "\n".join(f"        {_quoted(f'{command.name}:{command.help}')}" for command in _first(commands))
    cases = "\n".join(_zsh_case(command) for command in commands)
    return f"""\
#compdef lightserve
# Completion of lightserve for zsh.
_lightserve() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    if [[ $command == bench ]] && (( CURRENT > 2 )); then
        command="bench $words[2]"
        shift words
        (( CURRENT-- ))
    fi
    case $command in
{cases}
    esac
}}
if [[ $funcstack[1] == _lightserve ]]; then
    _lightserve "$@"
else
    compdef _lightserve lightserve
fi
"""


def _zsh_case(command: CommandFlags) -> str:
    rest = f"1:name:({' '.join(command.words)})" if command.words else "*:path:_files"
    specs = [_quoted(_zsh_spec(flag)) for flag in command.flags] + [_quoted(rest)]
    listed = " \\\n            ".join(specs)
    return f'    "{command.name}")\n        _arguments -s \\\n            {listed} ;;'


def _zsh_spec(flag: Flag) -> str:
    value = ""
    if flag.takes_value:
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
    text = re.sub(r"[][:\\]", " ", _short(flag.help))
    return f"{flag.name}[{text}]{value}"


FISH_FUNCTION = """\
# Completion of lightserve for fish.
function __lightserve_command_is
    set -l typed (commandline -opc)
    if test "$typed[2]" = bench; and set -q typed[3]
        test "$typed[2] $typed[3]" = "$argv"
    else
        test "$typed[2]" = "$argv"
    end
end
"""


def fish(commands: Sequence[CommandFlags]) -> str:
    lines = [FISH_FUNCTION]
    is_first = "-n '__lightserve_command_is \"\"'"
    lines += [
        f"complete -c lightserve -f {is_first} -a {command.name} -d {_quoted(command.help)}"
        for command in _first(commands)
    ]
    for command in commands:
        condition = f"-n '__lightserve_command_is {command.name}'"
        if command.words:
            lines.append(f"complete -c lightserve -f {condition} -a {_quoted(' '.join(command.words))}")
        lines += [f"complete -c lightserve {condition} {_fish_spec(flag)}" for flag in command.flags]
    return "\n".join([*lines, ""])


def _fish_spec(flag: Flag) -> str:
    parts = [f"-l {flag.name.removeprefix('--')}", f"-d {_quoted(_short(flag.help))}"]
    if flag.choices:
        parts.append(f"-x -a {_quoted(' '.join(flag.choices))}")
    elif flag.takes_value:
        parts.append("-r")
    return " ".join(parts)


def _first(commands: Sequence[CommandFlags]) -> list[CommandFlags]:
    """Those that follow ``lightserve`` itself."""
    return [command for command in commands if " " not in command.name]


def _short(text: str) -> str:
    first = re.split(r"[;(]", text)[0].strip()
    return first if len(first) <= HELP_LENGTH else first[: HELP_LENGTH - 3] + "..."


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS = {"bash": bash, "fish": fish, "zsh": zsh}
