"""/tokenize, /chat_tokenize, /detokenize, /tokens and /tokenizer_info: tokens of texts, without generating."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import LONG_TEXT, ServerContext
from lightserve.httpserver.fields.generation import validate_supported
from lightserve.httpserver.fields.images import count_with_images
from lightserve.httpserver.generate.lightllm.media import sources_to_count
from lightserve.httpserver.generate.tgi.errors import tgi_error_response
from lightserve.httpserver.http.body import Body, json_response, openapi_body, validate
from lightserve.model_files.model_summary import UNKNOWN

MAX_TOKENS = 1_000_000  # of one request, which takes about a second
TOKENS_PER_CALL = 1_000  # tokens written in one call, so that other threads can run in between


class TokenizePromptBody(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(default=None, description="default true")
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody):
    return_token_strs: bool | None = None


class TokenizeTgiBody(Body):
    inputs: str
    add_special_tokens: bool | None = Field(default=None, description="default true")


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENS, fail_fast=True)


class CountParameters(Body):
    add_special_tokens: bool | None = Field(default=None, description="default true")


class CountBody(Body):
    text: str
    parameters: CountParameters | None = None
    multimodal_params: dict[str, Any] | None = None


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=openapi_body(TokenizePromptBody, TokenizeChatBody, TokenizeTgiBody))
    async def tokenize(request: Request) -> Response:
        """vLLM's response for ``prompt`` or ``messages``, TGI's for ``inputs``."""
        value = await context.read(request)
        if "inputs" not in value:
            return json_response(await _tokenize(context, request, value))
        try:
            return Response(await _tokenize_as_tgi(context, request, value), media_type="application/json")
        except LightserveError as error:
            return tgi_error_response(error, request)

    @router.post("/chat_tokenize", openapi_extra=openapi_body(ChatBody))
    async def chat_tokenize(request: Request) -> Response:
        """The prompt of a chat as text and as tokens, in TGI's format."""
        value = await context.read(request)
        try:
            return Response(await _chat_tokenize(context, request, value), media_type="application/json")
        except LightserveError as error:
            return tgi_error_response(error, request)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The settings of the tokenizer, as vLLM has them."""
        return JSONResponse(_tokenizer_info(context))  # its integers may be longer than 64 bits

    @router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await context.read_body(request, DetokenizeBody)
        await context.find_model(body.model)
        return json_response({"prompt": await _decode(context, body.tokens)})

    @router.post("/tokens", openapi_extra=openapi_body(CountBody))
    @router.get("/tokens", include_in_schema=False)  # LightLLM's clients send the same body with GET
    async def tokens(request: Request) -> Response:
        """The number of tokens of a text."""
        body = await context.read_body(request, CountBody)
        return json_response({"ntokens": await _count(context, body)})

    return router


async def _tokenize(context: ServerContext, request: Request, value: dict[str, Any]) -> dict[str, Any]:
    body, ids = await (_chat_ids(context, value) if "messages" in value else _prompt_ids(context, value))
    context.check_fields(request, body)
    _check_count(len(ids))
    return {
        "count": len(ids),
        "max_model_len": context.manager.limits.max_req_total_len,
        "tokens": ids,
        "token_strs": await asyncio.to_thread(_names, context, ids) if body.return_token_strs else None,
    }


async def _prompt_ids(context: ServerContext, value: dict[str, Any]) -> tuple[TokenizePromptBody, list[int]]:
    body = validate(TokenizePromptBody, value)
    await context.find_model(body.model)
    return body, await context.encode(body.prompt, body.add_special_tokens is not False)


async def _chat_ids(context: ServerContext, value: dict[str, Any]) -> tuple[TokenizeChatBody, list[int]]:
    if value.get("prompt") is not None:
        raise InvalidRequestError("prompt and messages exclude each other", "prompt")
    body = validate_supported(TokenizeChatBody, value)
    await context.find_model(body.model)
    _, ids = await chat_prompt(context, body)
    return body, ids


def _names(context: ServerContext, ids: list[int]) -> list[str | None]:
    return [context.tokenizer.id_to_token(token_id) for token_id in ids]


async def _chat_tokenize(context: ServerContext, request: Request, value: dict[str, Any]) -> bytes:
    body = validate_supported(ChatBody, value)
    context.check_fields(request, body)
    await context.find_model(body.model)
    text, _ = await chat_prompt(context, body)
    tokens = await context.encode_with_offsets(text, bool(body.add_special_tokens))
    _check_count(len(tokens))
    rows = await asyncio.to_thread(_tgi_json, text, tokens)
    return b'{"tokenize_response":%b,"templated_text":%b}' % (rows, orjson.dumps(text))


def _tokenizer_info(context: ServerContext) -> dict[str, Any]:
    """What tokenizer_config.json says; special tokens as texts, and the chat template that is used."""
    tokenizer = context.tokenizer
    given = {"tokenizer_class": UNKNOWN} if context.details is None else context.details.tokenizer_config
    used = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    return {**given, **{name: value for name, value in used.items() if value is not None}}


async def _tokenize_as_tgi(context: ServerContext, request: Request, value: dict[str, Any]) -> bytes:
    body = validate(TokenizeTgiBody, value)
    context.check_fields(request, body)
    tokens = await context.encode_with_offsets(body.inputs, body.add_special_tokens is not False)
    _check_count(len(tokens))
    return await asyncio.to_thread(_tgi_json, body.inputs, tokens)


def _tgi_json(text: str, tokens: list[tuple[int, int, int]]) -> bytes:
    parts = []
    for begin in range(0, len(tokens), TOKENS_PER_CALL):
        rows = [
            {"id": token_id, "text": text[start:stop], "start": start, "stop": stop}
            for token_id, start, stop in tokens[begin : begin + TOKENS_PER_CALL]
        ]
        parts.append(orjson.dumps(rows)[1:-1])
    return b"[%b]" % b",".join(parts)


def _check_count(count: int) -> None:
    if count > MAX_TOKENS:
        raise InvalidRequestError(f"the text has {count} tokens; the limit is {MAX_TOKENS}")


async def _decode(context: ServerContext, ids: list[int]) -> str:
    context.manager.check_ids("tokens", ids)
    if len(ids) < LONG_TEXT:
        return context.tokenizer.decode(ids, skip_special_tokens=False)
    return await asyncio.to_thread(context.tokenizer.decode, ids, skip_special_tokens=False)


async def _count(context: ServerContext, body: CountBody) -> int:
    adds_special = body.parameters is None or body.parameters.add_special_tokens is not False
    ids = await context.encode(body.text, adds_special)
    return await count_with_images(context, ids, sources_to_count(body.multimodal_params))
