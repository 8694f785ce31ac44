"""The ``lightserve`` command. A subcommand is a module, imported only when it is used: ``--help`` needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from lightserve import __version__
from lightserve.errors import LightserveError, with_docs
from lightserve.utils.spelling import nearest

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    help: str
    usage: str
    module: str  # with a function main(argv) that returns an exit code


COMMANDS = {
    "serve": Command("serve a model over HTTP", "[MODEL] [flags]", "lightserve.cli.serve"),
    "engine": Command("compute for servers on other machines", "[MODEL] [flags]", "lightserve.cli.engine"),
    "chat": Command("chat with a running server in this terminal", "[--url URL]", "lightserve.cli.chat.main"),
    "generate": Command("answer one prompt, without a server", "[PROMPT] [flags]", "lightserve.offline.generate"),
    "run-batch": Command("run a file of requests", "-i IN -o OUT [MODEL] [flags]", "lightserve.cli.run_batch.main"),
    "bench": Command("measure a server, a model or the kernels", "NAME [flags]", "lightserve.cli.bench"),
    "parity": Command("compare a model with transformers", "[MODEL] [flags]", "lightserve.parity.main"),
    "models": Command("list supported models, and those on this machine", "", "lightserve.cli.models"),
    "doctor": Command("report what this machine has, and what is missing", "", "lightserve.cli.doctor"),
    "conformance": Command(
        "check that a device computes what models need", "[--device NAME]", "lightserve.conformance.main"
    ),
    "cluster": Command("make the keys of a cluster", "keygen DIR", "lightserve.cli.cluster"),
    "deploy": Command("serve replicas on a Ray cluster", "[MODEL] --replicas N", "lightserve.cli.deploy"),
    "status": Command("show the replicas on a Ray cluster", "", "lightserve.cli.status"),
    "drain": Command("replace a replica, or those of a node", "REPLICA|NODE", "lightserve.cli.drain"),
    "undeploy": Command("end the replicas on a Ray cluster", "", "lightserve.cli.undeploy"),
    "completion": Command("print a completion script for a shell", "bash|zsh|fish", "lightserve.cli.completion.main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except LightserveError as error:
        return _fail(with_docs(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it again at exit
        return 0


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] == "--version":
        print(f"lightserve {__version__}")
        return 0
    if argv[0] in COMMANDS:
        return run_command(argv[0], argv[1:])
    if argv[0].startswith("-") or " " in argv[0]:  # as in versions without subcommands: lightserve "Who are you?"
        return run_command("generate", argv)
    near = nearest(argv[0], COMMANDS)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(COMMANDS)}"
    return _fail(f"unknown command {argv[0]!r}; {hint} (a prompt: lightserve generate {argv[0]!r})")


def run_command(name: str, argv: Sequence[str]) -> int:
    code: int = import_module(COMMANDS[name].module).main(argv)
    return code


def help_text() -> str:
    lines = [f"lightserve {__version__} serves large language models.", "", "usage: lightserve COMMAND ...", ""]
    width = max(map(len, COMMANDS))
    lines += [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`lightserve COMMAND --help` explains a command; --version shows the version."])


def _fail(message: str) -> int:
    print(f"lightserve: {message}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
