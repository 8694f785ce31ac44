"""The fields of a chat that limit its reasoning tokens, and the limit for the engine."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body
from lightserve.messages.params import ThinkingLimit
from lightserve.text.parsing.tool_grammar import Thinking

Budget = Annotated[int, Field(ge=-1, lt=2**31, description="tokens between the tags of reasoning; -1: no limit")]


class ThinkingFields(Body):
    """Under the names of vLLM, Qwen and others; the lowest of several values counts."""

    budget_is_hint: ClassVar[bool] = False  # ignored for a model that does not reason, instead of refused

    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    max_reasoning_tokens: Budget | None = None

    def thinking_limit(self, context: ServerContext, thinking: Thinking | None) -> ThinkingLimit | None:
        """``thinking``: how the output may reason; None: the model does not reason."""
        given = {name: getattr(self, name) for name in ThinkingFields.model_fields}
        limits = {name: value for name, value in given.items() if value is not None and value >= 0}
        if not limits or (thinking is None and self.budget_is_hint):
            return None
        if thinking is None:
            name = next(iter(limits))
            message = f"{name}: the chat template does not show how the model reasons; set --reasoning_parser"
            raise InvalidRequestError(message, name)
        tags = thinking.reasoning_format
        end_ids = tuple(context.tokenizer.encode(tags.end, add_special_tokens=False))
        return ThinkingLimit(min(limits.values()), tags.begin, tags.end, end_ids, thinking.is_begun)
