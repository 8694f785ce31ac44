"""Prompts with images on a simulated GPU that the encoder shares with the worker, by the router's own scheduler.

    python -m benchmark.engine.shared_gpu --load large medium --step_ms 20 30

While both have work, each gets half of the GPU, of which a part is lost. The costs are those of Qwen2.5-VL-7B on an
H200. Loads on a card were within 5 % of images/s, and within 11 % of the times to the first token.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import int32s
from lightserve.messages.media import EncodeImage, EncoderStarted, ImageEncoded, ImageItem, ToEncoder
from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step, TokenColumns
from lightserve.router.images.image_waits import ImageWaits
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.simulate.gpu import H200, CostModel, Worker
from lightserve.simulate.replica import LIMITS

# 28 layers of 3,584 numbers and 4 KV heads, as a part of what Llama-3-8B costs
COST = CostModel(
    matmul_ms=tuple((tokens, max(3.75, ms * 0.93)) for tokens, ms in H200.matmul_ms),
    kv_bytes=57_344,
    pairs_per_s=H200.pairs_per_s / 0.766,
    rest_s=(1.2e-3, 2.1e-6),
)
KEPT = 0.93  # of the GPU while both use it: fitted to loads on a card
LEAD_S = 3e-3  # the next step is planned so early
TEXT_TOKENS = 75
ROWS, SLOTS = 300_000, 1_000_000
BATCH_TOKENS = 4_096  # that the encoder computes at once
WRITE_S = 5e-6  # of a token's row
REPLY_S = 0.02  # until a client has its last token, and asks again
WARM_UP = ((300, 512, 700, 1_000) * 6, (100, 1_000))  # steps before the load: tokens, and tokens before them


@dataclass(frozen=True, slots=True)
class ImageLoad:
    streams: int
    requests: int
    tokens: int  # of an image
    output: int  # tokens
    decode_s: float  # of a file, on a core
    images: int = 1  # of a request


LOADS = {
    "large": ImageLoad(16, 32, 4_015, 64, 0.19),  # 2048x1536
    "medium": ImageLoad(64, 192, 999, 128, 0.055),  # 1024x768
    "many": ImageLoad(16, 48, 391, 64, 0.025, images=4),  # 640x480
    "small": ImageLoad(64, 256, 256, 64, 0.012),  # 448x448
}


def tower_s(tokens: Sequence[int]) -> float:
    """Of the images of a batch: 44 ms for four of 1024x768."""
    patches = [4 * each for each in tokens]
    return 2e-3 + 2.35e-6 * sum(patches) + 6.9e-11 * sum(each**2 for each in patches)


@dataclass(slots=True)
class Figures:
    seconds: float = 0.0
    images: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ttft, itl = (np.quantile(np.array(values) * 1e3, (0.5, 0.99)) for values in (self.ttft_s, self.itl_s))
        rate = self.images / self.seconds
        return f"{rate:6.2f} images/s; TTFT p50, p99 {ttft[0]:.0f}, {ttft[1]:.0f} ms; ITL {itl[0]:.1f}, {itl[1]:.1f} ms"


class Sent(NamedTuple):
    planned_s: float
    tokens: TokenColumns


class SharedGpu:
    def __init__(self, load: ImageLoad, limits: SchedulerLimits = LIMITS) -> None:
        self.figures = Figures()
        self._load = load
        self._group = GroupScheduler(KvPool(SLOTS), limits)
        self._scheduler = Scheduler(self._group)
        self._images = ImageWaits(lambda encoder, generation: self._decode)
        self._group.enable_images(self._images)
        self._images.start_encoder(EncoderStarted(0, ROWS))
        self._worker = Worker(COST)
        self._now = 0.0
        self._numbers = count()  # of events
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._decoded: deque[EncodeImage] = deque()
        self._batch: list[EncodeImage] = []  # that is encoded
        self._sent: deque[tuple[float, Sent]] = deque()  # seconds that each step takes alone
        self._left = [0.0, 0.0]  # seconds of the GPU that the step and the batch still need
        self._last_end_s = 0.0
        self._arrived_s: list[float] = []
        self._last_token_s: dict[int, float] = {}
        self._num_ended = 0
        self._warm_up()

    def run(self) -> Figures:
        for _ in range(self._load.streams):
            self._arrive()
        while self._num_ended < self._load.requests:
            self._advance()
        self.figures.seconds, self.figures.images = self._now, self._load.requests * self._load.images
        return self.figures

    def _warm_up(self) -> None:
        for tokens in WARM_UP[0]:
            for context in WARM_UP[1]:
                pairs = tokens * context
                self._group.chunking.observe(tokens, pairs, COST.step_s(tokens, 0, pairs), is_alone=True)

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), call))

    def _advance(self) -> None:
        """To what happens next."""
        rate = KEPT / 2 if self._sent and self._batch else 1.0
        step_s = self._left[0] / rate if self._sent else math.inf
        if len(self._sent) == 1 and self._left[0] > LEAD_S:
            step_s = (self._left[0] - LEAD_S) / rate + 1e-9
        batch_s = self._left[1] / rate if self._batch else math.inf
        event_s = self._events[0][0] - self._now if self._events else math.inf
        passed = min(step_s, batch_s, event_s)
        self._now += passed
        self._left = [left - passed * rate for left in self._left]
        if self._batch and self._left[1] <= 1e-9:
            self._end_batch()
        if self._sent and self._left[0] <= 1e-9:
            self._end_step()
        while self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()
        self._plan()

    def _arrive(self) -> None:
        load, number = self._load, len(self._arrived_s)
        if number == load.requests:
            return
        ids = np.arange(number * 10_007, number * 10_007 + TEXT_TOKENS + load.images * load.tokens)
        items = [self._image(number, image) for image in range(load.images)]
        params = GenerationParams.of(max_new_tokens=load.output, temperature=0.0, ignore_eos=True)
        req = Req(number, int32s(ids.tolist()), params, load.output, (0,), images=tuple(items))
        self._arrived_s.append(self._now)
        self._worker.add(number, load.output)
        self._images.enter(req, 0)
        self._scheduler.add(req)

    def _image(self, number: int, image: int) -> ImageItem:
        span = (20 + image * self._load.tokens, self._load.tokens)
        return ImageItem(f"{number} {image}".encode(), (span,), 1, 1, 1, 1, 5, b"file")

    def _decode(self, message: ToEncoder) -> None:
        self._at(self._now + self._load.decode_s, lambda: self._encode(message))

    def _encode(self, *messages: EncodeImage) -> None:
        """As many as are decoded and fit. The encoder has written the rows of the batch before."""
        self._decoded += messages
        if self._batch or not self._decoded:
            return
        tokens = 0
        while self._decoded and (not tokens or tokens + len(self._decoded[0].arena_rows) <= BATCH_TOKENS):
            self._batch.append(self._decoded.popleft())
            tokens += len(self._batch[-1].arena_rows)
        self._left[1] = tower_s([len(message.arena_rows) for message in self._batch])

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, []
        rows = sum(len(message.arena_rows) for message in batch)
        self._at(self._now + rows * WRITE_S, lambda: self._write(batch))

    def _write(self, batch: Sequence[EncodeImage]) -> None:
        for message in batch:
            self._images.complete(ImageEncoded(0, message.digest))
        self._encode()

    def _plan(self) -> None:
        while len(self._sent) < 2 and (not self._sent or self._left[0] <= LEAD_S or self._scheduler.num_waiting):
            step = self._scheduler.next_step(self._now)
            if step is None:
                return
            self._send(step)

    def _send(self, step: Step) -> None:
        result = self._worker.run(step)
        self._sent.append((result.seconds, Sent(self._now, result.tokens)))
        if len(self._sent) == 1:
            self._left[0] = result.seconds

    def _end_step(self) -> None:
        _, step = self._sent.popleft()
        self._left[0] = self._sent[0][0] if self._sent else 0.0
        self._scheduler.complete_step(self._now - max(step.planned_s, self._last_end_s))
        self._last_end_s = self._now
        is_known = self._scheduler.process_plain(step.tokens)
        for _, outs in groupby(step.tokens.where(~is_known).outs(), key=lambda out: out.req_id):
            processed = self._scheduler.process_req(list(outs))
            if processed is not None and processed.req.finish_reason is not None:
                self._num_ended += 1
                self._at(self._now + REPLY_S, self._arrive)
        for req_id in step.tokens.req_ids.tolist():
            self._record(req_id)

    def _record(self, req_id: int) -> None:
        if req_id in self._last_token_s:
            self.figures.itl_s.append(self._now - self._last_token_s[req_id])
        else:
            self.figures.ttft_s.append(self._now - self._arrived_s[req_id])
        self._last_token_s[req_id] = self._now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--step_ms", nargs="+", type=float, default=[20.0], help="of a long prompt beside few streams")
    args = parser.parse_args()
    for name in args.load:
        for step_ms in args.step_ms:
            limits = replace(LIMITS, long_prompt_step_s=step_ms / 1000)
            print(f"{name:7} {step_ms:5.1f} ms a step {SharedGpu(LOADS[name], limits).run()}", flush=True)


if __name__ == "__main__":
    main()
