"""Bodies of other chat APIs, translated into the body of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lightserve.errors import NotSupportedYetError
from lightserve.httpserver.chat.request import PART_SEPARATOR, ChatBody, TemplateFields
from lightserve.httpserver.fields.generation import TokenRuleFields, validate_supported
from lightserve.httpserver.fields.grammar import GrammarFactory
from lightserve.httpserver.fields.images import ImageFields
from lightserve.httpserver.fields.sampling import PARAM_NAMES
from lightserve.httpserver.fields.shared import PromptFields
from lightserve.httpserver.fields.unsupported import UNSUPPORTED

C = TypeVar("C", bound="TranslatedChat")

TOKEN_ID_FIELDS = ("return_token_ids", "return_tokens_as_token_ids")  # these APIs have no place for token ids
# fields of a chat that other APIs do not define; clients may send them all the same
EXTRA_FIELDS = frozenset(
    {
        *PARAM_NAMES,
        *PromptFields.model_fields,
        *TokenRuleFields.model_fields,
        *TemplateFields.model_fields,
        *ImageFields.model_fields,
        *UNSUPPORTED,
        "allowed_token_ids",
        "bad_words",
        "chat_template",
        "do_sample",
        "logit_bias",
        "no_stop_trim",
        "request_id",
        "rid",
        "seed",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "token_healing",
    }
)
OTHER_FIELDS = EXTRA_FIELDS.union(TOKEN_ID_FIELDS)


class TranslatedChat(ChatBody):
    """A chat whose API has another name for ``response_format``."""

    format_name: ClassVar[str] = "response_format"

    def grammars(self) -> Iterator[tuple[str, GrammarFactory]]:
        for name, make in super().grammars():
            yield self.format_name if name == "response_format" else name, make


def translate_chat(model: type[C], fields: Mapping[str, Any], extra: Mapping[str, Any] | None) -> C:
    """The chat with these fields, and with the EXTRA_FIELDS in ``extra``."""
    for name in TOKEN_ID_FIELDS:
        if (extra or {}).get(name):
            raise NotSupportedYetError(name, name)
    shared = {name: value for name, value in (extra or {}).items() if name in EXTRA_FIELDS}
    given = {name: value for name, value in fields.items() if value is not None}
    return validate_supported(model, {**shared, **given})


@dataclass(frozen=True, slots=True, eq=False)
class TextOrParts:
    """Annotates a ``str``: the text may also be a list of text parts."""

    param: str  # the field that an error names
    media: frozenset[str]  # types of parts that are not text
    kinds: Mapping[str, str]  # type of a text part: the field that has its text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._join, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        string = {"type": "string"}
        parts = [
            {"type": "object", "required": ["type", field], "properties": {"type": {"const": kind}, field: string}}
            for kind, field in self.kinds.items()
        ]
        return {"anyOf": [string, {"type": "array", "items": {"anyOf": parts}}]}

    def _join(self, value: Any) -> Any:
        return PART_SEPARATOR.join(map(self.text_of, value)) if isinstance(value, list) else value

    def text_of(self, content_part: Any) -> str:
        """It raises if this is no text part."""
        kind = content_part.get("type") if isinstance(content_part, dict) else None
        if isinstance(kind, str) and kind in self.media:
            raise NotSupportedYetError(f"a part of type {kind!r}", self.param)
        text = content_part.get(self.kinds[kind]) if isinstance(kind, str) and kind in self.kinds else None
        if not isinstance(text, str):
            raise PydanticCustomError("part", f"a part must have a text and one of the types {', '.join(self.kinds)}")
        return text
