"""The rows of the arena: which embeddings of images it holds, and which of them may go.

An image is encoded once for all requests that have it. Its rows stay until others need the room: the least recently
used go first. Rows that the encoder may be writing to are never given to another image.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.int_arrays import Int32Array
from lightserve.messages.media import ImageItem
from lightserve.router.req_queue import Wait


@dataclass(eq=False)
class EmbeddedImage:
    item: ImageItem
    arena_rows: Int32Array
    is_background: bool = False  # no client waits for it
    is_ready: bool = False  # the encoder has written the rows
    encoder: int | None = None  # that it was sent to, and which may be writing the rows; None: none was
    num_crashes: int = 0  # of encoders that had it
    req_ids: set[int] = field(default_factory=set)  # that hold it
    wait: Wait = field(default_factory=Wait)  # until it is ready


class EmbedPool:
    def __init__(self) -> None:
        self.num_rows = 0  # until an encoder says how many there are
        self.num_evicted = 0  # images
        self._free = np.empty(0, dtype=np.int32)
        self._images: dict[bytes, EmbeddedImage] = {}  # by digest, the least recently used first
        self._pending: dict[bytes, EmbeddedImage] = {}  # of these, those that are not ready, in the same order

    def __len__(self) -> int:
        return len(self._images)

    def set_rows(self, count: int) -> None:
        """Called once, before any image is added."""
        self.num_rows = count
        self._free = np.arange(count, dtype=np.int32)

    def find(self, digest: bytes) -> EmbeddedImage | None:
        return self._images.get(digest)

    @property
    def used_rows(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def available_rows(self) -> int:
        """Free rows, and rows of images that no request holds."""
        return len(self._free) + sum(len(image.arena_rows) for image in self._images.values() if _may_go(image))

    def add(self, item: ImageItem, is_background: bool = False) -> EmbeddedImage:
        """The caller has checked that the rows are available."""
        for digest in [digest for digest, image in self._images.items() if _may_go(image)]:
            if len(self._free) >= item.tokens:
                break
            self.remove(self._images[digest])
            self.num_evicted += 1
        rows, self._free = self._free[: item.tokens], self._free[item.tokens :]
        image = self._images[item.digest] = self._pending[item.digest] = EmbeddedImage(item, rows, is_background)
        return image

    def touch(self, image: EmbeddedImage) -> None:
        """It is the last one to go."""
        for images in (self._images, self._pending):
            if image.item.digest in images:
                images[image.item.digest] = images.pop(image.item.digest)

    def finish(self, image: EmbeddedImage) -> None:
        """The encoder has written its rows."""
        image.is_ready = True
        del self._pending[image.item.digest]
        image.wait.end()

    def remove(self, image: EmbeddedImage) -> None:
        """The encoder does not write to its rows."""
        del self._images[image.item.digest]
        self._pending.pop(image.item.digest, None)
        self._free = np.concatenate((self._free, image.arena_rows))

    def pending(self) -> list[EmbeddedImage]:
        """Those that are not ready, in the order in which they were added or used."""
        return [*self._pending.values()]

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)


def _may_go(image: EmbeddedImage) -> bool:
    return image.is_ready and not image.req_ids
