"""The fields of a body that forbid or favour tokens, under the names of LightLLM and transformers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.wire.body import Body

MAX_NGRAM_SIZE = 100
MAX_DECAY_FACTOR = 100
MAX_ALLOWED_IDS = 16384

AllowedIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)
]
LengthDecay = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=1, le=MAX_DECAY_FACTOR)]],
    Field(strict=False),  # JSON has no tuples
]


class TokenRuleFields(Body):
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=MAX_NGRAM_SIZE)] | None = Field(
        default=None, description="an n-gram of this size never occurs twice, the prompt included; 0: no limit"
    )
    exponential_decay_length_penalty: LengthDecay | None = Field(
        default=None,
        description="[start, factor]: after start tokens, each token makes an end more likely by this factor",
    )
    first_allowed_token_ids: AllowedIds | None = Field(
        default=None, description="the output begins with one of these tokens"
    )

    def token_rules(self, context: ServerContext) -> dict[str, Any]:
        """The sampling parameters that these fields set."""
        rules = {name: getattr(self, name) for name in TokenRuleFields.model_fields}
        if self.exponential_decay_length_penalty is not None and self.exponential_decay_length_penalty[1] == 1:
            del rules["exponential_decay_length_penalty"]  # LightLLM's clients send it for no penalty
        if self.first_allowed_token_ids is not None:
            context.manager.check_ids("first_allowed_token_ids", self.first_allowed_token_ids)
            rules["first_allowed_token_ids"] = tuple(dict.fromkeys(self.first_allowed_token_ids))
        return {name: value for name, value in rules.items() if value is not None}
