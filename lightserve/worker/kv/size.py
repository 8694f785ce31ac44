"""How many tokens the KV pools hold: the memory that the weights and the largest step leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.device import Device
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.batch.step_input import StepShape
from lightserve.worker.kv.pools import KvSizes, WindowedSizing, tokens_in
from lightserve.worker.kv.state_size import state_rows
from lightserve.worker.step_runner import StepRunner

# Memory beside the logits of a step: the sampler's copies of them in float32, and what captured steps keep. It is more
# than any measurement showed: 1.4 GB for the 256 x 128,256 logits of Llama-3-8B.
COPIES_OF_LOGITS = 12
FLOAT32_BYTES = 4
STEPS_IN_FLIGHT = 4  # the tokens of so many steps are planned at once at most, in a model without a KV cache
# The router keeps 9 bytes per slot, 13 beside a windowed pool. Only toy models reach this limit: the KV of SmolLM2-135M
# takes 23 kB per token.
MAX_SLOTS = 2**24


def kv_size(
    config: WorkerConfig, model: TpPartBaseModel, platform: Device, launch_kernels: Callable[[], None]
) -> KvSizes:
    """``model`` has its weights, and a tiny KV pool.

    The kernels that ``launch_kernels`` launches are compiled together with those of the largest step: that takes no
    longer than the largest step alone.
    """
    max_len, max_reqs = model.req_manager.max_len, model.req_manager.max_reqs
    if not model.has_kv:
        in_flight = STEPS_IN_FLIGHT * _step_tokens(config, model, platform)
        return KvSizes(max(config.max_total_token_num or in_flight, max_len))
    sizing = _windowed_sizing(config, model, platform)
    if config.max_total_token_num is not None:
        tokens = config.max_total_token_num
        sizes = KvSizes(tokens) if sizing is None else sizing.for_tokens(tokens)
        memory = _free_memory(config, model, platform)
        return sizes._replace(state_rows=state_rows(config, model, memory))
    largest_step = partial(_largest_step, config, model, platform)

    def launch_all() -> None:
        largest_step()
        launch_kernels()

    platform.compile_kernels(model.device, launch_all)
    peak = platform.peak_bytes(model.device, largest_step)
    logits = COPIES_OF_LOGITS * FLOAT32_BYTES * max_reqs * model.config.vocab_size
    peak += logits if peak and model.spec.has_lm_head and model.pp.is_last else 0
    budget = max(_free_memory(config, model, platform) - peak, 0)
    rows = state_rows(config, model, budget)
    budget = max(budget - rows * model.kv_layout.bytes_per_state_row, 0)
    if sizing is None:
        experts = model.routed_experts
        bytes_per_token = model.kv_layout.bytes_per_token + (0 if experts is None else experts.bytes_per_slot)
        fits = model.args.parallel.min_of_engine(tokens_in(budget, bytes_per_token), model.device)
        sizes = KvSizes(min(fits, MAX_SLOTS))
    else:
        sizes = sizing.for_budget(budget, MAX_SLOTS)
    fits = sizes.tokens
    if fits < max_len:
        remedy = f"set max_req_total_len to {fits} or less" if fits else "use a smaller model or more ranks"
        states = f" and {rows} states (max_state_rows)" if rows else ""
        raise ServerError(
            f"after the weights{states}, memory holds {fits} tokens of KV, fewer than one request of {max_len}; "
            f"{remedy}"
        )
    return sizes._replace(state_rows=rows)


def _free_memory(config: WorkerConfig, model: TpPartBaseModel, platform: Device) -> int:
    platform.wait_for_others()
    return platform.kv_budget(model.device, config.mem_fraction)


def _windowed_sizing(config: WorkerConfig, model: TpPartBaseModel, platform: Device) -> WindowedSizing | None:
    """None if no layer has a window."""
    if model.model_kv_layout.window is not None:
        return WindowedSizing(
            model.model_kv_layout,
            model.req_manager.max_len,
            _step_tokens(config, model, platform),
            config.max_windowed_token_num,
            own_layout=model.kv_layout,
            least=partial(model.args.parallel.min_of_engine, device=model.device),
        )
    if config.max_windowed_token_num:
        raise RuntimeError("max_windowed_token_num for a model without windows passed the table of combinations")
    return None


def _step_tokens(config: WorkerConfig, model: TpPartBaseModel, platform: Device) -> int:
    return config.batch_max_tokens or platform.profile(model.device).step_limits.batch_max_tokens


def _largest_step(config: WorkerConfig, model: TpPartBaseModel, platform: Device) -> None:
    """A step with the most tokens and the most requests. It computes padding, which takes as much memory."""
    batch = InferBatch(model.req_manager, model.mem_manager.padding_slot, model.device)
    if model.mem_manager.state_rows:
        batch.enable_states()
    tokens = _step_tokens(config, model, platform)
    decodes = model.req_manager.max_reqs - 1
    shape = StepShape(tokens + decodes, decodes + 1, has_decodes=True, has_prompts=True)
    runner = StepRunner(model, batch, platform)
    if not model.pp.is_last:
        runner.run_stage(batch.padding(shape), shape)
    elif model.spec.pooling is None:
        runner.run(batch.padding(shape), shape)
    else:
        model.final_states(runner.hidden_states(batch.padding(shape), shape))
