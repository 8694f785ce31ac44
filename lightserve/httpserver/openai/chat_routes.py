"""POST /v1/chat/completions"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.chat.prepare import PreparedChat, prepare_chat
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.generation import checked
from lightserve.httpserver.openai.beam_search import Search, respond_with_beams
from lightserve.httpserver.openai.logprobs import chat_logprobs
from lightserve.httpserver.openai.prompt_logprobs import ScoredPrompt
from lightserve.httpserver.openai.response import Answer, Form, respond
from lightserve.httpserver.wire.body import documented
from lightserve.httpserver.wire.sse import DOCUMENTED

CHAT = Form(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole_text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    first=lambda echo: b'"delta":{"role":"assistant","content":""}',
    before_text=b'"delta":{"content":',
    after_text=b"}",
    last=b'"delta":{}',
    scores_in_choice=False,
)


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", responses=DOCUMENTED, openapi_extra=documented(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = checked(ChatBody, await context.read(request))
        k = body.top_logprobs or 0 if body.logprobs else None
        chat = await prepare_chat(context, request, body, k)
        chat.log.shows_output = not body.is_scoring
        answer = Answer(
            form=CHAT,
            request_id=chat.log.request_id,
            model=context.model_name,
            n=body.choices,
            echoes=[""] * body.choices,
            new_logprobs=None if k is None else lambda _: chat_logprobs(context.tokenizer, k),
            new_output=None if chat.plan.is_plain else chat.plan.new_choice,
            scored=_scored(context, body, chat),
            is_scoring=body.is_scoring,
        )
        if body.beams is not None:
            return await respond_with_beams(context, request, body, Search(chat.asks, answer, chat.log))
        return await respond(request, body, context.manager.generate(chat.asks, chat.log, body.choices), answer)

    return router


def _scored(context: ServerContext, body: ChatBody, chat: PreparedChat) -> list[ScoredPrompt]:
    if body.prompt_logprobs is None:
        return []
    return [ScoredPrompt(context.tokenizer, ask.prompt_ids, listed_k=body.prompt_logprobs) for ask in chat.asks]
