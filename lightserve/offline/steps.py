"""The steps of an LLM: one loop runs the requests of all its open streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from time import monotonic
from types import TracebackType
from typing import Any, Self

from lightserve.detokenization.req_text import ReqText
from lightserve.errors import ServerError
from lightserve.messages.params import FinishReason
from lightserve.messages.step import ReqFailed, StepResult, TokenOut
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.offline.images import OfflineImages, is_of
from lightserve.offline.kv_sources import KvSources, LaunchedStep
from lightserve.offline.ranks import Ranks
from lightserve.offline.results import StreamOut
from lightserve.router.images.image_waits import ImageFailed, without_image_ids
from lightserve.router.req import Req
from lightserve.router.scheduler import ReqTokens, Scheduler
from lightserve.text.logprobs import unpack_prompt_logprobs
from lightserve.worker.worker import ModelWorker


class OfflineSteps:
    """It ends with ``close()``, or a ``with`` block."""

    def __init__(
        self, ranks: Ranks, scheduler: Scheduler, tokenizer: Tokenizer | None, images: OfflineImages | None
    ) -> None:
        self._ranks = ranks
        self._engine = ranks.engine
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._images = images
        self._open: dict[int, _OpenStream] = {}
        self._in_flight: deque[LaunchedStep] = deque()  # oldest first
        self._kv = KvSources(scheduler, ranks)
        self._embeddings: dict[int, bytes] = {}  # by request: results that are not returned yet
        self._failures: dict[int, str] = {}  # by request: messages of failed ones that have no stream

    def close(self) -> None:
        """Free the memory of the model. An LLM that is closed cannot be used any more."""
        if "_ranks" in self.__dict__:
            with suppress(ServerError):  # a rank has died
                self._save_prefixes()
            self._open.clear()
            self._in_flight.clear()
            self._ranks.close()
            del self._ranks, self._scheduler, self._kv

    @property
    def worker(self) -> ModelWorker:
        """Of a single rank, which is in this process."""
        return self._ranks.worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("_ranks", "_scheduler"):
            raise ServerError("this LLM is closed; make another one")
        raise AttributeError(f"LLM has no attribute {name!r}", name=name, obj=self)

    def _run(self, requests: Sequence[Req]) -> Iterator[StreamOut]:
        """Run steps until these requests end. Other open streams share the steps."""
        outs: deque[StreamOut] = deque()
        decoder = None if self._tokenizer is None else self._tokenizer.decoder
        for i, req in enumerate(requests):
            self._open[req.req_id] = _OpenStream(i, ReqText(decoder, req.params.text), outs)
            if self._images is not None:
                self._images.enter(req, max(group.pool.cached_len(req) for group in self._scheduler.groups))
            self._scheduler.add(req)
        pending = len(requests)
        try:
            while pending:
                while not outs:
                    self._step()
                out = outs.popleft()
                pending -= out.finish_reason is not None
                yield out
        finally:  # the caller may stop iterating
            for req in requests:
                if self._open.pop(req.req_id, None) is not None:
                    self._scheduler.abort(req.req_id)

    def _step(self) -> None:
        """Keep the worker busy, and give the tokens of the oldest step to their streams."""
        try:
            if self._images is not None and self._fail_images(self._images.encode()):
                return
            if not self._advance():
                raise ServerError("the request was dropped because a step of its batch failed")
        except BaseException as error:
            self._recover(error)
            raise

    def _advance(self) -> bool:
        """Until a step, or KV that requests wait for, is there. Returns False if there is nothing to wait for."""
        self._kv.deliver()
        while len(self._in_flight) < self._engine.pipeline_depth and (step := self._scheduler.next_step(monotonic())):
            launched_s = monotonic()
            self._in_flight.append(LaunchedStep(launched_s, step.num_prompt_tokens, self._ranks.launch(step)))
            self._kv.on_launched(step)
        if not self._in_flight:
            return self._kv.wait()
        oldest = self._in_flight[0]
        result = oldest.result()
        self._in_flight.popleft()
        self._scheduler.complete_step()
        self._kv.on_completed(oldest)
        self._distribute(result)
        return True

    def _recover(self, error: BaseException) -> None:
        """All requests are lost. An interrupt may have stopped the scheduler in the middle of a change."""
        if isinstance(error, Exception) and not self._kv:
            self._drop_requests()
            self._scheduler.cancel_steps()
            return
        in_flight = tuple(self._in_flight)
        self._drop_requests()
        try:
            if self._kv:
                self._kv.settle(in_flight)
        finally:
            self._scheduler.reset()
            self._kv.connect()

    def _save_prefixes(self) -> None:
        """Write what only the KV pool has to the tiers below host memory, as an idle server does."""
        if self._engine.cpu_kv is not None and self._engine.cpu_kv.storage_tiers:
            self._open.clear()
            self._scheduler.drop(lambda req: True)
            while self._advance():
                pass

    def _drop_requests(self) -> None:
        """End all streams. The ranks have no request afterwards."""
        self._open.clear()
        self._in_flight.clear()
        self._ranks.reset()

    def _distribute(self, result: StepResult) -> None:
        """Give the tokens of a step to their streams."""
        for embedding in result.embeddings:
            if self._scheduler.process_embedding(embedding.req_id) is not None:
                self._embeddings[embedding.req_id] = embedding.values
        self._scheduler.process_drafts(result.drafts, result.proposals)
        for req_id, proposed, accepted in result.drafts.rows():
            if req_id in self._open:
                self._open[req_id].text.count_drafts(proposed, accepted)
        for _, outs in groupby(result.tokens, key=lambda out: out.req_id):
            tokens = self._scheduler.process_req(list(outs))
            if tokens is not None:
                self._push_tokens(tokens)
        for failure in result.failed:
            if self._scheduler.fail(failure) is None:
                continue
            if failure.req_id in self._open:
                self._fail(failure)
            else:
                self._failures[failure.req_id] = failure.message

    def _fail_images(self, failures: Sequence[ImageFailed]) -> bool:
        """Returns whether requests ended."""
        for failed in failures:
            for req in self._scheduler.drop(partial(is_of, failed)):
                self._fail(ReqFailed(req.req_id, failed.status, failed.message))
        return bool(failures)

    def _fail(self, failure: ReqFailed) -> None:
        stream = self._open.pop(failure.req_id)
        stream.outs.append(StreamOut(stream.index, None, None, "", FinishReason.ABORT, error=failure.message))

    def _push_tokens(self, tokens: ReqTokens) -> None:
        """The last token may end the request, and a stop string before it."""
        for out in tokens.outs:
            is_last = out is tokens.outs[-1]
            self._push_token(tokens.req, out, tokens.req.finish_reason if is_last else None)
            if tokens.req.req_id not in self._open:
                return

    def _push_token(self, req: Req, out: TokenOut, finish_reason: FinishReason | None) -> None:
        stream, token = self._open[req.req_id], out.token
        text = stream.text.push(token.id, finish_reason, req.is_text_token)
        if stream.text.matched_stop is not None:
            finish_reason = FinishReason.STOP
            self._scheduler.abort(req.req_id)
        if finish_reason is not None:
            del self._open[req.req_id]
        prompt = (
            None
            if token.prompt_logprobs is None
            else unpack_prompt_logprobs(without_image_ids(req).tolist(), token.prompt_logprobs)
        )
        stream.outs.append(
            StreamOut(
                stream.index,
                token.id,
                token.logprob,
                text,
                finish_reason,
                token.top_logprobs,
                prompt=prompt,
                drafts=None if finish_reason is None else stream.text.drafts,
            )
        )


@dataclass(frozen=True, slots=True)
class _OpenStream:
    """The stream of a request that has not ended."""

    index: int  # of its prompt
    text: ReqText
    outs: deque[StreamOut]  # of the stream that it belongs to
