"""Images of an LLM's prompts. They are read and encoded in this process."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any

from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.errors import InvalidRequestError
from lightserve.media.sources import ImageSource, ReadImage
from lightserve.messages.control import EngineInfo
from lightserve.messages.int_arrays import int32s
from lightserve.messages.media import EncodeImage, EncoderStarted, ImageEncoded, ImageItem
from lightserve.model_files.source import ModelSource
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.offline.image_parts import source_of
from lightserve.router.chunk_boundaries import why_undivided
from lightserve.router.images.image_waits import ImageFailed, ImageWaits
from lightserve.router.images.sight import PromptSight
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler
from lightserve.server.images import open_arena, with_images

if TYPE_CHECKING:
    from lightserve.encoder.image_encoder import ImageEncoder

Encode = Callable[[str], list[int]]
MAX_BYTES = 2**30  # of an image: the caller's own data need no limit


class ImagePrompt(list[int]):
    """The token ids of a prompt, with the images that are in it."""

    images: tuple[ImageItem, ...] = ()


class OfflineImages:
    def __init__(self, config: ServerConfig, source: ModelSource, tokenizer: Tokenizer | None) -> None:
        """It loads the vision tower."""
        from lightserve.encoder.image_encoder import load_encoder  # Pillow may be missing without images
        from lightserve.media.fetch.fetcher import MEDIA_FLAGS, Fetcher
        from lightserve.media.make_reader import make_reader
        from lightserve.outbound.urls import UrlRules

        self.arena_fd = open_arena(config.worker.embed_cache_gb)
        weakref.finalize(self, os.close, self.arena_fd)
        self.arena = mmap(self.arena_fd, os.fstat(self.arena_fd).st_size)  # ranks read the embeddings here
        self._encoder: ImageEncoder = load_encoder(config, self.arena)
        http = config.http
        rules = UrlRules(MEDIA_FLAGS, http.allowed_media_domains, http.media_private_hosts, http.allow_http_media)
        self._new_fetcher = partial(Fetcher, rules, MAX_BYTES, http.media_timeout)  # each event loop has its own
        self._reader = make_reader(source, self._encoder.layout, tokenizer, (http.media_limits, MAX_BYTES))
        self._to_encode: deque[EncodeImage] = deque()
        self._waits = ImageWaits(lambda encoder, generation: self._to_encode.append)

    def use_scheduler(self, scheduler: Scheduler) -> None:
        for group in scheduler.groups:
            group.enable_images(self._waits)
        self._waits.start_encoder(EncoderStarted(0, self._encoder.num_rows))

    def prompt_of(self, text: str | Sequence[int], images: Sequence[Any], encode: Encode | None = None) -> ImagePrompt:
        """``text``: what the chat template wrote, or ``encode`` makes tokens of, or these."""
        sources = [source_of(image) for image in images]
        reader = self._reader
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
            files = thread.submit(self._read, sources).result()
        if isinstance(text, str):
            ids = (encode or reader.encode)(reader.write(text, files))
        else:
            ids = reader.write_ids(reader.fill_pairs(text), files)
        prompt = ImagePrompt(reader.expand(ids, files))
        prompt.images = reader.locate(prompt, files)
        return prompt

    def _read(self, sources: Sequence[ImageSource]) -> list[ReadImage]:
        async def read() -> list[ReadImage]:
            return await replace(self._reader, fetcher=self._new_fetcher()).read_all(sources, "")

        return asyncio.run(read())

    def enter(self, req: Req, cached_len: int) -> None:
        """Before the request is queued."""
        if req.images:
            if reason := self._waits.why_refused(req.images):
                raise InvalidRequestError(reason)
            self._waits.enter(req, cached_len)

    def encode(self) -> list[ImageFailed]:
        """Those that requests wait for. Returns the requests that fail."""
        failed = []
        while self._to_encode:
            result = self._encoded(self._to_encode.popleft())
            if (failure := self._waits.complete(result)) is not None:
                failed.append(failure)
        return failed

    def _encoded(self, message: EncodeImage) -> ImageEncoded:
        from lightserve.encoder.main import decode_image

        decoded = decode_image(self._encoder, message)
        if decoded.image is None:
            return ImageEncoded(0, message.digest, decoded.status, decoded.message)
        (is_finite,) = self._encoder.encode([(decoded.image, int32s(message.arena_rows))])
        if not is_finite:
            return ImageEncoded(0, message.digest, 500, "the embeddings of an image are not finite numbers")
        return ImageEncoded(0, message.digest)


def apply_sight(req: Req, engine: EngineInfo, group: GroupScheduler) -> Req:
    """A new request, as tokens of its prompt may see later ones."""
    sight = PromptSight(engine.sight, engine.sight_window)
    req.boundaries = sight.boundaries(len(req.prompt_ids), req.images)
    req.salt = sight.salt(req.prompt_ids)
    reason = sight.why_refused(len(req.prompt_ids)) or why_undivided(req.boundaries, group.chunking.max_span)
    if reason:
        raise InvalidRequestError(reason)
    return req


def is_of(failed: ImageFailed, req: Req) -> bool:
    return req.req_id in failed.req_ids


def plain_ids(req: Req) -> list[int]:
    """Of a prompt for a beam search."""
    if req.images:
        raise InvalidRequestError("a beam search takes no images; use generate or chat")
    ids: list[int] = req.prompt_ids.tolist()
    return ids


def open_images(
    worker: WorkerConfig, source: ModelSource, tokenizer: Tokenizer | None, limit: Mapping[str, int] | None
) -> OfflineImages | None:
    """None: prompts have no images."""
    text = None if limit is None else json.dumps(dict(limit))
    http = HttpConfig(limit_mm_per_prompt=text)
    config = with_images(ServerConfig(worker=worker, router=RouterConfig(), http=http, launch=LaunchConfig()))
    return OfflineImages(config, source, tokenizer) if config.http.reads_media else None
