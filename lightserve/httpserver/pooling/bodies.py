"""The bodies of the pooling endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.fields.shared import SchedulingFields
from lightserve.httpserver.http.body import Body

MAX_INPUTS = 2048  # of one request, as OpenAI
MAX_MESSAGES = 2048  # of one chat
MAX_LABELS = 128

_TEXT = {"type": "string"}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": [_TEXT, _IDS]}}


def _inputs(value: Any) -> list[str | list[int]]:
    """One input or several, each a text or token ids, as a list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    inputs = [value] if is_one else value
    if not isinstance(inputs, list) or not all(map(_is_input, inputs)):
        raise PydanticCustomError("input", "a string, a list of strings, token ids or a list of lists of token ids")
    if not inputs or not all(inputs):
        raise PydanticCustomError("input", "must not be empty")
    _check_count(len(inputs))
    return inputs


def _is_input(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int})


def _check_count(count: int) -> None:
    if count > MAX_INPUTS:
        raise PydanticCustomError("input", f"at most {MAX_INPUTS} inputs, found {count}")


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("texts", "a string or a list of strings, not empty")
    _check_count(len(texts))
    return texts


def _documents(value: Any) -> list[str]:
    """Texts, or Cohere's and Jina's objects with a field text."""
    texts = [doc.get("text") if isinstance(doc, dict) else doc for doc in value] if isinstance(value, list) else value
    return _texts(texts)


Inputs = Annotated[
    list[str | list[int]], PlainValidator(_inputs), WithJsonSchema({"anyOf": [_TEXT | {"minLength": 1}, _IDS, _MANY]})
]
_TEXTS = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT}
Texts = Annotated[list[str], PlainValidator(_texts), WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})]
_DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}]}
Documents = Annotated[list[str], PlainValidator(_documents), WithJsonSchema({**_TEXTS, "items": _DOCUMENT})]
Dimensions = Annotated[int, Field(ge=1, lt=2**31)]
Truncation = Annotated[int, Field(ge=-1, lt=2**31)]
Instruction = Annotated[str, Field(min_length=1, max_length=4096)]


class PoolingFields(SchedulingFields):
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None  # vLLM's; -1: to what the model takes; default: an error

    @model_validator(mode="after")
    def _check_truncation(self) -> PoolingFields:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens: 0 is not allowed; give a positive number or -1", "truncate_prompt_tokens"
            )
        return self


class EmbeddingsBody(PoolingFields):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None  # the first ones of an embedding; default: all
    normalize: bool | None = None  # default true: embeddings have length 1
    prompt_name: str | None = None  # a prompt of the model's files, such as query


class InputBody(PoolingFields):
    """Of /classify."""

    input: Inputs


class PoolingBody(InputBody):
    task: str | None = None  # vLLM's: that of the model
    input_type: Literal["query", "document"] | None = None  # for vectors of tokens; default document


class ScoreBody(PoolingFields):
    text_1: Texts  # one, or as many as text_2
    text_2: Texts
    instruction: Instruction | None = None  # of models that answer yes or no


def _score_input(value: Any) -> str | list[int]:
    if not _is_input(value) or not value:
        raise PydanticCustomError("query", "a string or token ids, not empty")
    query: str | list[int] = value
    return query


class LabelScoreBody(SchedulingFields):
    """SGLang's: how probable each label token is after the query and an item."""

    model: str | None = None
    query: Annotated[str | list[int], PlainValidator(_score_input), WithJsonSchema({"anyOf": [_TEXT, _IDS]})]
    items: Inputs
    label_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_LABELS, fail_fast=True)] | None
    ) = Field(default=None, description="a model that generates text needs them, any other ignores them")
    apply_softmax: bool | None = None  # over the labels; default: probabilities among all tokens
    item_first: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """One for each item: the query and the item without anything between them."""
        return [self._joined(index, item) for index, item in enumerate(self.items)]

    def _joined(self, index: int, item: str | list[int]) -> str | list[int]:
        query = self.query
        if isinstance(query, str) and isinstance(item, str):
            return item + query if self.item_first else query + item
        if isinstance(query, list) and isinstance(item, list):
            return item + query if self.item_first else query + item
        raise InvalidRequestError(f"items.{index}: query and items must both be texts, or both token ids", "items")


class RerankBody(PoolingFields):
    """Of Jina, Cohere and vLLM."""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0 and default: all
    return_documents: bool | None = None
    instruction: Instruction | None = None


class TeiFields(SchedulingFields):
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None

    @property
    def length(self) -> int | None:
        """As truncate_prompt_tokens."""
        return -1 if self.truncate else None


class TeiEmbedBody(TeiFields):
    inputs: Inputs
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Dimensions | None = None


class TeiRerankBody(TeiFields):
    query: str
    texts: Texts
    raw_scores: bool | None = None
    return_text: bool | None = None


def _predict_inputs(value: Any) -> tuple[bool, list[list[str]]]:
    """Whether there is one input only, and each input as one text or a pair: "a", ["a", "b"] or [["a"], ["b", "c"]]."""
    if isinstance(value, str):
        return True, [[value]]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value):
        return True, [value]
    if not isinstance(value, list) or not value or not all(map(_is_text_or_pair, value)):
        raise PydanticCustomError("inputs", "a string, a pair of strings, or a list of lists of one or two strings")
    _check_count(len(value))
    return False, value


def _is_text_or_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (1, 2) and all(isinstance(text, str) for text in value)


_PAIR = {"type": "array", "minItems": 2, "maxItems": 2, "items": _TEXT}
_PREDICT = {"anyOf": [_TEXT, _PAIR, {"type": "array", "minItems": 1, "items": {**_PAIR, "minItems": 1}}]}


class TeiPredictBody(TeiFields):
    inputs: Annotated[tuple[bool, list[list[str]]], PlainValidator(_predict_inputs), WithJsonSchema(_PREDICT)]
    raw_scores: bool | None = None


Messages = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class GetScoreBody(Body):
    """LightLLM's."""

    chat: Annotated[str, Field(min_length=1)] | Messages  # a text, or messages for the chat template
    parameters: dict[str, Any] | None = None  # ignored, as in LightLLM
    multimodal_params: dict[str, Any] | None = None
