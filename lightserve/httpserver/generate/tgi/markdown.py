"""Images in the texts of TGI's clients: ``![](url)``."""

from __future__ import annotations

import re

from lightserve.httpserver.context import ServerContext
from lightserve.media.sources import ImageSource

IMAGE = re.compile(r"!\[\]\(((?:data|https?):[^()\s]*)\)")  # other links stay text


def split_images(context: ServerContext, text: str) -> tuple[str, list[ImageSource]]:
    """The text with the model's token in place of each image, and the images. Without vision all of it is text."""
    if context.images is None:
        return text, []
    urls: list[str] = IMAGE.findall(text)
    if not urls:
        return text, []
    shown = "".join(context.tokenizer.id_to_token(token_id) or "" for token_id in context.images.image_ids)
    return IMAGE.sub(lambda _: shown, text), [ImageSource(url, param="inputs") for url in urls]
