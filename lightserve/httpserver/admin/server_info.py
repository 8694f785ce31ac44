"""GET /get_server_info: what runs here, how it is computed, and what it does now. The chat page shows it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from lightserve import __version__
from lightserve.httpserver.context import ServerContext
from lightserve.messages.output import RouterStats
from lightserve.messages.params import SamplingParams

# by the name in the response: the metric
LOAD_METRICS = {
    "running_requests": "num_requests_running",
    "waiting_requests": "num_requests_waiting",
    "kv_used_tokens": "kv_used_tokens",
    "kv_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def add_server_info(router: APIRouter, context: ServerContext) -> None:
    @router.get("/get_server_info")
    async def get_server_info() -> JSONResponse:
        """The model, its limits and the load of at most a second ago."""
        return JSONResponse(await server_info(context))


async def server_info(context: ServerContext) -> dict[str, Any]:
    return {
        "version": __version__,
        "model": _model(context),
        "limits": _limits(context),
        "sampling_defaults": dict(context.sampling_defaults.params),
        "sampling": _sampling(context),
        "unhealthy_reason": context.manager.unhealthy_reason(),
        "load": _load(await context.manager.latest_stats()),
    }


def _model(context: ServerContext) -> dict[str, Any]:
    details, tokenizer = context.details, context.optional_tokenizer
    architectures = [] if details is None else details.hf_config.get("architectures")
    return {
        "name": context.model_name,
        "names": list(context.model_names),
        "architecture": str(architectures[0]) if architectures else None,
        "parameters": None if details is None else details.parameter_count,
        "weight_format": None if details is None else details.file_format,
        "weight_data_type": None if details is None else details.data_type,
        "weight_bytes": None if details is None else details.size_bytes,
        "computed": context.manager.limits.dtype_and_device,
        "input_modalities": ["text", *(() if context.images is None else context.images.layout.kinds)],
        "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }


def _limits(context: ServerContext) -> dict[str, int]:
    limits = context.manager.limits
    return {"max_req_total_len": limits.max_req_total_len, "max_total_token_num": limits.max_total_token_num}


def _sampling(context: ServerContext) -> dict[str, float]:
    """The values of a request that sets none: the model's, else the server's."""
    plain = SamplingParams()
    return {name: context.sampling_defaults.params.get(name, getattr(plain, name)) for name in SAMPLING}


def _load(stats: RouterStats | None) -> dict[str, float] | None:
    """None if the router has sent no metrics."""
    return None if stats is None else {name: stats.metrics.values[metric] for name, metric in LOAD_METRICS.items()}
