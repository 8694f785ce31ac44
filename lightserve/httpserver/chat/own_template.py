"""The chat template that a trainer's request brings: --enable_rl, with an admin key."""

from __future__ import annotations

from starlette.requests import Request

from lightserve.errors import ForbiddenError, InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import JsonObject
from lightserve.model_files.template.chat_template import MAX_TEMPLATE_LENGTH

FIELD = "chat_template"


def take_template(context: ServerContext, request: Request, value: JsonObject) -> str | None:
    """Take the field out of the body. Without --enable_rl it stays there, and is refused as in every request."""
    text = value.get(FIELD)
    if text is None or not context.config.enable_rl:
        return None
    if not context.keys.administers(dict(request.scope["headers"])):
        raise ForbiddenError("chat_template: a request can set it with an admin key only", FIELD)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEMPLATE_LENGTH:
        raise InvalidRequestError(f"chat_template: must be a text of 1 to {MAX_TEMPLATE_LENGTH} characters", FIELD)
    del value[FIELD]
    return text
