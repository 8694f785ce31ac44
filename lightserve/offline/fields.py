"""Parameters of LLM under the names that people use: max_tokens, json_schema, regex, choice, n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import NAMES, GenerationParams, GrammarSpec, unknown_parameter
from lightserve.text.grammar.specs import choice_grammar, schema_grammar

MAX_N = 1024
GRAMMARS = ("json_schema", "regex", "choice")
OWN_NAMES = ("max_tokens", "n", *GRAMMARS)


def known_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters under the names of GenerationParams."""
    for name in fields:
        if name not in NAMES and name not in OWN_NAMES:
            raise unknown_parameter(name, (*OWN_NAMES, *NAMES))
    known = {name: value for name, value in fields.items() if name not in ("max_tokens", *GRAMMARS)}
    if "max_tokens" in fields:
        if "max_new_tokens" in fields:
            raise InvalidRequestError("max_tokens and max_new_tokens are the same; give one", "max_tokens")
        known["max_new_tokens"] = fields["max_tokens"]
    grammars = {name: fields[name] for name in GRAMMARS if fields.get(name) is not None}
    if len(grammars) + (fields.get("grammar") is not None) > 1:
        raise InvalidRequestError(f"{', '.join(GRAMMARS)} and grammar exclude each other; give one", "grammar")
    for name, value in grammars.items():
        known["grammar"] = _grammar(name, value)
    return known


def repeated(params: GenerationParams, choice: int) -> GenerationParams:
    """For one of ``n`` texts of a prompt: with a seed, each has its own, the same every time."""
    seed = params.sampling.seed
    return params if seed is None else params.replace(seed=(seed + choice + 2**63) % 2**64 - 2**63)


def check_n(n: Any) -> int:
    if type(n) is not int or not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n={n!r}: must be an integer from 1 to {MAX_N}", "n")
    return n


def _grammar(name: str, value: Any) -> GrammarSpec:
    if name == "json_schema":
        schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        if isinstance(schema, Mapping):
            return schema_grammar(dict(schema))
        raise InvalidRequestError(f"json_schema: {_shown(value)} is neither a dict nor a pydantic model", name)
    if name == "regex":
        if isinstance(value, str) and value:
            return GrammarSpec("regex", value)
        raise InvalidRequestError(f"regex: {_shown(value)} is no regular expression", name)
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if is_list and all(isinstance(text, str) and text for text in value):
        return choice_grammar(list(value))
    raise InvalidRequestError(f"choice: {_shown(value)} is no list of texts", name)


def _shown(value: Any) -> str:
    return repr(value)[:100]
