"""Images of requests: httpserver -> router -> encoder, and what the workers get of them."""

from __future__ import annotations

from enum import Enum

import msgspec

from lightserve.messages.int_arrays import Int32s

Span = tuple[int, int]  # the first of some tokens in the prompt, and how many they are


class Sight(Enum):
    """Which later tokens of its prompt a token sees."""

    NONE = ""
    IMAGE = "image"  # a token of an image those of the same span: Gemma 3
    PROMPT = "prompt"  # all of them: PaliGemma


class ImageItem(msgspec.Struct, frozen=True, array_like=True):
    """An image in the prompt of a request."""

    digest: bytes  # of the file and of all that changes its pixels
    spans: tuple[Span, ...]  # its tokens with an embedding; others may stand between them
    rows: int  # of the tokens of a span, if they have rotary positions of three axes; 0: as text has
    columns: int
    height: int  # in pixels, after resizing
    width: int
    placeholder: int  # the token id that stands for each of its tokens
    data: bytes = b""  # the file; empty in a request that follows another with the same image
    frames: tuple[int, ...] = ()  # of a video, those that the encoder takes; empty: it is an image
    times: tuple[int, ...] = ()  # of the spans: see ImageSize

    @property
    def tokens(self) -> int:
        """Those with an embedding."""
        return sum(count for _, count in self.spans)

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        start, count = self.spans[-1]
        return start + count

    def tokens_before(self, end: int) -> int:
        """How many tokens with an embedding stand before a place in the prompt."""
        return sum(min(max(end - start, 0), count) for start, count in self.spans)

    @property
    def without_file(self) -> ImageItem:
        return msgspec.structs.replace(self, data=b"")


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """An image in the prompt of a request, for the workers."""

    spans: tuple[Span, ...]  # as those of ImageItem
    rows: int
    columns: int
    arena_rows: Int32s  # of its embeddings; empty: its KV was cached when the request was admitted
    times: tuple[int, ...] = ()  # of the spans: see ImageSize

    @property
    def end(self) -> int:
        start, count = self.spans[-1]
        return start + count


class EncodeImage(msgspec.Struct, frozen=True, tag=True):
    """The encoder writes the embeddings of an image to these rows of the arena."""

    digest: bytes
    height: int  # in pixels, after resizing
    width: int
    arena_rows: Int32s
    data: bytes  # the file
    frames: tuple[int, ...] = ()  # of a video


class EncoderStarted(msgspec.Struct, frozen=True, tag=True):
    """A new encoder waits for images. Those of the one before, with the same number, are lost."""

    generation: int
    num_rows: int  # of the arena
    encoder: int = 0  # its number


class ImageEncoded(msgspec.Struct, frozen=True, tag=True):
    """The rows of an image are written, or it could not be encoded."""

    generation: int
    digest: bytes
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong
    decode_s: float = 0.0
    resize_s: float = 0.0
    encode_s: float = 0.0
    encoder: int = 0  # the number of the encoder

    @property
    def seconds(self) -> dict[str, float]:
        """By stage."""
        return {"decode": self.decode_s, "resize": self.resize_s, "encode": self.encode_s}


FromEncoder = EncoderStarted | ImageEncoded
ToEncoder = EncodeImage
