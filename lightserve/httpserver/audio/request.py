"""The form of /v1/audio/transcriptions, and the chats that it becomes: one for each part of a long sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from lightserve.errors import NotSupportedYetError
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.fields.generation import validate_supported
from lightserve.httpserver.http.body import Body, JsonObject, validate
from lightserve.httpserver.http.validation_errors import listed

MAX_PROMPT = 16_384  # characters
LANGUAGE = r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})?$"  # "de", or "pt-BR"
INSTRUCTION = "Transcribe the speech."
REFUSED = ("timestamp_granularities[]", "include[]", "known_speaker_names[]", "known_speaker_references[]")
NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "seed": int,
    "max_completion_tokens": int,
}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class TranscriptionForm(Body):
    """OpenAI's fields, and some of vLLM's."""

    model: str | None = None
    language: Annotated[str, Field(pattern=LANGUAGE)] | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    response_format: Literal["text", "json"] | None = None  # in the order of LogFormat: typing takes both for one
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    stream: bool | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def instruction(self) -> str:
        """What stands behind the sound in the prompt."""
        language = f" The language is {self.language}." if self.language else ""
        context = f" Context: {self.prompt}" if self.prompt else ""
        return INSTRUCTION + language + context

    def chat(self) -> ChatBody:
        """Of one part of the sound, which is read already."""
        sound = {"type": "audio_url", "audio_url": "data:"}
        value: JsonObject = {
            "messages": [{"role": "user", "content": [sound, {"type": "text", "text": self.instruction}]}],
            "model": self.model,
            "temperature": self.temperature or 0.0,
            "top_p": self.top_p,
            "seed": self.seed,
            "max_completion_tokens": self.max_completion_tokens,
        }
        return validate_supported(ChatBody, value)


def read_fields(fields: Mapping[str, str]) -> TranscriptionForm:
    """Of the texts of a form."""
    refused = [name for name in REFUSED if name in fields]
    if refused:
        raise NotSupportedYetError(listed(refused), refused[0])
    return validate(TranscriptionForm, {name: _value(name, text) for name, text in fields.items()})


def _value(name: str, text: str) -> Any:
    """A text that is no number stays as it is, and is refused later."""
    if name == "stream":
        return BOOLEANS.get(text.lower(), text)
    if name not in NUMBERS:
        return text
    try:
        return NUMBERS[name](text)
    except ValueError:
        return text
