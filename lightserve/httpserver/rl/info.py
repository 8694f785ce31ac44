"""GET /server_info and /get_world_size, as the trainers of vLLM and SGLang read them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from lightserve.errors import UnavailableError
from lightserve.httpserver.admin.server_info import server_info
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.errors import error_response

LOADS = {"num_running_reqs": "num_requests_running", "num_waiting_reqs": "num_requests_waiting"}


def add_info(router: APIRouter, context: ServerContext) -> None:
    @router.get("/get_world_size")
    async def get_world_size(include_dp: Annotated[bool, Query()] = True) -> JSONResponse:
        """The ranks that hold weights: of all engines, or of one."""
        settings = context.rl
        return JSONResponse({"world_size": settings.ranks * (settings.dp if include_dp else 1)})

    @router.get("/server_info")
    async def get_rl_server_info() -> JSONResponse:
        """That of /get_server_info, with the fields that trainers read."""
        return JSONResponse(await server_info(context) | _of_vllm(context) | _of_sglang(context))


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


def dtype_of(context: ServerContext) -> str:
    """In which the model computes, as ``bfloat16``."""
    words = context.manager.limits.dtype_and_device.split()  # in bfloat16 on cuda
    return words[1] if len(words) > 1 else ""


def _of_vllm(context: ServerContext) -> dict[str, Any]:
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
                "tensor_parallel_size": settings.tp,
                "pipeline_parallel_size": settings.pp,
                "data_parallel_size": settings.dp,
            },
            "lora_config": lora if settings.max_loras else None,
            "weight_transfer_config": {"backend": "nccl"},
        }
    }


def _of_sglang(context: ServerContext) -> dict[str, Any]:
    settings = context.rl
    return {
        "model_path": settings.model_path or context.model_name,
        "served_model_name": context.model_name,
        "dtype": dtype_of(context),
        "tp_size": settings.tp,
        "pp_size": settings.pp,
        "dp_size": settings.dp,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,  # slime compares it with its --offload-rollout
        "enable_return_routed_experts": context.manager.limits.routed_experts is not None,
    }
