"""The images and sounds of a chat: they become tokens of its prompt, and parts of the request for the engine."""

from __future__ import annotations

from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.images import check_beam_search, reader_of

WHAT = {"video": "a video", "audio": "a sound"}


async def read_images(context: ServerContext, body: ChatBody) -> None:
    """Read the images of the messages, once: several functions render the same body."""
    sources = [source for message in body.messages for source in message.image_sources]
    if not sources or body.read_images:
        return
    reader = reader_of(context, sources[0].param, WHAT.get(sources[0].kind, "an image"))
    if body.beam_width is not None:
        check_beam_search(context, "use_beam_search")
    body.read_images = await reader.read_all(sources, body.cache_salt or "", body.pixel_limits)


def with_image_texts(context: ServerContext, body: ChatBody, prompt: str) -> str:
    """The prompt with the texts that the model has around the tokens of an image."""
    return reader_of(context, "messages").write(prompt, body.read_images) if body.read_images else prompt


def with_placeholders(context: ServerContext, body: ChatBody, ids: list[int]) -> list[int]:
    """The prompt with a token for each part of an image."""
    return reader_of(context, "messages").expand(ids, body.read_images) if body.read_images else ids
