"""POST /v1/chat/completions"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.body import documented
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.grammar_fields import grammar_of
from lightserve.httpserver.openai_answer import Answer, Form, name_request, respond
from lightserve.httpserver.openai_beams import Search, respond_with_beams
from lightserve.httpserver.openai_logprobs import chat_logprobs
from lightserve.httpserver.openai_messages import chat_prompt
from lightserve.httpserver.openai_output import check_tools, output_plan
from lightserve.httpserver.openai_protocol import ChatBody, checked
from lightserve.httpserver.openai_sampling import asks_of, check_choices
from lightserve.httpserver.sse import DOCUMENTED

CHAT = Form(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole_text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    first=lambda echo: b'"delta":{"role":"assistant","content":""}',
    before_text=b'"delta":{"content":',
    after_text=b"}",
    last=b'"delta":{}',
)


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", responses=DOCUMENTED, openapi_extra=documented(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = checked(ChatBody, await context.read(request))
        context.check_model(body.model)
        check_choices(context, 1, body.beams or body.choices)
        name_request(request, body)
        log = context.log(request)

        k = body.top_logprobs or 0 if body.logprobs else None
        check_tools(context, body)
        prompt, ids = await chat_prompt(context, body)
        plan = output_plan(context, body, prompt)
        asks = asks_of(context, body, [ids], k, grammar=await grammar_of(context, plan))
        asks = [plan.shown(ask) for ask in asks]
        log.prompt_tokens = len(asks[0].prompt_ids)
        answer = Answer(
            form=CHAT,
            request_id=log.request_id,
            model=context.model_name,
            n=body.choices,
            echoes=[""] * body.choices,
            new_logprobs=None if k is None else partial(chat_logprobs, context.tokenizer, k),
            new_output=None if plan.is_plain else plan.new_choice,
        )
        if body.beams is not None:
            return await respond_with_beams(context, request, body, Search(asks, answer, log))
        return await respond(request, body, context.manager.generate(asks, log, body.choices), answer)

    return router
