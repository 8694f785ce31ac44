"""The prompts of --pinned_prefixes: a request names one by ``task_id``, and its own prompt follows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightserve.errors import OptionError

if TYPE_CHECKING:
    from lightserve.model_files.tokenizer.tokenizer import Tokenizer

MAX_NAME = 256  # characters
Name = str | int


def read_pinned_prefixes(path: str) -> dict[str, str]:
    """The texts by their names. The file has an object ``{name: text}``, or RTP-LLM's list of task_id and prompt."""
    import yaml  # here, because most servers have no such file

    try:
        raw = Path(path).read_text(encoding="utf-8")
        content = json.loads(raw) if path.endswith(".json") else yaml.safe_load(raw)
    except OSError as error:
        raise OptionError(f"pinned_prefixes={path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"pinned_prefixes={path}: is neither JSON (*.json) nor YAML: {reason}") from error
    pairs = _pairs(path, content)
    prompts: dict[str, str] = {}
    for name, text in pairs:
        if not isinstance(name, Name) or isinstance(name, bool) or not 0 < len(str(name)) <= MAX_NAME:
            raise OptionError(f"pinned_prefixes={path}: {name!r} is no name; use 1 to {MAX_NAME} characters")
        if not isinstance(text, str) or not text:
            raise OptionError(f"pinned_prefixes={path}: the prompt {str(name)!r} must be a text that is not empty")
        if str(name) in prompts:
            raise OptionError(f"pinned_prefixes={path}: there are two prompts {str(name)!r}")
        prompts[str(name)] = text
    if not prompts:
        raise OptionError(f"pinned_prefixes={path}: has no prompt")
    return prompts


def _pairs(path: str, content: Any) -> list[tuple[Any, Any]]:
    if isinstance(content, Mapping):
        return list(content.items())
    if isinstance(content, list) and all(
        isinstance(entry, Mapping) and {*entry} == {"task_id", "prompt"} for entry in content
    ):
        return [(entry["task_id"], entry["prompt"]) for entry in content]
    raise OptionError(
        f'pinned_prefixes={path}: must be an object as {{"support": "You are ..."}}, or a list of objects with task_id '
        "and prompt"
    )


def encode_pinned_prefixes(path: str | None, tokenizer: Tokenizer | None) -> dict[str, list[int]]:
    """The token ids by names; none without a path."""
    if path is None:
        return {}
    if tokenizer is None:
        raise OptionError(f"pinned_prefixes={path}: this model has no tokenizer to encode them")
    return {name: tokenizer.encode(text) for name, text in read_pinned_prefixes(path).items()}


def after_pinned_prefix(static_ids: list[int], ids: list[int], bos_id: int | None) -> list[int]:
    """Both prompts in one. Only the first may begin with the token that begins a text."""
    has_both = bos_id is not None and static_ids[:1] == ids[:1] == [bos_id]
    return [*static_ids, *(ids[1:] if has_both else ids)]
