"""The text of a sound as OpenAI writes it, whole or as events."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from lightserve.errors import LightserveError
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.sse import EventWriter
from lightserve.messages.output import StrOut

DONE = b"data: [DONE]\n\n"


class TranscriptWriter(EventWriter):
    """Parts are generated together, and written one after the other."""

    def __init__(self, log: AccessLog, num_parts: int) -> None:
        self._log = log
        self._texts = [""] * num_parts
        self._has_ended = [False] * num_parts
        self._written = 0  # characters of the text

    @property
    def text(self) -> str:
        """Up to the end of the first part that has not ended."""
        texts = []
        for text, has_ended in zip(self._texts, self._has_ended, strict=True):
            texts.append(text.strip() if has_ended else text.lstrip())
            if not has_ended:
                break
        return " ".join(text for text in texts if text)

    def add(self, outs: Iterable[tuple[int, StrOut]]) -> None:
        for index, out in outs:
            self._texts[index] += out.text
            self._has_ended[index] |= out.finish_reason is not None

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        """White space at the end of a text waits: it may be the last of its part."""
        self.add(outs)
        text = self.text.rstrip()
        delta, self._written = text[self._written :], max(len(text), self._written)
        return _event({"type": "transcript.text.delta", "delta": delta}) if delta else b""

    def end(self) -> bytes:
        return _event({"type": "transcript.text.done", **self.body()}) + DONE

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return _event(error_object(error, request_id)) + DONE

    def body(self) -> JsonObject:
        log, output = self._log, self._log.output_tokens
        usage = {
            "type": "tokens",
            "input_tokens": log.prompt_tokens,
            "input_token_details": {
                "audio_tokens": log.audio_tokens,
                "text_tokens": log.prompt_tokens - log.audio_tokens,
            },
            "output_tokens": output,
            "total_tokens": log.prompt_tokens + output,
        }
        return {"text": self.text, "usage": usage}


async def transcript(generation: Generation, writer: TranscriptWriter) -> str:
    """Run the generation to its end."""
    async with generation:
        async for outs in generation:
            writer.add(outs)
    return writer.text


def _event(value: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
