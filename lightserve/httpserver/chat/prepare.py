"""From a chat's body to what the engine is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from lightserve.httpserver.chat.output import OutputPlan, check_tools, output_plan
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.grammar import grammar_of
from lightserve.httpserver.fields.sampling import asks_of, check_choices
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.wire.access_log import AccessLog


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation that is ready to be answered."""

    asks: list[Ask]
    plan: OutputPlan
    log: AccessLog


async def prepare_chat(
    context: ServerContext, request: Request, body: ChatBody, logprobs: int | None = None
) -> PreparedChat:
    """What to generate for a chat, whichever schema it came in. ``logprobs``: how many alternatives to tell."""
    context.check_model(body.model)
    check_choices(context, 1, body.beams or body.choices)
    log = context.log(request, body.request_id)
    check_tools(context, body)
    prompt, ids = await chat_prompt(context, body)
    plan = output_plan(context, body, prompt)
    asks = asks_of(context, body, [ids], logprobs, grammar=await grammar_of(context, plan))
    log.prompt_tokens = len(asks[0].prompt_ids)
    return PreparedChat([plan.applied(ask) for ask in asks], plan, log)
