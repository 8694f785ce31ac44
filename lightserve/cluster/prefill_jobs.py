"""Prompts that prefill engines compute for the requests of decode engines.

    dispatcher ──request with a transfer──▶ decode engine ──RemotePrefillRequest, it has the slots──▶ dispatcher
    dispatcher ──the prompt, where its KV goes──▶ prefill engine ──KV──▶ decode engine

A job has the id of its request, in another engine. It ends with its only token, which nobody needs. If it cannot be
started, if its engine is lost, or if the queues of prefill engines are long, the decode engine gets KvCancel and
computes what is missing.
"""

from __future__ import annotations

import msgspec

from lightserve.cluster.engine import Engine
from lightserve.cluster.inflight_request import InflightRequest
from lightserve.cluster.placement import Placement
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvCancel, KvTarget, KvTransferTimeout, MovedReqs, RemotePrefillRequest
from lightserve.messages.int_arrays import int32s
from lightserve.messages.params import GenerationParams
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

PARAMS = GenerationParams.of(max_new_tokens=1, temperature=0.0, seed=0)


class PrefillJobs:
    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._engine_of: dict[int, Engine] = {}  # by req_id
        self._sent_by: dict[int, tuple[int, int]] = {}  # by req_id: the last transfer, and who got the prompt

    def start(self, req: InflightRequest, decode: Engine, wanted: RemotePrefillRequest) -> None:
        """The decode engine of a request has slots for its prompt, or needs none."""
        params, req.kv_transfer_params = req.kv_transfer_params, None
        if params is None or params.id != wanted.transfer_id:
            return
        if not wanted.num_blocks:
            decode.compute_itself(req, is_measured=True)
            return
        choice = self._placement.choose_prefill(req, decode, wanted.first_block * BLOCK_TOKENS)
        if choice is None:
            decode.link.send(KvCancel(req.req_id, wanted.transfer_id, was_started=False))
            decode.compute_itself(req, is_measured=True)
            return
        engine, _ = choice
        self._engine_of[req.req_id] = engine
        self._sent_by[req.req_id] = wanted.transfer_id, engine.number
        self._placement.add_prefill(engine, _job(req, wanted))

    def finish(self, engine: Engine, job: InflightRequest) -> None:
        """The prompt is computed; the last of its KV is on its way."""
        self._remove(engine, job)

    def fail(self, engine: Engine, job: InflightRequest) -> None:
        """The engine refused it, lost it, or is lost."""
        self._remove(engine, job)
        decode = self._placement.engine_of(job.req_id)
        if decode is not None and job.target is not None:
            decode.link.send(KvCancel(job.req_id, job.target.transfer_id))
            decode.compute_itself(decode.requests[job.req_id], is_measured=False)

    def kv_is_missing(self, decode: Engine, missing: KvTransferTimeout) -> None:
        """The decode engine has waited in vain. The two are left alone with each other for a while."""
        transfer_id, number = self._sent_by.get(missing.req_id, (0, 0))
        if transfer_id == missing.transfer_id:
            logger.warning("KV of engine %d has not come to engine %d in time", number, decode.number)
            self._placement.keep_apart(decode.number, number)
            if missing.req_id in decode.requests:
                decode.compute_itself(decode.requests[missing.req_id], is_measured=False)

    def cancel(self, req: InflightRequest) -> None:
        """The request has ended, or leaves its decode engine."""
        req.kv_transfer_params = None
        self._sent_by.pop(req.req_id, None)
        engine = self._engine_of.get(req.req_id)
        if engine is None:
            return
        self._remove(engine, engine.requests[req.req_id])
        engine.link.send(MovedReqs([req.req_id]))
        req.leaving.add(engine.number)  # until it confirms that it has forgotten the job

    def _remove(self, engine: Engine, job: InflightRequest) -> None:
        del self._engine_of[job.req_id]
        self._placement.remove_prefill(engine, job)


def _job(req: InflightRequest, wanted: RemotePrefillRequest) -> InflightRequest:
    """Whole blocks only, which divide no image. The decode engine computes the tokens after them."""
    request, end = req.request, wanted.first_block + wanted.num_blocks
    known = [*int32s(request.prompt_ids).tolist(), *req.output_ids][: end * BLOCK_TOKENS]
    images = [image for image in request.images if image.end <= end * BLOCK_TOKENS]
    request = msgspec.structs.replace(request, prompt_ids=int32s(known), params=PARAMS, images=images)
    hashes = req.hashes[:end]  # of the prompt without output tokens
    return InflightRequest(
        request,
        hashes,
        req.hash_bytes[: 8 * len(hashes)],
        req.deadline_s,
        target=KvTarget(wanted.transfer_id, wanted.first_block, wanted.addresses, wanted.adapter),
    )
