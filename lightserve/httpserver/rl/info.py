"""GET /server_info and /get_world_size, as the trainers of vLLM and SGLang read them."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from lightserve.errors import UnavailableError
from lightserve.httpserver.admin.server_info import server_info
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.errors import error_response
from lightserve.httpserver.rl.calls import ask
from lightserve.messages.rl import GetRlState

LOADS = {"num_running_reqs": "num_requests_running", "num_waiting_reqs": "num_requests_waiting"}


def add_info(router: APIRouter, context: ServerContext) -> None:
    @router.get("/get_world_size")
    async def get_world_size(include_dp: Annotated[bool, Query()] = True) -> JSONResponse:
        """The ranks that hold weights: of all engines, or of one."""
        engines, ranks = await _ranks(context)
        return JSONResponse({"world_size": ranks * (engines if include_dp else 1)})

    @router.get("/server_info")
    async def get_rl_server_info() -> JSONResponse:
        """That of /get_server_info, with the fields that trainers read."""
        parallel = await _parallel_sizes(context)
        return JSONResponse(await server_info(context) | _of_vllm(context, parallel) | _of_sglang(context, parallel))


def add_loads(router: APIRouter, context: ServerContext) -> None:
    @router.get("/health_generate")
    async def health_generate() -> Response:
        """As /health: 200 only if a token can be generated now."""
        reason = context.manager.unhealthy_reason()
        return JSONResponse({"status": "ok"}) if reason is None else error_response(UnavailableError(reason))

    @router.get("/v1/loads")
    async def loads() -> JSONResponse:
        """Requests that run and wait, of at most a second ago; trainers wait until there are none."""
        stats = await context.manager.latest_stats()
        values = {} if stats is None else stats.metrics.values
        load = {name: int(values.get(metric, 0)) for name, metric in LOADS.items()}
        return JSONResponse({"loads": [{"dp_rank": 0, **load}]})


class ParallelSizes(NamedTuple):
    tp: int
    pp: int
    dp: int


async def _ranks(context: ServerContext) -> tuple[int, int]:
    """Engines, and the ranks of each. A gateway has them from its engines, which are alike."""
    settings = context.rl
    if settings.dp is not None:
        return settings.dp, settings.ranks
    reply = await ask(context, GetRlState)
    return reply.engines, reply.count // reply.engines


async def _parallel_sizes(context: ServerContext) -> ParallelSizes:
    """A gateway does not know how its engines divide a model: all of their ranks count as tp."""
    engines, ranks = await _ranks(context)
    settings = context.rl
    return ParallelSizes(ranks if settings.dp is None else settings.tp, settings.pp, engines)


def dtype_of(context: ServerContext) -> str:
    """In which the model computes, as ``bfloat16``."""
    words = context.manager.limits.dtype_and_device.split()  # in bfloat16 on cuda
    return words[1] if len(words) > 1 else ""


def _of_vllm(context: ServerContext, parallel: ParallelSizes) -> dict[str, Any]:
    settings = context.rl
    lora = {"max_lora_rank": settings.max_lora_rank, "max_loras": settings.max_loras}
    return {
        "vllm_config": {
            "model_config": {
                "model": settings.model_path or context.model_name,
                "dtype": f"torch.{dtype_of(context)}",
                "max_model_len": context.manager.limits.max_req_total_len,
            },
            "parallel_config": {
                "tensor_parallel_size": parallel.tp,
                "pipeline_parallel_size": parallel.pp,
                "data_parallel_size": parallel.dp,
            },
            "lora_config": lora if settings.max_loras else None,
            "weight_transfer_config": {"backend": "nccl"},
        }
    }


def _of_sglang(context: ServerContext, parallel: ParallelSizes) -> dict[str, Any]:
    settings = context.rl
    return {
        "model_path": settings.model_path or context.model_name,
        "served_model_name": context.model_name,
        "dtype": dtype_of(context),
        "tp_size": parallel.tp,
        "pp_size": parallel.pp,
        "dp_size": parallel.dp,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,  # slime compares it with its --offload-rollout
        "enable_return_routed_experts": context.manager.limits.routed_experts is not None,
    }
