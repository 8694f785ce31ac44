"""Images of requests: the fields that are about them, and their places in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lightserve.errors import InvalidRequestError, NotSupportedYetError, TextOnlyError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body
from lightserve.httpserver.prompt_request import PromptRequest
from lightserve.media.sizes import NO_LIMITS, ImageHeader, PixelLimits
from lightserve.media.sources import ImageSource, ReadImage
from lightserve.messages.media import Sight

if TYPE_CHECKING:
    from lightserve.media.reader import ImageReader

NAME = "mm_processor_kwargs"
BASE64 = "data:;base64,"

Pixels = Annotated[int, Field(ge=1, lt=2**31)]


class ProcessorFields(Body):
    """Of transformers' image processors, those that a request may set."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class ImageFields(Body):
    """vLLM's: the sizes of images in pixels, after resizing. Without images it has no effect."""

    mm_processor_kwargs: ProcessorFields | None = None

    @property
    def pixel_limits(self) -> PixelLimits:
        given = self.mm_processor_kwargs
        if given is None:
            return NO_LIMITS
        for name, value in (given.model_extra or {}).items():
            if value is not None:
                raise NotSupportedYetError(f"{NAME}.{name[:100]}", NAME)
        return PixelLimits(given.min_pixels, given.max_pixels)


def reader_of(context: ServerContext, param: str, what: str = "an image") -> ImageReader:
    if context.images is None:
        raise TextOnlyError(what, param)
    return context.images


async def read_prompt_images(context: ServerContext, sources: Sequence[ImageSource], salt: str) -> list[ReadImage]:
    """The images of a prompt that is no chat."""
    if not sources:
        return []
    param = sources[0].param
    return await reader_of(context, param, f"`{param}`").read_all(sources, salt)


def with_placeholders(context: ServerContext, ids: list[int], images: Sequence[ReadImage]) -> list[int]:
    """The prompt of a client, which has a placeholder or an empty pair for each image, with all tokens of images."""
    if not images:
        return ids
    reader = reader_of(context, "images")
    return reader.expand(reader.write_ids(reader.fill_pairs(ids), images), images)


async def count_with_images(
    context: ServerContext, ids: list[int], sources: Sequence[ImageSource | ImageHeader]
) -> int:
    """The tokens of a prompt with these images, of which some have a size only."""
    if not sources:
        return len(ids)
    named = [source for source in sources if isinstance(source, ImageSource)]
    reader = reader_of(context, "multimodal_params", "`multimodal_params`")
    read = iter(await reader.read_all(named, "")) if named else iter(())
    images = [next(read) if isinstance(source, ImageSource) else reader.image_of_size(source) for source in sources]
    return len(with_placeholders(context, ids, images))


def with_images(context: ServerContext, images: Sequence[ReadImage], prompt_request: PromptRequest) -> PromptRequest:
    """The request with the images that its prompt has."""
    if not images:
        return prompt_request
    items = reader_of(context, "images").locate(prompt_request.prompt_ids, images)
    return replace(prompt_request, images=items)


def check_beam_search(context: ServerContext, name: str) -> None:
    """Of a request with images. ``name``: the field that asks for it."""
    if context.manager.limits.sight is Sight.PROMPT:
        raise InvalidRequestError(
            f"a beam search takes no images of this model, because its prompts see themselves; leave out {name}", name
        )


def url_of(value: str) -> str:
    """A URL as it is, anything else as base64."""
    return value if value.startswith(("data:", "https:", "http:")) else BASE64 + value
