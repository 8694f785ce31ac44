"""The fields that OpenAI's chat and completions share, with what vLLM and LightLLM users add to them.

Every field may be null, which means absent. The fields in unsupported.py are refused; any other unknown field is
ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.beam_fields import BeamFields
from lightserve.httpserver.fields.grammar import GrammarFields
from lightserve.httpserver.fields.shared import PromptFields, StopStrings
from lightserve.httpserver.fields.unsupported import UNSUPPORTED, refuse_unsupported
from lightserve.httpserver.http.body import Body, at_most, validate
from lightserve.httpserver.http.validation_errors import listed
from lightserve.media.sizes import ImageSize
from lightserve.messages.params import MAX_LOGPROBS

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BIASED = 1024
MAX_NGRAM_SIZE = 100
MAX_DECAY_FACTOR = 100
MAX_ALLOWED_IDS = 16384
TOKEN_ID = r"^[0-9]{1,9}$"

G = TypeVar("G", bound="GenerationBody")

Count = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
NewTokens = Annotated[int, Field(ge=1)]
MaxTokens = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
# the same where --enable_rl lifts the limit: see GenerationBody.limit_logprobs
LimitedLogprobs = Annotated[
    int, Field(ge=-1, lt=2**31, description=f"up to {MAX_LOGPROBS}; with --enable_rl any number, -1: the vocabulary")
]
TokenId = Annotated[int, Field(ge=0)]
BiasKey = Annotated[str, Field(pattern=TOKEN_ID)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _check_bias_keys(value: Any) -> Any:
    """Name all keys that are no token ids."""
    wrong = [key for key in value if not re.match(TOKEN_ID, key)] if isinstance(value, dict) else []
    if wrong:
        raise PydanticCustomError("token_ids", "keys must be token ids, not {keys}", {"keys": listed(wrong)})
    return value


LogitBias = Annotated[
    dict[BiasKey, Bias], Field(max_length=MAX_BIASED), BeforeValidator(_check_bias_keys), at_most(MAX_BIASED)
]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
AllowedIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)
]
LengthDecay = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=1, le=MAX_DECAY_FACTOR)]],
    Field(strict=False),  # JSON has no tuples
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk; needs include_usage


class TokenRuleFields(Body):
    """The fields that forbid or favour tokens, under the names of LightLLM and transformers."""

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


class GenerationBody(PromptFields, BeamFields, GrammarFields, TokenRuleFields):
    """What chat and completions take."""

    other_fields: ClassVar[frozenset[str]] = frozenset({*UNSUPPORTED, "chat_template", "token_healing"})

    model: str | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None  # 0: only logprobs and echo of the prompt
    max_completion_tokens: MaxTokens | None = None  # counts if both are set
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    allowed_token_ids: AllowedIds | None = None
    watermark: bool | None = None  # TGI's
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # -1: a random one, as in vLLM and LightLLM
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # the same, SGLang's name
    do_sample: bool | None = None  # LightLLM's; false: greedy
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # how many to keep; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # right: keep the first ones, not the last ones
    prompt_logprobs: LimitedLogprobs | None = None
    return_token_ids: bool | None = None  # of prompt and output
    return_weight_versions: bool | None = None  # with which weights the tokens were generated: --enable_rl
    return_tokens_as_token_ids: bool | None = None  # logprobs name a token "token_id:N"
    speculative: bool | None = None  # false: no drafts of the next tokens; the text is the same
    use_beam_search: bool | None = None  # num_beams > 1 sets it too
    request_id: RequestId | None = None
    rid: RequestId | None = None  # the same, SGLang's name
    user: str | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def new_tokens_field(self) -> str:
        """The field of the request that ``new_tokens`` comes from, for errors."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def new_tokens_within(self, room: int) -> int | None:
        """The new tokens to generate if the context has room for this many; more than that is refused."""
        return self.new_tokens

    @property
    def image_sizes(self) -> Sequence[ImageSize]:
        """Of the images in the prompt, once they are read."""
        return ()

    def limit_logprobs(self, context: ServerContext) -> None:
        """Refuse more alternatives to a token than this server gives, and resolve -1."""
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            k = getattr(self, name, None)
            if k is not None and not isinstance(k, bool):
                setattr(self, name, context.top_logprobs(name, k))

    @property
    def is_prompt_only(self) -> bool:
        """max_tokens is 0: the response has no output, only logprobs or an echo of the prompt."""
        return self.new_tokens == 0

    @property
    def reports_prompt(self) -> bool:
        return self.prompt_logprobs is not None

    @property
    def prompt_top_logprobs(self) -> int | None:
        """Alternatives to each token of the prompt; None: no logprobs of the prompt."""
        return self.prompt_logprobs

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Sequences to generate for a prompt."""
        return self.choices

    @property
    def beam_width(self) -> int | None:
        """Beams of the beam search; None: no beam search."""
        if not self.use_beam_search and (self.num_beams or 1) == 1:
            return None
        return self.num_beams or self.candidates

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only with stream: true", "stream_options")
        if self.is_prompt_only and not self.reports_prompt:
            name = self.new_tokens_field
            raise InvalidRequestError(f"{name}: 0 needs echo or prompt_logprobs", name)
        if (self.min_tokens or 0) > (math.inf if self.new_tokens is None else self.new_tokens):
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.new_tokens}"
            raise InvalidRequestError(message, "min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens: 0 is not allowed; give a positive number or -1", "truncate_prompt_tokens"
            )
        return self


def validate_supported(model: type[G], value: dict[str, Any]) -> G:
    """``value`` as a ``model``. It must not use an unsupported field."""
    refuse_unsupported(value)
    return validate(model, value)
