"""Messages from the router to the detokenizer: new requests, tokens, failures, heartbeats. It counts metrics too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from lightserve.ipc.channel import Sender
from lightserve.messages.cluster import KvCacheEvents
from lightserve.messages.output import (
    Admission,
    BatchTokenIdOut,
    EmbeddingOut,
    RouterStats,
    TextReq,
    ToDetokenization,
    TokenIdOut,
)
from lightserve.messages.params import FinishReason, TextParams
from lightserve.messages.step import Embedding, ReqFailed, StepResult, TokenColumns, TokenOut
from lightserve.router.kv.cached_blocks import CachedBlocks
from lightserve.router.observability.stats import RouterMetrics
from lightserve.router.pinned_prefixes import PinnedPrefixes
from lightserve.router.req import Req
from lightserve.router.scheduler import ReqTokens, Scheduler


class OutputProcessor:
    def __init__(self, scheduler: Scheduler, to_detokenization: Sender[ToDetokenization]) -> None:
        self.metrics = RouterMetrics()
        self.metrics.values["spec_decode_synthetic"] = float(scheduler.limits.has_synthetic_drafts)
        self._scheduler = scheduler
        self._to_detokenization = to_detokenization
        self._aborted: list[int] = []  # requests aborted since the last message
        self.weight_version = ""  # empty: the weights were never replaced
        self.problem = ""  # why no text can be generated with them
        self.is_sleeping = False  # the weights have no memory: --enable_rl
        self.adapter_digests: Callable[[], dict[str, str]] = dict  # see RouterStats
        self.pinned: PinnedPrefixes | None = None  # set if there are pinned prefixes
        self._publishers: list[tuple[CachedBlocks, Callable[[KvCacheEvents], None]]] = []  # to the dispatcher

    def publish_events(self, blocks: CachedBlocks, send: Callable[[KvCacheEvents], None]) -> None:
        """From now on, ``send`` what changes in the prefix cache."""
        self._publishers.append((blocks, send))

    def register(self, req_id: int, params: TextParams, output_ids: list[int]) -> None:
        """A request was accepted, which has these tokens. This message comes before its other tokens."""
        self._to_detokenization.send(BatchTokenIdOut(new=[TextReq(req_id, params, output_ids)]))

    def refuse(self, req_id: int, message: str, status: int = 429) -> None:
        self.metrics.refused()
        self._to_detokenization.send(BatchTokenIdOut(failed=[ReqFailed(req_id, status, message)]))

    def fail(self, reqs: list[Req], status: int, message_of: Callable[[Req], str]) -> None:
        """Requests failed outside of a step."""
        reqs = [req for req in reqs if not self._end_internal(req, has_failed=True)]
        failed = [ReqFailed(req.req_id, status, message_of(req)) for req in reqs]
        for req, failure in zip(reqs, failed, strict=True):
            req.timeline.failed(failure, req.output_len)
        self.metrics.failed(len(failed))
        self._to_detokenization.send(BatchTokenIdOut(failed=failed))

    def abort(self, req: Req, reason: FinishReason) -> None:
        """A request was aborted. The next message says so."""
        self._aborted.append(req.req_id)
        self._count_finished(req, reason, time.monotonic())

    def end(self, reqs: Sequence[Req]) -> None:
        """Requests were aborted, and their clients get what they have."""
        shown = [req for req in reqs if not self._end_internal(req, has_failed=True)]
        now = time.monotonic()
        for req in shown:
            self._count_finished(req, FinishReason.ABORT, now)
        self._to_detokenization.send(BatchTokenIdOut(ended=[req.req_id for req in shown]))

    def confirm_moved(self, req_ids: list[int]) -> None:
        """The dispatcher may send these requests here again: no token of before comes after this message."""
        self._to_detokenization.send(BatchTokenIdOut(aborted=req_ids))

    @property
    def _num_forced(self) -> int:
        return sum(group.num_forced for group in self._scheduler.groups)

    def report(self, result: StepResult) -> None:
        """Give the tokens of a step to their requests, and send them in one message with the aborted requests."""
        now = time.monotonic()
        self._scheduler.process_drafts(result.drafts, result.proposals)
        if len(result.drafts):
            self.metrics.drafts(result.drafts)
        num_forced = self._num_forced
        plain, others = self._process_plain(result.plain, now)
        others += result.detailed
        outs = self._process_tokens(others, now) if others else []
        self.metrics.forced(self._num_forced - num_forced)
        failed = self._process_failures(result.failed)
        embeddings = self._process_embeddings(result.embeddings, now)
        self._send_events()  # before the last token of a request, so that the dispatcher always knows where its KV is
        if outs or failed or self._aborted or embeddings or len(plain):
            self._to_detokenization.send(
                BatchTokenIdOut(
                    outs,
                    failed=failed,
                    aborted=self._aborted,
                    plain=plain,
                    embeddings=embeddings,
                    drafts=result.drafts,
                )
            )
            self._aborted = []

    def send_heartbeat(self, step_age_s: float, has_workers: bool) -> None:
        scheduler = self._scheduler
        waiting = scheduler.num_waiting + scheduler.num_blocked
        pools = [group.pool for group in scheduler.groups]
        used, size = sum(pool.used for pool in pools), sum(pool.size for pool in pools)
        self.metrics.set_load(scheduler.num_running, waiting, used, size)
        self.metrics.values["kv_pinned_tokens"] = sum(pool.pinned_tokens for pool in pools)
        if len(pools) > 1:
            self.metrics.set_groups([(len(group.batch), group.pool.used) for group in scheduler.groups])
        for groups in zip(*(pool.groups for pool in pools), strict=True):  # one KV group of all attention groups
            used, size = sum(group.used for group in groups), sum(group.size for group in groups)
            self.metrics.set_kv_group_load(groups[0].name, used, size)
            num_kept, num_evicted = sum(group.num_kept for group in groups), sum(group.num_evicted for group in groups)
            self.metrics.set_kv_group_cache(groups[0].name, num_kept, num_evicted)
        parts = dict.fromkeys(step_part for group in scheduler.groups for step_part in group.parts)  # some are shared
        self.metrics.set_figures(step_part.figures() for step_part in parts)
        self._send_events()
        suspects = [] if has_workers else [req_id for req_id in _crash_suspects(scheduler) if req_id >= 0]
        snapshot = self.metrics.snapshot()
        is_able = has_workers and not self.is_sleeping
        stats = RouterStats(
            step_age_s, snapshot, is_able, suspects, self.is_sleeping, self.problem, self.adapter_digests()
        )
        self._to_detokenization.send(stats)

    def _send_events(self) -> None:
        for blocks, send in self._publishers:
            events = blocks.take_events()
            if events is not None:
                send(events)

    def _process_failures(self, failures: Sequence[ReqFailed]) -> list[ReqFailed]:
        """After the tokens of the step: a request may have drafts that were accepted before the token that it lacks."""
        failed = [failure for failure in failures if self._has_failed(failure)]
        self.metrics.failed(len(failed))
        self.metrics.numerical_errors(sum(failure.status >= 500 for failure in failed))
        return failed

    def _has_failed(self, failure: ReqFailed) -> bool:
        """Whether the request ends now. Otherwise it ended before."""
        req = self._scheduler.fail(failure)
        if req is None or self._end_internal(req, has_failed=True):
            return False
        req.timeline.failed(failure, req.output_len)
        return True

    def _end_internal(self, req: Req, has_failed: bool = False) -> bool:
        """Whether the request was the router's own."""
        if req.is_internal and self.pinned is not None:
            self.pinned.end(req, has_failed)
        return req.is_internal

    def _process_plain(self, plain: TokenColumns, now: float) -> tuple[TokenColumns, list[TokenOut]]:
        """The plain tokens that only have to be sent on, and the others."""
        if not len(plain):
            return plain, []
        is_known = self._scheduler.process_plain(plain)
        known, others = plain, list[TokenOut]()
        if not is_known.all():
            known, others = plain.where(is_known), plain.where(~is_known).outs()
        for gap_s, count in zip(*self._scheduler.observe_gaps(known.req_ids, now), strict=True):
            self.metrics.next_tokens(gap_s, count)
        if len(known.counts):
            self.metrics.next_tokens(0.0, len(known.token_ids) - len(known))
        return known, others

    def _process_tokens(self, tokens: list[TokenOut], now: float) -> list[TokenIdOut]:
        gaps: dict[float, int] = {}  # time of the last token -> tokens; most requests got it in the same step
        outs: list[TokenIdOut] = []
        for _, of_req in groupby(tokens, key=lambda out: out.req_id):
            processed = self._scheduler.process_req(list(of_req))
            if processed is None or self._end_internal(processed.req):
                continue
            outs += _token_id_outs(processed, self._count_tokens(processed, gaps, now))
            req = processed.req
            if req.finish_reason is not None:
                self._count_finished(req, req.finish_reason, now)
        for last_token_s, count in gaps.items():
            self.metrics.next_tokens(now - last_token_s, count)
        return outs

    def _count_tokens(self, processed: ReqTokens, gaps: dict[float, int], now: float) -> Admission | None:
        """Of a request, in the metrics or in ``gaps``. Returns how it was admitted, if these are its first tokens."""
        req, count = processed.req, len(processed.outs)
        if req.target is not None:  # the engine that wants its prompt counts the request
            return Admission(req.admitted_s - req.arrived_s, req.cached_len, self.weight_version)
        last_token_s, req.last_token_s = req.last_token_s, now
        if count > 1:
            gaps[now] = gaps.get(now, 0) + count - 1
        if req.output_len == count:
            return self._count_first_token(req, now)
        gaps[last_token_s] = gaps.get(last_token_s, 0) + 1
        return None

    def _process_embeddings(self, results: list[Embedding], now: float) -> list[EmbeddingOut]:
        outs = []
        for result in results:
            req = self._scheduler.process_embedding(result.req_id)
            if req is not None:
                outs.append(EmbeddingOut(req.req_id, result.values, self._count_admission(req)))
                self._count_finished(req, FinishReason.STOP, now)
        return outs

    def _count_first_token(self, req: Req, now: float) -> Admission:
        req.first_token_s = now
        admission = self._count_admission(req)
        self.metrics.first_token(now - req.arrived_s, now - req.admitted_s)
        for group in self._scheduler.groups:  # they wait for each other's steps
            group.observe_first_token(req, now - req.admitted_s)
        req.timeline.first_token(now)
        return admission

    def _count_admission(self, req: Req) -> Admission:
        queue_s = req.admitted_s - req.arrived_s
        self.metrics.admitted(queue_s, len(req.prompt_ids), req.cached_len)
        return Admission(queue_s, req.cached_len, self.weight_version)

    def _count_finished(self, req: Req, reason: FinishReason, now: float) -> None:
        if req.target is not None:
            return
        req.timeline.finished(reason, now, req.output_len)
        has_run = req.output_len > 0
        self.metrics.finished(
            reason.value,
            now - req.arrived_s,
            now - req.first_token_s if has_run else 0.0,
            now - req.admitted_s if has_run else 0.0,
            len(req.prompt_ids),
            req.output_len,
            req.max_new_tokens,
        )


def _crash_suspects(scheduler: Scheduler) -> list[int]:
    """Requests that have to run alone until their next token."""
    return [req_id for group in scheduler.groups for req_id in group.isolation.pending_ids]


def _token_id_outs(processed: ReqTokens, admission: Admission | None) -> list[TokenIdOut]:
    """The tokens of a request. ``admission`` comes with the first, the end of the request with the last."""
    req, added = processed
    outs = [TokenIdOut(req.req_id, out.token) for out in added]
    outs[0] = msgspec.structs.replace(outs[0], admission=admission)
    if req.finish_reason is not None:
        outs[-1] = msgspec.structs.replace(
            outs[-1], finish_reason=req.finish_reason, stop_reason=req.stop_token, is_text_token=req.is_text_token
        )
    return outs
