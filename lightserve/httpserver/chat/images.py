"""The images of a chat: they become tokens of its prompt, and parts of the request for the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightserve.errors import InvalidRequestError, TextOnlyError
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest

if TYPE_CHECKING:
    from lightserve.media.reader import ImageReader


async def read_images(context: ServerContext, body: ChatBody) -> None:
    """Read the images of the messages, once: several functions render the same body."""
    sources = [source for message in body.messages for source in message.image_sources]
    if not sources or body.read_images:
        return
    reader = reader_of(context, sources[0].param)
    if body.beam_width is not None:
        raise InvalidRequestError("a beam search takes no images; leave out use_beam_search", "messages")
    body.read_images = await reader.read_all(sources, body.cache_salt or "")


def reader_of(context: ServerContext, param: str) -> ImageReader:
    if context.images is None:
        raise TextOnlyError("an image", param)
    return context.images


def with_image_texts(context: ServerContext, body: ChatBody, prompt: str) -> str:
    """The prompt with the texts that the model has around the tokens of an image."""
    return reader_of(context, "messages").write(prompt, body.read_images) if body.read_images else prompt


def with_placeholders(context: ServerContext, body: ChatBody, ids: list[int]) -> list[int]:
    """The prompt with a token for each part of an image."""
    return reader_of(context, "messages").expand(ids, body.read_images) if body.read_images else ids


def with_images(context: ServerContext, body: ChatBody, prompt_request: PromptRequest) -> PromptRequest:
    if not body.read_images:
        return prompt_request
    images = reader_of(context, "messages").locate(prompt_request.prompt_ids, body.read_images)
    return replace(prompt_request, images=images)
