"""The fields of bodies that say which tokens may follow which, in the words of LightLLM and transformers."""

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


class RuleFields(Body):
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=MAX_NGRAM_SIZE)] | None = Field(
        default=None, description="so many tokens in a row never come twice, the prompt's included; 0: they may"
    )
    exponential_decay_length_penalty: LengthDecay | None = Field(
        default=None,
        description="[start, factor]: after so many tokens, each further one makes an end likelier by this factor",
    )
    first_allowed_token_ids: AllowedIds | None = Field(default=None, description="the answer begins with one of them")

    def token_rules(self, context: ServerContext) -> dict[str, Any]:
        """The sampling parameters that are given."""
        rules = {name: getattr(self, name) for name in RuleFields.model_fields}
        if self.exponential_decay_length_penalty is not None and self.exponential_decay_length_penalty[1] == 1:
            del rules["exponential_decay_length_penalty"]  # what LightLLM's clients send for none
        if self.first_allowed_token_ids is not None:
            context.manager.check_ids("first_allowed_token_ids", self.first_allowed_token_ids)
            rules["first_allowed_token_ids"] = tuple(dict.fromkeys(self.first_allowed_token_ids))
        return {name: value for name, value in rules.items() if value is not None}
