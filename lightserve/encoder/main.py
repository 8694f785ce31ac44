"""The encoder process: it decodes the images of requests, and writes their embeddings to the arena."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

from lightserve.common.compile.cache import use_writable_cache
from lightserve.errors import RequestError
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.messages.control import Ready, StartupPhase
from lightserve.messages.media import EncodeImage, EncoderStarted, FromEncoder, ImageEncoded, ToEncoder
from lightserve.utils.cpu import available_cores
from lightserve.utils.logger import init_logger

if TYPE_CHECKING:
    from lightserve.encoder.image_encoder import DecodedImage, ImageEncoder

logger = init_logger(__name__)


class Decoded(NamedTuple):
    image: DecodedImage | None  # None: it could not be decoded
    decode_s: float
    resize_s: float = 0.0
    status: int = 200
    message: str = ""


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    begin_s = time.monotonic()
    inbox: Receiver[ToEncoder] = Receiver(
        child_config.encoder_address(child_config.index, child_config.generation), ToEncoder
    )
    to_router: Sender[FromEncoder] = Sender(child_config.router_address)
    encoder = await asyncio.to_thread(_load, child_config)
    launcher.send(StartupPhase("load", time.monotonic() - begin_s))
    started = EncoderStarted(child_config.generation, encoder.num_rows, child_config.index)
    to_router.send(started)
    launcher.send(Ready(encoder.summary))
    await EncoderLoop(encoder, inbox, to_router, started).run()


def _load(child_config: ChildConfig) -> ImageEncoder:
    use_writable_cache(child_config.path("triton"))
    from lightserve.encoder.image_encoder import load_encoder  # torch begins here

    if child_config.arena_fd is None:
        raise TypeError("the launcher starts an encoder with an arena")
    arena = mmap(child_config.arena_fd, os.fstat(child_config.arena_fd).st_size)
    encoder = load_encoder(child_config.config, arena, child_config.device)
    if child_config.encoder_fd is not None:
        os.close(child_config.encoder_fd)
    return encoder


class EncoderLoop:
    """Images are decoded in threads as they come, and encoded in their order, several at once if there is a GPU."""

    def __init__(
        self, encoder: ImageEncoder, inbox: Receiver[ToEncoder], to_router: Sender[FromEncoder], started: EncoderStarted
    ) -> None:
        self._encoder = encoder
        self._inbox = inbox
        self._to_router = to_router
        self._started = started
        self._threads = ThreadPoolExecutor(available_cores(), "decode")
        self._waiting: deque[tuple[EncodeImage, asyncio.Future[Decoded]]] = deque()
        self._has_waiting = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._encode_all())

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._inbox.recv()
            decoding = loop.run_in_executor(self._threads, decode_image, self._encoder, message)
            self._waiting.append((message, decoding))
            self._has_waiting.set()

    async def _encode_all(self) -> None:
        while True:
            await self._has_waiting.wait()
            await self._encode_next()
            if not self._waiting:
                self._has_waiting.clear()

    async def _encode_next(self) -> None:
        """The first image that waits, and those behind it that are decoded, up to the encoder's budget."""
        await self._waiting[0][1]
        batch: list[tuple[EncodeImage, Decoded]] = []
        tokens = 0
        while self._waiting and self._waiting[0][1].done():
            message, decoding = self._waiting[0]
            tokens += len(message.arena_rows)
            if batch and tokens > self._encoder.max_tokens:
                break
            self._waiting.popleft()
            batch.append((message, decoding.result()))
        usable = [(message, decoded) for message, decoded in batch if decoded.image is not None]
        for message, decoded in batch:
            if decoded.image is None:
                self._report(message, decoded)
        if usable:
            await self._encode(usable)

    async def _encode(self, batch: Sequence[tuple[EncodeImage, Decoded]]) -> None:
        begin_s = time.monotonic()
        parts: list[tuple[Any, Any]] = [(decoded.image, message.arena_rows) for message, decoded in batch]
        are_finite = await asyncio.to_thread(self._encoder.encode, parts)
        seconds = (time.monotonic() - begin_s) / len(batch)
        for (message, decoded), is_finite in zip(batch, are_finite, strict=True):
            if is_finite:
                self._report(message, decoded, seconds)
            else:
                text = "the embeddings of an image are not finite numbers; the weights or the data type do not suit it"
                self._report(message, decoded._replace(status=500, message=text), seconds)

    def _report(self, message: EncodeImage, decoded: Decoded, encode_s: float = 0.0) -> None:
        self._to_router.send(
            ImageEncoded(
                self._started.generation,
                message.digest,
                decoded.status,
                decoded.message,
                decoded.decode_s,
                decoded.resize_s,
                encode_s,
                self._started.encoder,
            )
        )


def decode_image(encoder: ImageEncoder, message: EncodeImage) -> Decoded:
    """In any thread."""
    begin_s, decode_s = time.monotonic(), list[float]()
    try:
        pictures = encoder.layout.opened(message.data, message.frames)
        image = encoder.resized(_timed(pictures, decode_s), message)
    except RequestError as error:
        return Decoded(None, time.monotonic() - begin_s, status=error.status, message=str(error))
    except Exception:  # no file of a client ends the process
        logger.exception("an image of %d bytes could not be decoded", len(message.data))
        text = "the server failed to decode an image of the request"
        return Decoded(None, time.monotonic() - begin_s, status=500, message=text)
    return Decoded(image, sum(decode_s), time.monotonic() - begin_s - sum(decode_s))


def _timed(pictures: Iterator[Any], seconds: list[float]) -> Iterator[Any]:
    """``seconds``: how long each took to be decoded."""
    while True:
        begin_s = time.monotonic()
        picture = next(pictures, None)
        seconds.append(time.monotonic() - begin_s)
        if picture is None:
            return
        yield picture


if __name__ == "__main__":
    run_child("encoder", main)
