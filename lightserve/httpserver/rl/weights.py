"""New weights from a trainer or from a folder that it has written, with the endpoints of SGLang and of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, validate
from lightserve.httpserver.rl.calls import ask, read_optional
from lightserve.httpserver.rl.weight_bodies import (
    VLLM_GROUP,
    CollectiveRpc,
    DestroyGroup,
    EndSession,
    FinishUpdate,
    InitEngine,
    InitGroup,
    NamedWeight,
    NewVersion,
    Session,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateWeights,
)
from lightserve.messages.rl import (
    BeginWeightUpdate,
    EndWeightUpdate,
    GetWeights,
    LeaveWeightGroup,
    LoadWeightsFrom,
    ReceiveWeights,
    RlQuery,
    RlReply,
    SetWeightVersion,
    WeightsState,
)
from lightserve.messages.weights import WeightSelector

B = TypeVar("B", bound=Body)
UPDATE_TIMEOUT_S = 3600.0  # the router and the workers have shorter ones
PICKLED = "{path} sends pickled tensors, which may run any code; use POST {instead}, or a folder of --weights_dir"


def add_weights(router: APIRouter, context: ServerContext) -> None:
    routes = _WeightRoutes(context)
    router.post("/init_weights_update_group")(routes.init_group)
    router.post("/destroy_weights_update_group")(routes.destroy_group)
    router.post("/update_weights_from_distributed")(routes.update_from_distributed)
    router.post("/update_weights_from_disk")(routes.update_from_disk)
    router.post("/begin_weight_update")(routes.begin_session)
    router.post("/end_weight_update")(routes.end_session)
    router.post("/update_weight_version")(routes.update_version)
    router.post("/update_weights_from_tensor")(routes.refuse_pickles)
    router.post("/update_weights_from_ipc")(routes.refuse_pickles)
    router.post("/init_weight_transfer_engine")(routes.init_engine)
    router.post("/start_weight_update")(routes.start)
    router.post("/start_draft_weight_update")(routes.start_draft)
    router.post("/update_weights")(routes.update)
    router.post("/finish_weight_update")(routes.finish)
    router.post("/shutdown_weight_transfer_engine")(routes.shut_down)
    router.post("/collective_rpc")(routes.collective_rpc)
    router.api_route("/get_weights_by_name", methods=["GET", "POST"])(routes.get_by_name)
    router.get("/get_weight_version")(routes.get_version)
    router.get("/weight_info")(routes.get_version)


class _WeightRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def _ask(self, make_query: Callable[[int], RlQuery], timeout_s: float = UPDATE_TIMEOUT_S) -> RlReply:
        return await ask(self._context, make_query, timeout_s)

    async def _body(self, request: Request, model: type[B]) -> B:
        return validate(model, await read_optional(self._context, request))

    async def _succeeds(self, request: Request, make_query: Callable[[int], RlQuery], message: str) -> JSONResponse:
        """A reply of SGLang: an error is a message too."""
        try:
            reply = await self._ask(make_query)
        except LightserveError as error:
            request.state.record.reason = str(error)
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": reply.count})

    # SGLang

    async def init_group(self, request: Request) -> JSONResponse:
        body = await self._body(request, InitGroup)
        return await self._succeeds(request, body.query, "the weight update group is initialized")

    async def destroy_group(self, request: Request) -> JSONResponse:
        body = await self._body(request, DestroyGroup)
        return await self._succeeds(
            request, lambda query_id: LeaveWeightGroup(query_id, body.group_name), "it is destroyed"
        )

    async def update_from_distributed(self, request: Request) -> JSONResponse:
        body = await self._body(request, UpdateFromDistributed)
        tensors = body.tensors(body.dtypes, "dtypes")
        return await self._succeeds(
            request,
            lambda query_id: ReceiveWeights(
                query_id,
                body.group_name,
                tensors,
                body.buffering,
                body.weight_version,
                body.flush_cache,
                body.abort_all_requests,
                None if body.selector is None else WeightSelector(body.selector),
            ),
            "the weights were received",
        )

    async def update_from_disk(self, request: Request) -> JSONResponse:
        body = await self._body(request, UpdateFromDisk)
        return await self._succeeds(
            request,
            lambda query_id: LoadWeightsFrom(
                query_id,
                body.model_path,
                body.weight_version,
                body.flush_cache,
                body.abort_all_requests,
                WeightSelector(body.selector),
            ),
            "the weights were loaded",
        )

    async def begin_session(self, request: Request) -> JSONResponse:
        selector = WeightSelector((await self._body(request, Session)).selector)
        return await self._succeeds(
            request, lambda query_id: BeginWeightUpdate(query_id, selector), "the weight update has begun"
        )

    async def end_session(self, request: Request) -> JSONResponse:
        body = await self._body(request, EndSession)
        return await self._succeeds(
            request,
            lambda query_id: EndWeightUpdate(query_id, body.weight_version, body.flush_cache),
            "the weight update has ended",
        )

    async def update_version(self, request: Request) -> JSONResponse:
        body = await self._body(request, NewVersion)
        await self._ask(lambda query_id: SetWeightVersion(query_id, body.new_version, body.abort_all_requests))
        message = f"the weights are called {body.new_version!r}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def refuse_pickles(self, request: Request) -> JSONResponse:
        path = request.scope["path"]
        raise InvalidRequestError(PICKLED.format(path=path, instead="/update_weights_from_distributed"))

    async def get_by_name(self, request: Request) -> JSONResponse:
        body = await self._body(request, NamedWeight)
        weights = await self._weights(body.name, body.truncate_size)
        return JSONResponse(weights.values)

    async def _weights(self, name: str = "", limit: int = 0) -> WeightsState:
        reply = await self._ask(lambda query_id: GetWeights(query_id, name, limit))
        return reply.weights or WeightsState()

    async def get_version(self) -> JSONResponse:
        weights = await self._weights()
        return JSONResponse(
            {
                "weight_version": weights.version,
                "generation": weights.generation,
                "source": weights.source,
                "problem": weights.problem or None,
                "draft_source": weights.draft_source,
                "draft_problem": weights.draft_problem or None,
            }
        )

    # vLLM

    async def init_engine(self, request: Request) -> JSONResponse:
        body = await self._body(request, InitEngine)
        await self._ask(body.init_info.query)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start(self) -> JSONResponse:
        await self._ask(BeginWeightUpdate)
        return JSONResponse({"message": "Weight update started"})

    async def start_draft(self) -> JSONResponse:
        await self._ask(lambda query_id: BeginWeightUpdate(query_id, WeightSelector.DRAFT))
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> JSONResponse:
        info = (await self._body(request, UpdateWeights)).update_info
        tensors = info.tensors(info.dtype_names, "dtype_names")
        await self._ask(lambda query_id: ReceiveWeights(query_id, VLLM_GROUP, tensors))
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> JSONResponse:
        body = await self._body(request, FinishUpdate)
        await self._ask(lambda query_id: EndWeightUpdate(query_id, body.weight_version, recomputes=False))
        return JSONResponse({"message": "Weight update finished"})

    async def shut_down(self) -> JSONResponse:
        await self._ask(lambda query_id: LeaveWeightGroup(query_id, VLLM_GROUP))
        return JSONResponse({"message": "Weight transfer shut down"})

    async def collective_rpc(self, request: Request) -> JSONResponse:
        """Only ``reload_weights``, with a folder."""
        body = await self._body(request, CollectiveRpc)
        path = body.kwargs.get("weights_path", body.args[0] if body.args else None)
        if body.method != "reload_weights" or not isinstance(path, str):
            raise InvalidRequestError("method: only reload_weights with a weights_path below --weights_dir is served")
        await self._ask(lambda query_id: LoadWeightsFrom(query_id, path))
        return JSONResponse({"results": [None]})
