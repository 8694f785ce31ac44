"""Images of requests: httpserver -> router -> encoder, and what the workers get of them."""

from __future__ import annotations

import msgspec

from lightserve.messages.int_arrays import Int32s


class ImageItem(msgspec.Struct, frozen=True, array_like=True):
    """An image in the prompt of a request."""

    digest: bytes  # of the file and of all that changes its pixels
    start: int  # its first token in the prompt
    rows: int  # of tokens
    columns: int
    height: int  # in pixels, after resizing
    width: int
    placeholder: int  # the token id that stands for each of its tokens
    data: bytes = b""  # the file; empty in a request that follows another with the same image

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def without_file(self) -> ImageItem:
        return msgspec.structs.replace(self, data=b"")


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """An image in the prompt of a request, for the workers."""

    start: int  # its first token in the prompt
    rows: int  # of tokens
    columns: int
    arena_rows: Int32s  # of its embeddings; empty: its KV was cached when the request was admitted


class EncodeImage(msgspec.Struct, frozen=True, tag=True):
    """The encoder writes the embeddings of an image to these rows of the arena."""

    digest: bytes
    height: int  # in pixels, after resizing
    width: int
    arena_rows: Int32s
    data: bytes  # the file


class EncoderStarted(msgspec.Struct, frozen=True, tag=True):
    """A new encoder waits for images. Those of the one before are lost."""

    generation: int
    num_rows: int  # of the arena


class ImageEncoded(msgspec.Struct, frozen=True, tag=True):
    """The rows of an image are written, or it could not be encoded."""

    generation: int
    digest: bytes
    status: int = 200  # HTTP's
    message: str = ""  # what went wrong
    decode_s: float = 0.0
    resize_s: float = 0.0
    encode_s: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """By stage."""
        return {"decode": self.decode_s, "resize": self.resize_s, "encode": self.encode_s}


FromEncoder = EncoderStarted | ImageEncoded
ToEncoder = EncodeImage
