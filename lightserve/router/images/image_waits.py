"""Requests with images wait for their embeddings, unless the KV of the images is cached.

A request holds all images that it needs at once, or none: so no two requests wait for rows that the other one holds. If
the encoder dies, the images that it had are sent to the next one, one at a time: an image that two encoders die of is
at fault, and its requests fail.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from lightserve.media.tokens import FIRST_ID
from lightserve.messages.int_arrays import NO_INT32, Int32Array
from lightserve.messages.media import EncodeImage, EncoderStarted, ImageEncoded, ImageItem, ImageRows
from lightserve.messages.step import NewReq
from lightserve.router.images.embed_pool import EmbeddedImage, EmbedPool
from lightserve.router.images.encoders import Connect, Encoders
from lightserve.router.kv.source import StepPart
from lightserve.router.observability.stats import Figures
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

MAX_CRASHES = 2
CLIENT_SHARE = 4  # background requests leave the clients this part of the arena


class ImageFailed(msgspec.Struct, frozen=True):
    """Requests that end because an image of theirs could not be encoded."""

    req_ids: frozenset[int]
    status: int
    message: str


class ImageWaits(StepPart):
    def __init__(self, connect: Connect) -> None:
        self.pool = EmbedPool()
        self._encoders = Encoders(connect)
        self._files: dict[bytes, tuple[bytes, set[int]]] = {}  # by digest: of the requests with these ids
        self.file_bytes = 0  # of these
        self._room = Wait()  # until rows are released
        self.hits = {"kv": 0, "embedding": 0, "none": 0}
        self.num_refused = {"decode": 0}  # images, by reason
        self.num_encoded = 0

    def why_refused(self, images: Sequence[ImageItem]) -> str:
        """Why a request with these images can never run; empty: it can."""
        needed = sum({image.digest: image.tokens for image in images}.values())
        if self.pool.num_rows and needed > self.pool.num_rows:
            return (
                f"the images of the request have {needed} tokens; the limit is {self.pool.num_rows} (--embed_cache_gb)"
            )
        missing = [image for image in images if not image.data and image.digest not in self._files]
        return "the file of an image is not known" if missing else ""

    def bytes_with(self, images: Sequence[ImageItem]) -> int:
        """Of the files, if a request with these images comes."""
        return self.file_bytes + sum(map(self._new_bytes, {image.digest: image for image in images}.values()))

    def _new_bytes(self, image: ImageItem) -> int:
        return 0 if image.digest in self._files else len(image.data)

    def enter(self, req: Req, cached_len: int) -> None:
        """A request has come. The encoder begins with its images, as far as there is room."""
        for image in req.images:
            self.file_bytes += self._new_bytes(image)
            self._files.setdefault(image.digest, (image.data, set()))[1].add(req.req_id)
            self.hits[self._kind_of(image, cached_len)] += 1
        req.images = tuple(image.without_file for image in req.images)
        self.wait_of(req, cached_len)

    def _kind_of(self, image: ImageItem, cached_len: int) -> str:
        if image.end <= cached_len:
            return "kv"
        return "none" if self.pool.find(image.digest) is None else "embedding"

    def wait_of(self, req: Req, cached_len: int) -> Wait | None:
        """What the request must wait for before it runs, if so many of its tokens are cached; None: nothing."""
        needed = {image.digest: image for image in req.images if image.end > cached_len}
        known = {digest: self.pool.find(digest) for digest in needed}
        new = [needed[digest] for digest, image in known.items() if image is None]
        unheld = [image for image in known.values() if image is not None and not image.req_ids and image.is_ready]
        if new:
            room = self._room_for(req) - sum(len(image.arena_rows) for image in unheld)
            if sum(image.tokens for image in new) > room:
                return self._room
        for image in known.values():
            if image is not None:
                image.req_ids.add(req.req_id)
                image.is_background &= req.is_background
                self.pool.touch(image)
        for item in new:
            self.pool.add(item, req.is_background).req_ids.add(req.req_id)
        self._send_pending()
        images = [self.pool.find(digest) for digest in needed]
        return next((image.wait for image in images if image is not None and not image.is_ready), None)

    def _room_for(self, req: Req) -> int:
        """Rows that its images may take. If no rows are held, nobody needs a part of them."""
        room = self.pool.available_rows
        is_limited = req.is_background and room < self.pool.num_rows
        return room - self.pool.num_rows // CLIENT_SHARE if is_limited else room

    def drop(self, req: Req) -> None:
        """The request has ended."""
        if not req.images:
            return
        for digest in {image.digest for image in req.images}:
            self._files[digest][1].discard(req.req_id)
            if not self._files[digest][1]:
                self.file_bytes -= len(self._files.pop(digest)[0])
            self._release(digest, req.req_id)
        self._room.end()

    def _release(self, digest: bytes, req_id: int) -> None:
        image = self.pool.find(digest)
        if image is None:
            return
        image.req_ids.discard(req_id)
        if not image.req_ids and not image.is_ready and image.encoder is None:
            self.pool.remove(image)

    def as_new(self, req: Req, new: NewReq) -> NewReq:
        """The request as the workers get it: its images, and token ids that are in the vocabulary."""
        if not req.images:
            return new
        token_ids = _with_placeholder(new.token_ids, req.images[0].placeholder)
        return msgspec.structs.replace(new, token_ids=token_ids, images=[self._rows_of(req, i) for i in req.images])

    def _rows_of(self, req: Req, item: ImageItem) -> ImageRows:
        image = self.pool.find(item.digest)
        is_held = image is not None and image.is_ready and req.req_id in image.req_ids
        arena_rows = image.arena_rows if image is not None and is_held else NO_INT32
        return ImageRows(item.spans, item.rows, item.columns, arena_rows, item.times)

    def start_encoder(self, started: EncoderStarted) -> list[ImageFailed]:
        """A new encoder waits for images. Returns the requests whose images two encoders died of."""
        if not self.pool.num_rows:
            self.pool.set_rows(started.num_rows)
            self._room.end()
        self._encoders.start(started)
        lost = [image for image in self.pool.pending() if image.encoder == started.encoder]
        for image in lost:
            image.encoder, image.num_crashes = None, image.num_crashes + 1
        guilty = [image for image in lost if image.num_crashes >= MAX_CRASHES]
        message = "the encoder crashed twice with an image of this request"
        failed = [self._fail(image, 500, message) for image in guilty]
        for image in lost:
            if not image.req_ids and self.pool.find(image.item.digest) is image:
                self.pool.remove(image)
        self._send_pending()
        return failed

    def complete(self, done: ImageEncoded) -> ImageFailed | None:
        """Returns the requests that end because their image could not be encoded."""
        image = self.pool.find(done.digest)
        if image is None or not self._encoders.is_present(done):  # of an encoder that has died
            return None
        if done.status != 200:
            self.num_refused["decode"] += done.status == 400
            failed = self._fail(image, done.status, done.message)
            self._send_pending()
            return failed
        self.num_encoded += 1
        self._encoders.learn(done)
        self.pool.finish(image)
        if not image.req_ids:  # it can make room
            self._room.end()
        self._send_pending()
        return None

    def _fail(self, image: EmbeddedImage, status: int, message: str) -> ImageFailed:
        self.pool.remove(image)
        image.wait.end()
        return ImageFailed(frozenset(image.req_ids), status, message)

    def _send_pending(self) -> None:
        """Those of clients first."""
        pending = sorted(self.pool.pending(), key=lambda image: image.is_background)
        for image in pending:
            if image.encoder is not None:
                continue
            image.encoder = self._encoders.best_for(image, pending)
            if image.encoder is None and image.is_background:
                return  # those behind it wait for the same encoders
            if image.encoder is not None:
                item, data = image.item, self._files[image.item.digest][0]
                message = EncodeImage(item.digest, item.height, item.width, image.arena_rows, data, item.frames)
                self._encoders.send(image.encoder, message)

    @property
    def is_encoding(self) -> bool:
        """An encoder may be using the device of the workers."""
        return self.pool.has_pending

    def figures(self) -> Figures:
        by_label = {
            "image_hits_total": self.hits,
            "image_refused_total": self.num_refused,
            "images_waiting": self.num_waiting,
        }
        return {
            **{(name, label): count for name, counts in by_label.items() for label, count in counts.items()},
            "images_encoded_total": self.num_encoded,
            "images_evicted_total": self.pool.num_evicted,
            "image_rows_used": self.pool.used_rows,
        }

    @property
    def num_waiting(self) -> dict[str, int]:
        """Images that are not encoded, by stage."""
        pending = self.pool.pending()
        sent = sum(image.encoder is not None for image in pending)
        return {"queue": len(pending) - sent, "encoder": sent}


def without_image_ids(req: Req) -> Int32Array:
    """Its prompt with the ids that the vocabulary has."""
    return _with_placeholder(req.prompt_ids, req.images[0].placeholder) if req.images else req.prompt_ids


def _with_placeholder(token_ids: Int32Array, placeholder: int) -> Int32Array:
    return np.where(token_ids >= FIRST_ID, placeholder, token_ids).astype(np.int32)
