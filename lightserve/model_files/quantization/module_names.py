"""Which linears the lists of a ``quantization_config`` mean. Names are those of the checkpoint, before any fusion."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from lightserve.errors import ModelFilesError

REGEX = "re:"
# The last part of the names of modules that are not of the class Linear, and of the output head, which is.
EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_positions")
HEADS = ("lm_head", "output", "output_layer", "embed_out")


def last_part(module: str) -> str:
    return module.rpartition(".")[2]


def is_linear(module: str) -> bool:
    """Whether transformers implements it as a linear."""
    return last_part(module) not in EMBEDDINGS


def is_in_layer(module: str) -> bool:
    """Whether it is a linear of a numbered layer. Most tools quantise only these."""
    return is_linear(module) and any(component.isdigit() for component in module.split("."))


def is_head(module: str) -> bool:
    return last_part(module) in HEADS


def compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelFilesError(f"quantization: {pattern[:100]!r} is not a regular expression ({error})") from error


def is_listed(module: str, names: Iterable[str]) -> bool:
    """Whether one of ``names`` means the module: itself, parts of its name, a pattern or a regular expression.

    ``mlp.gate`` means all modules with these parts, ``model.layers.3`` all of a layer. A pattern has ``*``, a regular
    expression begins with ``re:``.
    """
    return any(_means(name, _plain(module)) for name in names)


def _means(name: str, module: str) -> bool:
    if name.startswith(REGEX):
        return compile_pattern(name.removeprefix(REGEX)).match(module) is not None
    if "*" in name:
        return fnmatch.fnmatchcase(module, _plain(name))
    return f".{_plain(name)}." in f".{module}."


def _plain(name: str) -> str:
    """Without the name of the language model within a multimodal one."""
    return name.removesuffix(".").replace("language_model.", "")
