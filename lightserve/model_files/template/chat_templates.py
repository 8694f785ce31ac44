"""The chat templates of a model, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_text
from lightserve.model_files.template.chat_template import ChatTemplate
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

DEFAULT = "default"
FOR_TOOLS = "tool_use"
FOR_DOCUMENTS = "rag"


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
