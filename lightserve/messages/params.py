"""What a request asks for: how to sample, when to stop, how to write the text, how to schedule it."""

from __future__ import annotations

import enum
import functools
import reprlib
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lightserve.errors import InvalidRequestError
from lightserve.utils.spelling import nearest

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the longest request the server takes
    ABORT = "abort"


INT32_MAX = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]  # ids beyond the vocabulary have no effect

Share = Annotated[float, Meta(gt=0, le=1)]  # of the probability mass; 1: all of it

OpenAIPenalty = Annotated[float, Meta(ge=-2, le=2)]

Bias = Annotated[float, Meta(ge=-100, le=100)]

MAX_LOGPROBS = 20  # alternatives to a token, as in OpenAI's APIs; --enable_rl lifts the limit

TopCount = Annotated[int, Meta(ge=0, le=INT32_MAX)]  # at most the vocabulary; HTTP sets a lower limit

BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]

TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=16384)]

MAX_PREDICTION = 16384  # tokens; a worker keeps room for so many of each request

Prediction = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_PREDICTION)]

LengthDecay = tuple[Annotated[int, Meta(ge=0, le=INT32_MAX)], Annotated[float, Meta(ge=1, le=100)]]

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag", "prefix"]

MAX_GRAMMAR_LENGTH = 256 * 1024  # characters; grammar/compiler.py knows which kinds may have fewer


class GrammarSpec(msgspec.Struct, frozen=True):
    """The texts that a response may have. grammar/compiler.py says what ``text`` is for each kind."""

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""
    before: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""  # Lark rules that refer to it as @answer
    memory_mib: Annotated[int, Meta(ge=1, le=2**16)] = 1  # that it takes when it is compiled, as measured


class ThinkingLimit(msgspec.Struct, frozen=True):
    """How many tokens a model may spend on thinking, and the tags around its thinking."""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)]  # between the tags
    begin: str
    end: str
    end_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]  # the tokens of ``end``, which are forced at the limit
    is_begun: bool  # the prompt ends inside the thinking


class _CheckedParams(msgspec.Struct, frozen=True):
    """Parameters whose types and ranges are checked when they are made: msgspec checks them only when it decodes."""

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self, _unchecked_twin(type(self)), from_attributes=True)
        except msgspec.ValidationError as error:
            raise _invalid_field(self, error) from error


@functools.cache
def _unchecked_twin(params: type[_CheckedParams]) -> type[msgspec.Struct]:
    """The same fields on a struct without __post_init__: filling one checks types and ranges in a microsecond."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(params)]
    return msgspec.defstruct(f"_{params.__name__}Types", fields)


def _invalid_field(params: _CheckedParams, error: msgspec.ValidationError) -> InvalidRequestError:
    """Name the field, what it takes and what it has; msgspec says "Expected `int` >= 1 - at `$.top_k`"."""
    wanted, _, path = str(error).partition(" - at ")
    field = path.partition("$.")[2].partition("[")[0].partition(".")[0].rstrip("`")
    return InvalidRequestError(f"{field}: {wanted}, found {reprlib.repr(getattr(params, field))}", field)


class PromptCandidates(msgspec.Struct, frozen=True):
    """Tokens that might stand in a prompt: their logprobs, as those of its own tokens."""

    start: int  # the first row is of the token behind so many of the prompt's first ones; the last, of its last one
    count: Annotated[int, Meta(ge=1)]  # in each row
    ids: bytes  # [rows, count] int32; -1: none


class SamplingParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker samples the next token.

    Logits change in the order of vLLM and transformers: forbidden tokens, logit_bias, watermark, penalties,
    exponential_decay_length_penalty, temperature, top_k, top_p, min_p, typical_p.
    """

    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0  # 0: greedy
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    presence_penalty: OpenAIPenalty = 0.0
    frequency_penalty: OpenAIPenalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] = {}
    bad_words_ids: Annotated[tuple[BadWord, ...], Meta(max_length=1024)] = ()  # sequences that are never completed
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=100)] = 0  # an n-gram of this size occurs once; 0: no limit
    allowed_token_ids: TokenIds | None = None  # None: all
    first_allowed_token_ids: TokenIds | None = None  # the same for the first token only
    # (start, factor): end tokens become more likely with every token after the first ``start``
    exponential_decay_length_penalty: LengthDecay | None = None
    watermark: bool = False  # prefer tokens that a hash of the previous token selects: see common/ops/watermark.py
    grammar: GrammarSpec | None = None  # None: any text
    thinking: ThinkingLimit | None = None  # None: no limit
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # None: a random one
    logprobs: TopCount | None = None  # of the sampled token, and of the top k tokens
    prompt_logprobs: TopCount | None = None  # the same for the tokens of the prompt
    prompt_candidates: PromptCandidates | None = None  # with prompt_logprobs: other tokens whose logprobs are wanted
    # logprobs of the distribution that the token was sampled from: after rules, temperature and filters
    processed_logprobs: bool = False
    routed_experts: bool = False  # return which experts its tokens were routed to
    speculative: bool = True  # steps may compute drafts of its next tokens, which never changes its text
    prediction_ids: Prediction = ()  # what the client expects the output to resemble: drafts may come from there

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def depends_on_output(self) -> bool:
        """Whether the tokens so far, or their number, change the logits of the next one beside the model."""
        return bool(
            self.has_penalty
            or any(len(word) > 1 for word in self.bad_words_ids)
            or self.no_repeat_ngram_size
            or self.first_allowed_token_ids
            or self.exponential_decay_length_penalty
            or self.watermark
            or self.grammar
            or self.thinking
        )


class StoppingParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """When output tokens end a request. The router decides; workers mask end tokens until min_new_tokens."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 16
    min_new_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            reason = f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            raise InvalidRequestError(reason, "min_new_tokens")


class TextParams(_CheckedParams, frozen=True, kw_only=True, omit_defaults=True):
    """How the detokenizer turns the tokens of a request into text."""

    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    include_stop: bool = False  # leave the stop string or the end token in the text
    skip_special_tokens: bool = True
    shown_special_ids: tuple[TokenId, ...] = ()  # these stay in the text all the same
    hidden_chars: Annotated[int, Meta(ge=0)] = 0  # at the start of the text: the prompt has them already
    continues_text: bool = True  # False: a message of its own, which does not begin with the space between words

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        super().__post_init__()


class GenerationParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The generation parameters of a request, one part for each process that reads them."""

    sampling: SamplingParams = SamplingParams()
    stopping: StoppingParams = StoppingParams()
    text: TextParams = TextParams()

    @classmethod
    def of(cls, **fields: Any) -> GenerationParams:
        """Parameters by their own names, whichever part they belong to: ``of(max_new_tokens=8, temperature=0)``."""
        return cls().replace(**fields)

    def get(self, name: str) -> Any:
        """The value of the parameter of this name, whichever part it belongs to."""
        return getattr(getattr(self, _PART_OF[name]), name)

    def replace(self, **fields: Any) -> GenerationParams:
        """A copy with other values of the named parameters."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in fields.items():
            if name not in _PART_OF:
                raise unknown_parameter(name, _PART_OF)
            changed.setdefault(_PART_OF[name], {})[name] = value
        parts = {
            attribute: msgspec.structs.replace(getattr(self, attribute), **values)
            for attribute, values in changed.items()
        }
        return msgspec.structs.replace(self, **parts)


def unknown_parameter(name: str, known: Collection[str]) -> InvalidRequestError:
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
    return InvalidRequestError(f"{name}: there is no such parameter; {hint}", name)


_PART_OF = {  # parameter: the field of GenerationParams that has it
    field.name: attribute
    for attribute, params in (("sampling", SamplingParams), ("stopping", StoppingParams), ("text", TextParams))
    for field in msgspec.structs.fields(params)
}


NAMES = tuple(_PART_OF)

# The priority of background requests, such as lines of batches: whatever the policy, requests of clients go first.
BACKGROUND_PRIORITY = INT32_MAX


class SchedulingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the router treats a request, whatever it generates."""

    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] = 0  # lower goes first; see BACKGROUND_PRIORITY
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # from arrival to the last token
    cache_salt: str = ""  # prefixes are shared among requests of the same salt
    use_cache: bool = True  # share prefixes with other requests
    lora: str = ""  # name of the adapter; "": the base model
    session: str = ""  # the client's name for a conversation: --cluster_policy session keeps it in one engine
    # tokens at the end of a chat's prompt that its next turn may write in another way: states are kept before them
    generation_prompt_len: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
