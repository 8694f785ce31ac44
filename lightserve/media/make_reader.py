"""Makes the reader of a model's images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from lightserve.media.fetch.fetcher import Fetcher
from lightserve.media.layout import ImageLayout
from lightserve.media.reader import ImageReader
from lightserve.media.video_texts import VideoTexts
from lightserve.model_files.config.images import pair_around, placeholder_of, video_tokens_of
from lightserve.model_files.source import ModelSource
from lightserve.model_files.tokenizer.tokenizer import Tokenizer


def make_reader(
    source: ModelSource,
    layout: ImageLayout,
    tokenizer: Tokenizer | None,
    limits: tuple[Mapping[str, int], int],
    fetcher: Fetcher | None = None,
) -> ImageReader:
    """``limits``: media of a request by kind, and bytes of a file."""
    placeholder, pair = placeholder_of(source), pair_around(source)
    if tokenizer is None:
        return ImageReader(layout, placeholder, "", *limits, fetcher, pair)
    text = tokenizer.id_to_token(placeholder) or ""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    video = VideoTexts.of(tokenizer, video_tokens_of(source)) if "video" in layout.kinds else None
    return ImageReader(layout, placeholder, text, *limits, fetcher, pair, encode, video)
