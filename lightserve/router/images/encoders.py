"""Which encoder an image goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightserve.messages.media import EncoderStarted, ImageEncoded, ToEncoder
from lightserve.router.images.embed_pool import EmbeddedImage

Send = Callable[[ToEncoder], None]
Connect = Callable[[int, int], Send]  # to the encoder with this number, of this generation


class Encoder(NamedTuple):
    generation: int
    send: Send


class Encoders:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._encoders: dict[int, Encoder] = {}  # by number

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

    def best_for(self, image: EmbeddedImage, pending: Iterable[EmbeddedImage]) -> int | None:
        """The one with the fewest tokens to encode; None: the image has to wait.

        What an encoder died of goes alone, so that the next death shows which image is at fault.
        """
        tokens = dict.fromkeys(self._encoders, 0)
        for sent in pending:
            if sent.encoder in tokens:
                tokens[sent.encoder] += len(sent.arena_rows)
                if image.num_crashes or sent.num_crashes:
                    del tokens[sent.encoder]
        return min(tokens, key=lambda number: (tokens[number], number), default=None)
