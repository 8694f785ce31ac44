"""``lightserve chat``: a chat in the terminal with a server that runs, here or elsewhere."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import threading
from collections.abc import Sequence

from lightserve.cli.chat.client import ChatClient, ServerRefusedError
from lightserve.cli.chat.commands import TABLE, Commands, QuitError
from lightserve.cli.chat.conversation import OPTIONS, Conversation
from lightserve.cli.chat.prompt import history_file, line_editing, read_message
from lightserve.cli.chat.view import AnswerView
from lightserve.config.parse import Parser
from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.server.keys import KEY_VARIABLE
from lightserve.utils.terminal import Style, printable

DEFAULT_URL = "http://127.0.0.1:8000"
UNAUTHORIZED = 401


def arguments() -> Parser:
    parser = Parser(prog="lightserve chat", description="Chat with a running server; /help lists the commands.")
    parser.add_argument("--url", metavar="URL", default=DEFAULT_URL, help="address of the server")
    parser.add_argument("--api_key", "--api-key", metavar="KEY", help=f"key of the server; default: ${KEY_VARIABLE}")
    parser.add_argument("--model", metavar="NAME", help="model of the server; default: its first")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    for name, kind in OPTIONS.items():
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        metavar = "N" if kind is int else "X"
        parser.add_argument(*spellings, type=kind, metavar=metavar, help="sampling; default: the server's")
    parser.add_argument("--no_history", "--no-history", action="store_true", help="keep no history of typed lines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    client = ChatClient(args.url, args.api_key or os.environ.get(KEY_VARIABLE))
    names = _connect(client)
    if args.model is not None and args.model not in names:
        raise InvalidRequestError(f"the server has no model {args.model!r}; it has {', '.join(names)}")
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    chat = Chat(client, Conversation(args.model or names[0], args.system, options))
    with line_editing(list(TABLE), None if args.no_history else history_file()):
        return chat.run()


def _connect(client: ChatClient) -> list[str]:
    """The server's models. A person is asked for the key if the server wants another one."""
    while True:
        try:
            return client.model_names()
        except ServerRefusedError as error:
            if error.status != UNAUTHORIZED or not sys.stdin.isatty():
                raise
            client.api_key = getpass.getpass("API key: ")
        except (ValueError, LookupError, TypeError) as error:
            raise LightserveError(f"{client.url}/v1/models is not a list of models; check --url") from error


class Chat:
    """Questions and answers until the user leaves. Without a terminal each line of the input is a question."""

    def __init__(self, client: ChatClient, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation
        self._commands = Commands(conversation, client)
        self._style = Style(sys.stdout)
        self._is_interactive = sys.stdin.isatty()
        self._exit_code = 0

    def run(self) -> int:
        if self._is_interactive:
            print(f"{printable(self._conversation.model)} at {self._client.url}; /help lists the commands")
        while True:
            try:
                self._handle(read_message(self._style).strip())
            except (EOFError, QuitError):
                return self._exit_code
            except KeyboardInterrupt:  # at the prompt; one that stops an answer does not arrive here
                print("\n/quit or Ctrl-D leaves")

    def _handle(self, message: str) -> None:
        if not message:
            return
        try:
            if message.startswith("/"):
                outcome = self._commands.run(message)
                print(printable(outcome.text), end="\n" if outcome.text else "")
                if not outcome.retries:
                    return
            else:
                self._conversation.add("user", message)
            self._answer()
        except LightserveError as error:
            self._report(error)

    def _answer(self) -> None:
        view = AnswerView()
        is_stopped = False
        try:
            view.show(self._client.stream(self._conversation.request()))
        except KeyboardInterrupt:
            is_stopped = True
        except LightserveError:
            self._conversation.remove_last_question()
            raise
        self._conversation.add("assistant", view.content)
        if self._is_interactive:
            print(view.summary(is_stopped))

    def _report(self, error: LightserveError) -> None:
        """A chat goes on after an error. Input from a file ends with its exit code."""
        print(self._style.paint("red", f"error: {printable(str(error))}"), file=sys.stderr)
        if not self._is_interactive:
            self._exit_code = 1
