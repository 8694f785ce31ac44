"""POST /invocations, which SageMaker calls: the body shows which endpoint it is for."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import ConfigDict
from pydantic.config import JsonDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM

# field: the endpoint whose bodies have it
PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "inputs": "/"}
_ONE_OF: JsonDict = {"anyOf": [{"required": [name]} for name in PATHS]}


class InvocationBody(Body):
    model_config = ConfigDict(json_schema_extra=_ONE_OF)

    messages: Any = None
    prompt: Any = None
    inputs: Any = None


class DispatchedResponse(Response):
    """The response of another path of this application to the same body."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__()
        self._path = path
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [self._body]

        async def receive_again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        inner = {**scope, "path": self._path, "raw_path": self._path.encode()}
        await scope["app"].router(inner, receive_again, send)


def add_invocations(router: APIRouter, context: ServerContext) -> None:
    @router.post("/invocations", responses=OPENAPI_STREAM, openapi_extra=openapi_body(InvocationBody))
    async def invocations(request: Request) -> Response:
        """A chat, a completion, or the body of ``POST /``."""
        value = await context.read(request)
        path = next((path for name, path in PATHS.items() if value.get(name) is not None), None)
        if path is None:
            raise InvalidRequestError("the body needs messages (chat), prompt (completions) or inputs (TGI, LightLLM)")
        return DispatchedResponse(path, orjson.dumps(value))
