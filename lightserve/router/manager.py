"""The router: it receives requests, ends them when they are aborted or late, and sends heartbeats.

A request passes these files in order: manager.py accepts it and queues it in scheduler/, step_loop.py sends the steps
that the scheduler plans through workers/client.py to the workers, and output_processor.py sends the tokens to the
detokenizer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from lightserve.config import RouterConfig
from lightserve.errors import LightserveError
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.worker_calls import WorkerCaller
from lightserve.media.tokens import with_image_ids
from lightserve.messages.cluster import DispatchedReq, KvCacheEvents, KvCancel, MovedReqs, ToEngine
from lightserve.messages.control import EngineInfo, HttpProcessLost
from lightserve.messages.media import EncoderStarted, ImageEncoded
from lightserve.messages.output import ToDetokenization
from lightserve.messages.params import FinishReason
from lightserve.messages.request import (
    AbortByRequestId,
    AbortReq,
    AdapterQuery,
    ContinueReq,
    GenerateReq,
    GetTimelines,
    HttpCounts,
    ReleaseParents,
    RouterInbox,
    StartProfile,
    StopProfile,
    ToRouter,
    http_process_of,
)
from lightserve.messages.rl import RlQuery
from lightserve.router.chunk_boundaries import ChunkBoundaries, why_undivided
from lightserve.router.images.image_waits import ImageFailed
from lightserve.router.images.sight import PromptSight
from lightserve.router.kv.cached_blocks import CachedBlocks
from lightserve.router.lora.control import AdapterControl
from lightserve.router.lora.registry import RegisteredAdapter
from lightserve.router.observability.profile_control import ProfileControl
from lightserve.router.observability.stats import RouterMetrics, ThroughputLog
from lightserve.router.observability.timeline import Timeline, TimelineRing
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.pinned_prefixes import PinnedPrefixes
from lightserve.router.req import Req
from lightserve.router.rl.control import RlControl
from lightserve.router.rl.pause import PauseControl
from lightserve.router.rl.sleep import SleepControl
from lightserve.router.rl.weights import WeightsControl
from lightserve.router.scheduler import Scheduler
from lightserve.router.step_loop import StepLoop
from lightserve.router.workers.client import ModelClient
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

OTHER_ADAPTER = "the engine that wants this prompt has other files of its LoRA adapter"
HEARTBEAT_S = 1.0
DEADLINE_CHECK_S = 0.25
GB = 10**9


class RouterManager:
    def __init__(
        self,
        scheduler: Scheduler,
        model: ModelClient,
        engine: EngineInfo,
        inbox: Receiver[RouterInbox] | Receiver[ToRouter] | Receiver[ToEngine],
        to_detokenization: Sender[ToDetokenization],
        config: RouterConfig,
    ) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = engine.eos_token_ids
        self._pooling = engine.pooling
        self._sight = PromptSight(engine.sight, engine.sight_window)
        self._inbox = inbox
        self._to_detokenization = to_detokenization
        self._config = config
        self._output_processor = OutputProcessor(scheduler, to_detokenization)
        self._lost_http_processes: set[int] = set()
        self.timelines = TimelineRing(config.debug_requests)
        self.steps = StepLoop(scheduler, model, engine, self._output_processor)
        self.adapters = AdapterControl(scheduler, self._output_processor, to_detokenization)
        self.weights = WeightsControl(scheduler, self.steps, self._output_processor, to_detokenization.send)
        self.profiles = ProfileControl(self.steps, self.timelines, to_detokenization)
        self.weights.on_replaced = self._recompute_pinned
        pause = PauseControl(scheduler, self.steps, self._output_processor)
        pause.on_kv_freed = self._recompute_pinned
        self.rl = RlControl(pause, SleepControl(self.steps, pause), to_detokenization)

    @property
    def metrics(self) -> RouterMetrics:
        return self._output_processor.metrics

    async def run(self, log: ThroughputLog) -> None:
        """Serve until cancelled. If the workers die, requests wait until ``use_workers``."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self.steps.run())
            tasks.create_task(self._send_heartbeats(log))
            tasks.create_task(self._watch_deadlines())
            tasks.create_task(self.profiles.run())
            tasks.create_task(self.rl.run())

    def use_workers(self, model: ModelClient) -> None:
        """Continue with new workers in place of lost ones."""
        self.steps.use_workers(model)
        if not self.rl.sleep.is_asleep:
            self.metrics.workers_restarted()
        self._compute_pinned()

    def pin(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Compute these prompts, and keep them in the prefix cache."""
        self._output_processor.pinned = PinnedPrefixes(self._scheduler, prompts)
        self._compute_pinned()

    def _compute_pinned(self) -> None:
        if self._output_processor.pinned is not None:
            self._output_processor.pinned.compute(self._make_internal, time.monotonic())
            self.steps.wake()

    def _recompute_pinned(self) -> None:
        if self._output_processor.pinned is not None:
            self._output_processor.pinned.recompute(self._make_internal, time.monotonic())

    def _make_internal(self, message: GenerateReq) -> Req:
        req = self._make_req(message, None)
        req.is_internal, req.deadline_s = True, None
        return req

    def abort_http_process(self, lost: HttpProcessLost) -> None:
        """Abort the requests of an HTTP process that died."""
        self._lost_http_processes.add(lost.process)
        self._lost_http_processes.discard(lost.successor)
        for req in self._scheduler.drop(lambda req: http_process_of(req.req_id) == lost.process):
            self._output_processor.abort(req, FinishReason.ABORT)
        for group in self._scheduler.groups:
            group.fork_points.release(
                [req_id for req_id in group.fork_points if http_process_of(req_id) == lost.process]
            )
        self.metrics.http_process_lost(lost.process)
        self.steps.wake()

    def reload_adapters(self, workers: WorkerCaller) -> None:
        """Load the adapters of waiting requests into new workers. The requests wait for that."""
        for req in self.adapters.use_workers(workers):
            loading = self.adapters.loading_of(req)
            self._release_after(req, [] if loading is None else [loading])

    async def _receive(self) -> None:
        while True:
            message = await self._inbox.recv()
            if isinstance(message, GenerateReq | ContinueReq):
                self._accept_from_http(message)
            elif isinstance(message, DispatchedReq | MovedReqs | KvCancel):
                self._handle_dispatcher(message)
            elif isinstance(message, AbortReq):
                self._abort(message)
            elif isinstance(message, ReleaseParents):
                self._release_parents(message)
            elif isinstance(message, AbortByRequestId):
                self._to_detokenization.send(message)
            elif isinstance(message, GetTimelines):
                self._to_detokenization.send(self.timelines.answer(message))
            elif isinstance(message, HttpCounts):
                self.metrics.add_http_counts(message)
            elif isinstance(message, EncoderStarted | ImageEncoded):
                self._handle_encoder(message)
            else:
                self._handle_operator(message)

    def _handle_operator(self, message: AdapterQuery | StartProfile | StopProfile | RlQuery) -> None:
        if isinstance(message, AdapterQuery):
            self.adapters.handle(message)
        elif isinstance(message, RlQuery):
            self.rl.put(message)
        else:
            self.profiles.put(message)

    def _handle_encoder(self, message: EncoderStarted | ImageEncoded) -> None:
        images = self._scheduler.groups[0].images
        if images is None:
            raise TypeError(f"there is no encoder, but it sent {type(message).__name__}")
        if isinstance(message, EncoderStarted):
            failures = images.start_encoder(message)
        else:
            self.metrics.encoded(message.seconds)
            failure = images.complete(message)
            failures = [] if failure is None else [failure]
        for failed in failures:
            self._fail_images(failed)
        self.steps.wake()

    def _fail_images(self, failed: ImageFailed) -> None:
        reqs = self._scheduler.drop(lambda req: req.req_id in failed.req_ids)
        self._output_processor.fail(reqs, failed.status, lambda _: failed.message)

    def _image_queue_full_reason(self, message: GenerateReq) -> str:
        """Why its images may not wait for the encoder; empty: they may. Those of one request always may."""
        images, limit = self._scheduler.groups[0].images, self._config.max_queue_size
        if not message.images or images is None:
            return ""
        waiting = sum(images.num_waiting.values())
        if waiting > limit:
            return f"{waiting} images wait, the limit is {limit} (--max_queue_size)"
        num_bytes, most = images.bytes_with(message.images), self._config.max_queue_media_gb
        if images.file_bytes and num_bytes > most * GB:
            return f"the files of images have {num_bytes / GB:.3g} GB, the limit is {most:g} (--max_queue_media_gb)"
        return ""

    def _why_no_images(self, message: GenerateReq) -> str:
        """Why a request cannot run with its images, or its prompt as the model sees it; empty: it can."""
        if refusal := self._sight.why_refused(len(message.prompt_ids)):
            return refusal
        if not message.images:
            return ""
        images = self._scheduler.groups[0].images
        return "this server reads no images" if images is None else images.why_refused(message.images)

    def _release_parents(self, message: ReleaseParents) -> None:
        for group in self._scheduler.groups:
            group.fork_points.release(message.req_ids)
        self.steps.wake()

    def report_cached_blocks(self, send: Callable[[KvCacheEvents], None]) -> CachedBlocks:
        """Tell the dispatcher what the prefix cache holds."""
        blocks = CachedBlocks(group.pool for group in self._scheduler.groups)
        self._output_processor.publish_events(blocks, send)
        return blocks

    def _handle_dispatcher(self, message: DispatchedReq | MovedReqs | KvCancel) -> None:
        if isinstance(message, KvCancel):
            for group in self._scheduler.groups:
                for source in group.sources:
                    source.cancel(message)
            return
        if isinstance(message, DispatchedReq):
            arrived_s = time.monotonic() - message.age_s
            self._accept(msgspec.structs.replace(message.request, arrived_s=arrived_s), message)
            return
        for req_id in message.req_ids:
            req = self._scheduler.abort(req_id)
            if req is not None:
                req.timeline.paused("moved", req.output_len)
        self._output_processor.confirm_moved(message.req_ids)
        self.steps.wake()

    def _accept_from_http(self, message: GenerateReq | ContinueReq) -> None:
        """A request that names a parent has only the tokens that follow it. A dispatcher adds the others."""
        request = message.request if isinstance(message, ContinueReq) else message
        if http_process_of(request.req_id) in self._lost_http_processes:
            return
        if isinstance(message, ContinueReq):
            self._accept(message.request, output_ids=message.output_ids)
            return
        if message.parent is None:
            self._accept(message)
            return
        known_tokens = (group.fork_points.tokens_of(message.parent) for group in self._scheduler.groups)
        begin = next((token_ids for token_ids in known_tokens if token_ids is not None), None)
        if begin is None:  # it stays known until the HTTP process releases it
            self._output_processor.refuse(message.req_id, message.unknown_parent, 500)
            return
        self._accept(message.after(begin))

    def _accept(
        self, message: GenerateReq, dispatched: DispatchedReq | None = None, output_ids: Sequence[int] = ()
    ) -> None:
        timeline = self.timelines.start(message, dispatched is not None and dispatched.target is not None)
        is_moved = dispatched is not None and dispatched.is_moved
        refusal = self.weights.served.problem or ("" if is_moved else self.rl.pause.refusal)
        if refusal:
            self._refuse(message, timeline, refusal, 503)
            return
        full = "" if is_moved else self._queue_full_reason(message)
        if full:
            self._refuse(message, timeline, f"the queue is full: {full}; retry later", 429)
            return
        if reason := self._why_no_images(message):
            self._refuse(message, timeline, reason, 400)
            return
        try:
            adapter = self.adapters.find(message.scheduling.lora)
        except LightserveError as error:
            self._refuse(message, timeline, str(error), error.status)
            return
        req = self._make_req(message, adapter)
        if req.boundaries and (undivided := self._why_undivided(req.boundaries)):
            self._refuse(message, timeline, undivided, 400)
            return
        output_ids = output_ids if dispatched is None else dispatched.output_ids
        if output_ids:
            req.continue_from(list(output_ids), time.monotonic())
        if req.finish_reason is not None:
            reason = f"the request cannot go on here: its {req.output_len} tokens already end it"
            self._refuse(message, timeline, f"{reason} ({req.finish_reason.value})", 503)
            return
        if dispatched is not None:  # the dispatcher has announced it
            self._prepare_dispatched(req, dispatched)
        elif self._pooling is None:  # otherwise there is no text
            self._output_processor.register(message.req_id, message.params.text, list(output_ids))
        req.timeline = timeline
        timeline.queued()
        self._queue(req, adapter, runs_alone=dispatched is not None and dispatched.runs_alone)

    def _queue_full_reason(self, message: GenerateReq) -> str:
        """Why a request may not wait; empty: it may. One request may always wait."""
        config, waiting = self._config, self._scheduler.num_waiting + self._scheduler.num_blocked
        staying = waiting - self.steps.num_starting
        if staying >= config.max_queue_size:
            return f"{staying} requests wait, the limit is {config.max_queue_size} (--max_queue_size)"
        if reason := self._image_queue_full_reason(message):
            return reason
        tokens, prompt_len = sum(group.queue.num_tokens for group in self._scheduler.groups), len(message.prompt_ids)
        if waiting and tokens + prompt_len > config.max_queue_tokens:
            return (
                f"the prompts of {waiting} waiting requests have {tokens} tokens, and this one has {prompt_len}; "
                f"the limit is {config.max_queue_tokens} (--max_queue_tokens)"
            )
        return ""

    def _why_undivided(self, boundaries: ChunkBoundaries) -> str:
        return why_undivided(boundaries, min(group.chunking.max_span for group in self._scheduler.groups))

    def _refuse(self, message: GenerateReq, timeline: Timeline, reason: str, status: int) -> None:
        self._output_processor.refuse(message.req_id, reason, status)
        timeline.refused(reason)

    def _prepare_dispatched(self, req: Req, dispatched: DispatchedReq) -> None:
        req.block_hashes = np.frombuffer(dispatched.block_hashes, dtype="<i8")
        if dispatched.target is not None:
            req.can_fork = False  # the engine that wants its KV computes it
        req.target, req.kv_transfer_params = dispatched.target, dispatched.kv_transfer_params

    def _queue(self, req: Req, adapter: RegisteredAdapter | None, runs_alone: bool) -> None:
        """A request may run once the workers have compiled its grammar and loaded its adapter: no step waits for that.

        It is queued before its adapter is loaded: if that fails, the request fails too.
        """
        images = self._scheduler.groups[0].images
        if req.images and images is not None:
            images.enter(req, max(group.pool.cached_len(req) for group in self._scheduler.groups))
        self._scheduler.defer(req, runs_alone)
        grammar = req.params.sampling.grammar
        compiled = None if grammar is None else self.steps.compile_grammar(grammar)
        loading = None if adapter is None else self.adapters.load(adapter)
        if adapter is not None and loading is not None:
            loading.add_done_callback(partial(self._on_adapter_loaded, req, adapter, adapter.salt))
        self._release_after(req, [future for future in (compiled, loading) if future is not None])

    @staticmethod
    def _on_adapter_loaded(req: Req, adapter: RegisteredAdapter, salt: str, _: asyncio.Future[str]) -> None:
        """Its prefixes have another name from now on: that of the adapter's files."""
        req.salt, req.lora_digest = req.salt.replace(salt, adapter.salt, 1), adapter.digest

    def _release_after(self, req: Req, waits: Sequence[asyncio.Future[Any]]) -> None:
        """Let a held request be admitted when all of these have resolved."""
        waits = [future for future in waits if not future.done()]
        if waits:
            waits[0].add_done_callback(lambda _: self._release_after(req, waits))
            return
        if req.target is not None and req.target.adapter != req.lora_digest and self._scheduler.abort(req.req_id):
            self._output_processor.fail([req], 409, lambda _: OTHER_ADAPTER)
            return
        self._scheduler.make_ready(req)
        self.steps.wake()

    def _make_req(self, message: GenerateReq, adapter: RegisteredAdapter | None) -> Req:
        scheduling = message.scheduling
        lora = "" if adapter is None else adapter.salt  # an adapter's KV differs from the base model's
        timeout_s = scheduling.timeout_s or self._config.request_timeout or None
        uses_cache = scheduling.use_cache and not self._config.disable_dynamic_prompt_cache
        shares_prefix = self._pooling is None or self._pooling.shares_prefix
        prompt_ids = with_image_ids(message.prompt_ids, message.images)
        salt = self.weights.served.salt + lora + self._sight.salt(prompt_ids) + message.prefix_salt(uses_cache)
        return Req(
            message.req_id,
            prompt_ids,
            message.params,
            message.params.stopping.max_new_tokens,
            self._eos_token_ids,
            arrived_s=message.arrived_s,
            priority=scheduling.priority,
            deadline_s=None if timeout_s is None else message.arrived_s + timeout_s,
            keeps_kv_cached=shares_prefix and (uses_cache or message.is_group_open),
            is_private=not uses_cache,
            shares_prefix=shares_prefix,
            salt=salt,
            lora_id=None if adapter is None else adapter.lora_id,
            lora_digest="" if adapter is None else adapter.digest,
            parent=message.parent,
            can_fork=message.is_group_open,
            generation_prompt_len=scheduling.generation_prompt_len,
            boundaries=self._sight.boundaries(len(prompt_ids), message.images),
            images=tuple(message.images),
        )

    def _abort(self, message: AbortReq) -> None:
        req = self._scheduler.abort(message.req_id)
        if req is None:  # it has ended meanwhile
            return
        if message.keeps_tokens:
            self._output_processor.end([req])
        else:
            self._output_processor.abort(req, message.reason)
        self.steps.wake()

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            self._fail_expired(time.monotonic())

    def _fail_expired(self, now_s: float) -> None:
        expired = self._scheduler.drop(lambda req: req.is_expired(now_s))
        if expired:
            self._output_processor.fail(expired, 504, _timeout_message)
            self.steps.wake()

    async def _send_heartbeats(self, log: ThroughputLog) -> None:
        """Send the metrics every second, and log a throughput line at the configured interval."""
        while True:
            self.steps.check_workers()
            self._output_processor.send_heartbeat(self.steps.step_age_s(), self.steps.has_workers)
            if line := log.line(time.monotonic()):
                logger.info(line)
            await asyncio.sleep(HEARTBEAT_S)


def _timeout_message(req: Req) -> str:
    timeout_s = round((req.deadline_s or 0.0) - req.arrived_s, 3)
    return f"the request exceeded its timeout of {timeout_s:g} s (timeout or --request_timeout)"
