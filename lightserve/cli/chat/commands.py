"""What a line that begins with / does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightserve.cli.chat.client import ChatClient
from lightserve.cli.chat.conversation import OPTIONS, Conversation
from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.utils.spelling import nearest


class QuitError(Exception):
    """The user wants to leave."""


@dataclass(frozen=True)
class Outcome:
    """What to print, and whether the last question is to be answered again."""

    text: str = ""
    retries: bool = False


@dataclass(frozen=True)
class Commands:
    conversation: Conversation
    client: ChatClient

    def run(self, line: str) -> Outcome:
        name, _, argument = line.partition(" ")
        if name not in TABLE:
            near = nearest(name, TABLE)
            raise InvalidRequestError(
                f"unknown command {name}" + (f"; did you mean {near}?" if near else "; try /help")
            )
        return TABLE[name].function(self, argument.strip())

    def help(self, _: str) -> Outcome:
        lines = [f"{f'{name} {command.argument}':22} {command.help}" for name, command in TABLE.items() if command.help]
        return Outcome("\n".join([*lines, *KEYS]))

    def system(self, argument: str) -> Outcome:
        if not argument:
            return Outcome(self.conversation.system or "no system prompt; /system TEXT sets one, /system - removes it")
        self.conversation.system = "" if argument == "-" else argument
        return Outcome("system prompt removed" if argument == "-" else "system prompt set")

    def reset(self, _: str) -> Outcome:
        self.conversation.messages.clear()
        return Outcome("new conversation")

    def retry(self, _: str) -> Outcome:
        if not self.conversation.remove_last_answer():
            raise InvalidRequestError("nothing to retry: no question was sent yet")
        return Outcome(retries=True)

    def model(self, argument: str) -> Outcome:
        names = self.client.model_names()
        if argument and argument not in names:
            raise InvalidRequestError(f"the server has no model {argument!r}; it has {', '.join(names)}")
        self.conversation.model = argument or self.conversation.model
        return Outcome("\n".join(f"{'*' if name == self.conversation.model else ' '} {name}" for name in names))

    def set(self, argument: str) -> Outcome:
        name, _, value = argument.partition(" ")
        if name:
            self.conversation.set_option(name, value.strip())
        options = [f"{key} {value}" for key, value in self.conversation.options.items()]
        return Outcome("\n".join(options) or f"no option is set; there are {', '.join(OPTIONS)}")

    def save(self, argument: str) -> Outcome:
        if not argument:
            raise InvalidRequestError("/save needs the name of a file")
        path = Path(argument).expanduser()
        try:
            with path.open("x") as file:  # never over another file
                file.write(self.conversation.as_json() + "\n")
        except OSError as error:
            raise LightserveError(f"{path}: cannot be written ({error.strerror})") from error
        return Outcome(f"saved as {path}")

    def quit(self, _: str) -> Outcome:
        raise QuitError


@dataclass(frozen=True)
class Command:
    function: Callable[[Commands, str], Outcome]
    argument: str
    help: str  # "": a second name of another command


TABLE = {
    "/help": Command(Commands.help, "", "this list"),
    "/system": Command(Commands.system, "[TEXT]", "show or set the system prompt; -: none"),
    "/reset": Command(Commands.reset, "", "forget the conversation, and keep the system prompt"),
    "/clear": Command(Commands.reset, "", ""),
    "/retry": Command(Commands.retry, "", "answer the last question again"),
    "/model": Command(Commands.model, "[NAME]", "list the server's models, or use another one"),
    "/set": Command(Commands.set, "[OPTION [VALUE]]", f"sampling: {', '.join(OPTIONS)}"),
    "/save": Command(Commands.save, "FILE", "write the conversation as JSON"),
    "/quit": Command(Commands.quit, "", "leave; also /exit and Ctrl-D"),
    "/exit": Command(Commands.quit, "", ""),
}
KEYS = ('"""                    begins and ends a message of several lines', "Ctrl-C                 stops an answer")
