"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.fields.generation import Count, GenerationBody, LimitedLogprobs

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, each a text or token ids, as a list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise PydanticCustomError("prompt", "a string, a list of strings, token ids or a list of lists of token ids")
    if not prompts or not all(prompts):
        raise PydanticCustomError("prompt", "must not be empty")
    return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int})


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_MANY = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}
Prompts = Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema({"anyOf": [_TEXT, _IDS, _MANY]})]


class CompletionBody(GenerationBody):
    prompt: Prompts
    best_of: Count | None = None  # generate this many and return the n with the highest mean logprob
    echo: bool | None = None
    logprobs: LimitedLogprobs | None = None
    token_healing: bool | None = None  # LightLLM's: see fields/token_healing.py

    @property
    def candidates(self) -> int:
        return max(self.best_of or 1, self.choices)

    @property
    def reports_prompt(self) -> bool:
        return bool(self.echo) or self.prompt_logprobs is not None

    @property
    def echo_top_logprobs(self) -> int | None:
        """Alternatives to each token of an echoed prompt; None: no logprobs of the echo."""
        return self.logprobs if self.echo else None

    @property
    def prompt_top_logprobs(self) -> int | None:
        given = [k for k in (self.prompt_logprobs, self.echo_top_logprobs) if k is not None]
        return max(given, default=None)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.choices:
            raise InvalidRequestError(f"best_of={self.best_of} is less than n={self.choices}", "best_of")
        if self.stream and self.candidates > self.choices:
            message = f"best_of={self.best_of}: a stream returns every output; set stream to false, or best_of to n"
            raise InvalidRequestError(message, "best_of")
        return self
