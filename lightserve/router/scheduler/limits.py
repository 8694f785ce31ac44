"""The limits of the scheduler: the operator's values, or the defaults of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.messages.control import PoolingLimits, StepLimits


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_running: int  # requests
    batch_max_tokens: int  # tokens of a step
    chunk_size: int | None  # prompt tokens of a step with decodes, scaled by chunking.py; None: whole prompts
    preferred_step_tokens: tuple[int, ...] = ()  # step sizes that the device computes efficiently; (): any
    num_stages: int = 1  # of the pipeline; if several, steps in flight compute different requests
    token_ratio: float = 0.0  # share of the pool up to which output lengths are estimated; above it the maximum counts
    long_prompt_step_s: float = 0.0  # what a step with a long prompt may take beside few decodes; 0: a usual chunk
    max_step_s: float | None = None  # what a step with prompts and decodes may take; None: chunk_size decides
    num_drafts: int = 0  # tokens that the workers draft after the next one of a request
    has_draft_head: bool = False  # a head computes them after each step, for the next one
    kv_lookahead: int = 0  # tokens after a token that its KV depends on: see KvPool
    past_outputs: int = 0  # from which drafts may come: how many are kept of a salt
    has_synthetic_drafts: bool = False  # a schedule accepts them
    weight_read_tokens: float = 0.0  # what a draft costs: see draft_policy.py; 0: nothing
    leaves_out_drafts: bool = False  # steps do not compute drafts that nobody proposes


def make_limits(
    worker: WorkerConfig, router: RouterConfig, device: StepLimits, pooling: PoolingLimits | None = None
) -> SchedulerLimits:
    """The operator's values. ``device`` has the defaults. Without a KV cache, texts are not computed in chunks.

    A stream of a pipeline gets a token from one step of ``pp``, so each of them may take a part of the time.
    """
    batch_max_tokens = worker.batch_max_tokens or device.batch_max_tokens
    chunk_size = router.chunked_prefill_size or device.chunked_prefill_size or batch_max_tokens
    computes_whole_prompts = router.disable_chunked_prefill or (pooling is not None and not pooling.has_kv)
    return SchedulerLimits(
        max_running=worker.running_max_req_size or device.max_running,
        batch_max_tokens=batch_max_tokens,
        chunk_size=None if computes_whole_prompts else min(chunk_size, batch_max_tokens),
        preferred_step_tokens=device.preferred_step_tokens,
        num_stages=worker.pp,
        token_ratio=router.router_token_ratio,
        long_prompt_step_s=_long_prompt_step_s(router, device) / worker.pp,
        weight_read_tokens=device.weight_read_tokens,
        leaves_out_drafts=device.leaves_out_drafts,
        max_step_s=None if router.itl_target_ms is None else router.itl_target_ms / 1000 / worker.pp,
        **_draft_limits(worker),
    )


def _draft_limits(worker: WorkerConfig) -> dict[str, Any]:
    config = worker.speculation
    if config is None:
        return {}
    return {
        "num_drafts": config.num_speculative_tokens,
        "has_draft_head": config.has_head,
        "kv_lookahead": int(config.reads_next_token),
        "past_outputs": config.past_outputs,
        "has_synthetic_drafts": config.is_synthetic,
    }


def _long_prompt_step_s(router: RouterConfig, device: StepLimits) -> float:
    if router.itl_target_ms is not None:
        return router.itl_target_ms / 1000
    return device.long_prompt_step_s if router.chunked_prefill_size is None else 0.0
