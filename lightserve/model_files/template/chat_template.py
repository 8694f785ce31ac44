"""Chat templates: Jinja from a model's files, so it runs in a sandbox and within limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, meta

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.folder import read_text
from lightserve.model_files.template.budget import IN_THREAD, ON_EVENT_LOOP, RenderBudget, RenderLimits
from lightserve.model_files.template.environment import GLOBALS, BudgetContext, TemplateEnvironment
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

MAX_TEMPLATE_LENGTH = 2**20  # characters; the longest that are known have some 50,000
MAX_MESSAGE_LENGTH = 500  # of an error: it may quote the messages
# the names that every template can use; a request's variables must not replace them
RESERVED_NAMES = frozenset({*GLOBALS, *(f"{role}_token" for role in SpecialTokens._fields)})

# what a chat may offer to a template: some templates are only for chats with tools or documents
NOTHING: dict[str, Any] = {"tools": None, "documents": None}
TOOL_AND_DOCUMENT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}],
    "documents": [{"title": "a", "text": "b"}],
}

# what the expressions of a template may raise; RecursionError is a RuntimeError
RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)

# names of templates, of which a model may have several
DEFAULT = "default"
FOR_TOOLS = "tool_use"
FOR_DOCUMENTS = "rag"


class SystemRules(NamedTuple):
    """Where a template keeps system messages; elsewhere it refuses or drops them."""

    takes_system: bool  # at the start
    takes_several: bool  # more than one at the start
    takes_late: bool  # after other messages
    takes_users_in_a_row: bool  # two messages of the user in sequence


class ChatTemplate:
    def __init__(self, text: str, special: SpecialTokens) -> None:
        self._text = text
        self._tokens = {f"{role}_token": token for role, token in special._asdict().items() if token is not None}
        self._template = _compiled(text)

    def render(self, limits: RenderLimits = IN_THREAD, /, **variables: Any) -> str:
        if self.drops_plain_text and "messages" in variables:
            variables["messages"] = [_with_parts(message) for message in variables["messages"]]
        return self._render(limits, variables)

    def _render(self, limits: RenderLimits, variables: Mapping[str, Any]) -> str:
        context = self._template.new_context({**self._tokens, **variables})
        assert isinstance(context, BudgetContext)
        context.budget = RenderBudget(limits)
        try:
            return "".join(self._template.root_render_func(context))
        except TemplateError as error:  # includes raise_exception, with which templates check roles
            raise _template_error("rejects", error) from error
        except RENDER_ERRORS as error:
            raise _template_error("cannot render", error) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        return frozenset(meta.find_undeclared_variables(self._template.environment.parse(self._text)))

    @cached_property
    def drops_plain_text(self) -> bool:
        """Whether the content of a message must be a list of parts: some templates of models that read images."""
        text = "[the text of a test]"
        return not self._shows(text, text) and self._shows(text, [{"type": "text", "text": text}])

    def _shows(self, text: str, content: Any) -> bool:
        try:
            return text in self._render(ON_EVENT_LOOP, {"messages": [{"role": "user", "content": content}]})
        except InvalidRequestError:
            return False

    @cached_property
    def system_rules(self) -> SystemRules:
        """Found by rendering short chats; it takes about a millisecond."""
        keeps = next(
            (partial(self._keeps, offered) for offered in (NOTHING, TOOL_AND_DOCUMENT) if self._keeps(offered, "user")),
            None,
        )
        if keeps is None:  # it does not render a plain chat, which says nothing about system messages
            return SystemRules(True, True, True, True)
        return SystemRules(
            takes_system=keeps("system", "user"),
            takes_several=keeps("system", "system", "user"),
            takes_late=keeps("system", "user", "assistant", "system", "user"),
            takes_users_in_a_row=keeps("user", "user", "assistant", "user", "user"),
        )

    def _keeps(self, offered: Mapping[str, Any], *roles: str) -> bool:
        """Whether the prompt for messages of these roles contains all of them."""
        texts = [f"[message {i} of a test]" for i in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            prompt = self.render(ON_EVENT_LOOP, messages=messages, **offered, add_generation_prompt=True)
        except InvalidRequestError:
            return False
        return all(text in prompt for text in texts)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _compiled(text: str) -> Template:
    if len(text) > MAX_TEMPLATE_LENGTH:
        raise TemplateError(f"it has {len(text):,} characters; the limit is {MAX_TEMPLATE_LENGTH:,}")
    try:
        return TemplateEnvironment().from_string(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of Python's compiler: too deeply nested
        raise TemplateError(f"{type(error).__name__}: {str(error)[:MAX_MESSAGE_LENGTH]}") from error


def _template_error(verb: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the model's chat template {verb} these messages: {str(error)[:MAX_MESSAGE_LENGTH]}")


class ChatTemplates:
    """Templates by name. At least one; the first one is the default if none has that name."""

    def __init__(self, texts: Mapping[str, str], special: SpecialTokens) -> None:
        self.text = "\n".join(texts.values())  # of all: each may show how the model writes calls and reasoning
        self.default_text = texts.get(DEFAULT, next(iter(texts.values())))
        self._by_name = {name: ChatTemplate(text, special) for name, text in texts.items()}
        self._by_name.setdefault(DEFAULT, next(iter(self._by_name.values())))

    def choose(self, has_tools: bool, has_documents: bool) -> ChatTemplate:
        """As transformers: ``tool_use`` for a chat with tools. And ``rag`` for one with documents."""
        wanted = [FOR_TOOLS] * has_tools + [FOR_DOCUMENTS] * has_documents + [DEFAULT]
        return next(self._by_name[name] for name in wanted if name in self._by_name)


def given_template(value: str) -> str:
    """The template of ``--chat_template``: a file, or the text itself."""
    if "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    try:
        is_file = path.is_file()
    except OSError:  # the name is too long
        is_file = False
    if not is_file:
        raise ModelFilesError(
            f"--chat_template {value[:200]}: no such file; give the path of a Jinja file, or the template itself"
        )
    return read_text(path)
