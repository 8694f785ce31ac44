"""How large a step may be, as the operator or the device says."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.io_struct import StepLimits


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int  # requests
    batch_max_tokens: int  # tokens of a step
    chunk_size: int | None  # prompt tokens of a step with decodes, scaled by chunk_sizing.py; None: whole prompts
    sizes: tuple[int, ...] = ()  # total tokens of a step with prompts that the device computes efficiently; (): any
    token_ratio: float = 0.0  # share of the pool up to which output lengths are estimated; above it the maximum counts


def limits_of(worker: WorkerConfig, router: RouterConfig, device: StepLimits) -> Limits:
    """The operator's values. Where they are missing, the device's defaults."""
    batch_max_tokens = worker.batch_max_tokens or device.batch_max_tokens
    chunk_size = router.chunked_prefill_size or device.chunked_prefill_size or batch_max_tokens
    return Limits(
        max_running=worker.running_max_req_size,
        batch_max_tokens=batch_max_tokens,
        chunk_size=None if router.disable_chunked_prefill else min(chunk_size, batch_max_tokens),
        sizes=device.sizes,
        token_ratio=router.router_token_ratio,
    )
