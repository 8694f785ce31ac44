"""POST /v1/audio/transcriptions, OpenAI's: the text of a sound, from a model that hears and answers."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lightserve.errors import InvalidRequestError, TextOnlyError
from lightserve.httpserver.audio.request import LANGUAGE, TranscriptionForm, read_fields
from lightserve.httpserver.audio.response import TranscriptWriter, transcript
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import Generation, PromptRequest
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response
from lightserve.httpserver.http.multipart import Form, form_schema, read_form
from lightserve.httpserver.http.sse import OPENAPI_STREAM, EventStream, GenerationEvents, until_disconnect
from lightserve.media.audio.compressed import as_wav
from lightserve.media.audio.split import parts_of
from lightserve.media.audio.wav import read_header
from lightserve.media.sources import ReadImage

if TYPE_CHECKING:
    from lightserve.media.reader import ImageReader  # it needs Pillow

MB = 10**6
PATH = "/v1/audio/transcriptions"
_TEXT = {"type": "string"}
_FORM = form_schema(
    [],
    {
        "model": _TEXT,
        "language": {"type": "string", "pattern": LANGUAGE},
        "prompt": _TEXT,
        "response_format": {"type": "string", "enum": ["text", "json"]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "stream": {"type": "boolean"},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "seed": {"type": "integer"},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
    },
)


@dataclass(frozen=True, slots=True)
class Prepared:
    generation: Generation  # a prompt for each part of the sound
    log: AccessLog


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(PATH, responses=OPENAPI_STREAM, openapi_extra=_FORM)
    async def transcriptions(request: Request) -> Response:
        """The text of a sound. A long one is divided where it is quiet."""
        reader = _reader(context)
        file = io.BytesIO()
        form = await read_form(request, Form(file, context.config.max_audio_mb * MB, "--max_audio_mb"))
        fields = read_fields(form.fields)
        context.check_fields(request, fields)
        if form.filename is None:
            raise InvalidRequestError("the form has no file", "file")
        sounds = await asyncio.to_thread(_read, reader, file.getvalue(), context.config.max_audio_seconds)
        prepared = await _prepare(context, request, fields, sounds)
        writer = TranscriptWriter(prepared.log, len(sounds))
        if fields.stream:
            events = GenerationEvents(prepared.generation, writer, prepared.log.request_id)
            return await EventStream.open(request, events)
        text = await until_disconnect(request, transcript(prepared.generation, writer))
        return PlainTextResponse(text) if fields.response_format == "text" else json_response(writer.body())

    return router


def _reader(context: ServerContext) -> ImageReader:
    if context.images is None:
        raise TextOnlyError("a transcription", "file")
    if "audio" not in context.images.layout.kinds:
        raise InvalidRequestError("this model reads no sounds", "file")
    return context.images


def _read(reader: ImageReader, data: bytes, max_seconds: int) -> list[ReadImage]:
    """In any thread."""
    try:
        data = as_wav(data, max_seconds)
        seconds = read_header(data).seconds
        if seconds > max_seconds:
            raise InvalidRequestError(f"it has {seconds:,.0f} s; the limit is {max_seconds:,} (--max_audio_seconds)")
        return [reader.read_sound(file, "") for file in parts_of(data, reader.layout.largest.seconds)]
    except InvalidRequestError as error:
        reader.stats.refused("file")
        raise InvalidRequestError(f"file: {error}", "file") from error


async def _prepare(
    context: ServerContext, request: Request, fields: TranscriptionForm, sounds: list[ReadImage]
) -> Prepared:
    log: AccessLog | None = None
    prompts: list[PromptRequest] = []
    audio_tokens = 0
    for sound in sounds:
        body = fields.chat()
        body.read_images = [sound]
        chat = await prepare_chat(context, request, body, log=log)
        log = chat.log
        audio_tokens += log.audio_tokens
        prompts += chat.prompt_requests
    assert log is not None  # a sound has a part
    log.audio_tokens = audio_tokens
    return Prepared(context.manager.generate(prompts, log), log)
