"""Which encoder an image goes to, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightserve.messages.media import EncoderStarted, ImageEncoded, ToEncoder
from lightserve.router.images.embed_pool import EmbeddedImage

Send = Callable[[ToEncoder], None]
Connect = Callable[[int, int], Send]  # to the encoder with this number, of this generation

BACKGROUND_S = 0.25  # what an image of a client waits for those of background requests, about
MIN_BACKGROUND = 2  # images of these that an encoder has: it decodes one while it encodes another


class Encoder(NamedTuple):
    generation: int
    send: Send


class Encoders:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._encoders: dict[int, Encoder] = {}  # by number
        self._max_background = MIN_BACKGROUND

    def start(self, started: EncoderStarted) -> None:
        """It takes the place of the one before."""
        send = self._connect(started.encoder, started.generation)
        self._encoders[started.encoder] = Encoder(started.generation, send)

    def is_present(self, done: ImageEncoded) -> bool:
        """Whether the encoder that has sent this was not replaced."""
        encoder = self._encoders.get(done.encoder)
        return encoder is not None and encoder.generation == done.generation

    def send(self, number: int, message: ToEncoder) -> None:
        self._encoders[number].send(message)

    def learn(self, done: ImageEncoded) -> None:
        """How many images of background requests an encoder may have, from how long it took for the last one."""
        self._max_background = max(MIN_BACKGROUND, int(BACKGROUND_S / max(done.encode_s, 1e-3)))

    def best_for(self, image: EmbeddedImage, pending: Iterable[EmbeddedImage]) -> int | None:
        """The one with the fewest tokens to encode; None: the image has to wait.

        An encoder takes its images in their order, so it has few of background requests.
        What an encoder died of goes alone, so that the next death shows which image is at fault.
        """
        tokens, background = dict.fromkeys(self._encoders, 0), Counter[int]()
        for sent in pending:
            if sent.encoder in tokens:
                tokens[sent.encoder] += len(sent.arena_rows)
                background[sent.encoder] += sent.is_background
                if image.num_crashes or sent.num_crashes:
                    del tokens[sent.encoder]
        if image.is_background:
            tokens = {number: tokens[number] for number in tokens if background[number] < self._max_background}
        return min(tokens, key=lambda number: (tokens[number], number), default=None)
