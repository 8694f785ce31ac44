"""Bodies in LightLLM's format, and the engine request that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.beam_fields import BeamFields, not_with_beam_search, refuse_excluded_params
from lightserve.httpserver.fields.generation import MAX_ALLOWED_IDS, LogitBias, TokenRuleFields
from lightserve.httpserver.fields.grammar import GuidedFields, requested_grammar
from lightserve.httpserver.fields.images import check_beam_search, read_prompt_images, with_images, with_placeholders
from lightserve.httpserver.fields.shared import PromptFields, check_input_ids, check_stop_strings
from lightserve.httpserver.fields.token_healing import heal, healing_error
from lightserve.httpserver.generate.lightllm.media import image_sources
from lightserve.httpserver.http.body import Body
from lightserve.media.sources import ReadImage
from lightserve.messages.params import GenerationParams
from lightserve.text.beam_search import BeamParams

DEFAULT_NEW_TOKENS = 16
MAX_STOPS = 10
MAX_STOP_IDS = 256  # token ids of one stop sequence
MAX_BANNED_IDS = 1024
RANDOM_SEED = -1
# parameter that is refused: the values that are allowed because they have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "input_penalty": (False,),
    "image_max_patch_num": (-1,),
    "prompt_logprobs": (-1,),
}
SAME_NAME = (
    "temperature",
    "min_new_tokens",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "speculative",
)


Ids = Annotated[list[int], Field(fail_fast=True)]
StopSequences = Annotated[list[str | Ids], Field(fail_fast=True)]


class LightllmParameters(PromptFields, BeamFields, GuidedFields, TokenRuleFields):
    """null means absent. Unknown parameters are allowed and have no effect."""

    other_fields: ClassVar[frozenset[str]] = frozenset(UNSUPPORTED)

    best_of: int | None = Field(default=None, description="sequences to generate; default n")
    n: int | None = Field(default=None, description="sequences to return, the most likely; default best_of")
    do_sample: bool | None = Field(default=None, description="false, the default: greedy")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    max_new_tokens: int | None = Field(default=None, description=f"default {DEFAULT_NEW_TOKENS}")
    min_new_tokens: int | None = None
    stop_sequences: str | StopSequences | None = Field(
        default=None,
        description="texts, or lists of token ids: a single id ends the output, several stand for their text",
    )
    print_eos_token: bool | None = Field(default=None, description="keep the end token or the stop string in the text")
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="of the prompt; default true")
    allowed_token_ids: Ids | None = Field(default=None, max_length=MAX_ALLOWED_IDS)
    invalid_token_ids: Ids | None = Field(default=None, max_length=MAX_BANNED_IDS)
    logit_bias: LogitBias | None = Field(default=None, description="token id -> number that is added to its logit")
    seed: int | None = Field(default=None, description="the same seed gives the same text; -1: a random one")
    return_details: bool | None = Field(default=None, description="return every token")
    token_healing: bool | None = Field(
        default=None, description="remove the last tokens of the prompt and generate their text again"
    )
    speculative: bool | None = Field(
        default=None, description="false: no drafts of the next tokens; the text is the same"
    )

    @property
    def is_beam_search(self) -> bool:
        return (self.num_beams or 1) > 1


class LightllmBody(Body):
    inputs: str | Ids
    parameters: LightllmParameters | None = None
    multimodal_params: dict[str, Any] | None = None
    stream: bool | None = Field(default=None, description="only at POST /")


@dataclass(frozen=True, slots=True)
class LightllmRequest:
    prompt_request: PromptRequest
    n: int  # sequences to return
    best_of: int  # sequences to generate
    return_details: bool
    beam_params: BeamParams | None = None  # for a beam search


async def lightllm_request(context: ServerContext, body: LightllmBody, streams: bool) -> LightllmRequest:
    parameters = body.parameters or LightllmParameters()
    _refuse_unsupported(body, parameters)
    n, best_of = _choices(context, parameters, streams)
    images = await _read_images(context, body, parameters)
    prompt_ids = await _prompt_ids(context, body.inputs, parameters.add_special_tokens)
    prompt_ids = with_placeholders(context, prompt_ids, images)
    prompt_ids = context.with_pinned_prefix(parameters.task_id, prompt_ids)
    details = bool(parameters.return_details)
    needs_logprobs = streams or details or n < best_of
    params = GenerationParams.of(
        max_new_tokens=_new_tokens(context, len(prompt_ids), parameters.max_new_tokens),
        seed=None if parameters.seed == RANDOM_SEED else parameters.seed,
        include_stop=bool(parameters.print_eos_token),
        logprobs=0 if needs_logprobs else None,
        grammar=await requested_grammar(context, parameters),
        **_sampling_params(context, parameters),
        **_stops(context, parameters.stop_sequences),
        **_token_rules(context, parameters),
    )
    if not parameters.do_sample:
        params = params.replace(temperature=0.0)
    prompt_request = with_images(context, images, PromptRequest(prompt_ids, params, parameters.scheduling))
    if parameters.token_healing:
        _check_healing(body, parameters)
        prompt_request = await heal(context, prompt_request)
    return LightllmRequest(prompt_request, n, best_of, details, _beam_params(parameters, prompt_request, n))


def _check_healing(body: LightllmBody, parameters: LightllmParameters) -> None:
    if not isinstance(body.inputs, str):
        raise healing_error("for inputs that are a text")
    if parameters.is_beam_search:
        raise not_with_beam_search("token_healing")


def _refuse_unsupported(body: LightllmBody, parameters: LightllmParameters) -> None:
    unknown = parameters.model_extra or {}
    for name, no_effect in UNSUPPORTED.items():
        value = unknown.get(name)
        if value is not None and value not in no_effect:
            raise NotSupportedYetError(f"`{name}`", name)


async def _read_images(context: ServerContext, body: LightllmBody, parameters: LightllmParameters) -> list[ReadImage]:
    sources = image_sources(body.multimodal_params)
    if sources and parameters.is_beam_search:
        check_beam_search(context, "num_beams")
    return await read_prompt_images(context, sources, parameters.cache_salt or "")


def _choices(context: ServerContext, parameters: LightllmParameters, streams: bool) -> tuple[int, int]:
    """How many sequences to return, and how many to generate."""
    if parameters.is_beam_search:
        return _beam_search_choices(context, parameters, streams)
    best_of = parameters.best_of if parameters.best_of is not None else parameters.n
    best_of = 1 if best_of is None else best_of
    n = best_of if parameters.n is None else parameters.n
    if not 1 <= best_of <= context.config.max_choices:
        raise InvalidRequestError(f"`best_of` must be in 1..{context.config.max_choices}. Given: {best_of}", "best_of")
    if not 1 <= n <= best_of:
        raise InvalidRequestError(f"`n` must be in 1..best_of={best_of}. Given: {n}", "n")
    if streams and best_of != 1:
        raise InvalidRequestError("`best_of` and `n` must be 1 in a stream: its events have no index")
    return n, best_of


def _beam_search_choices(context: ServerContext, parameters: LightllmParameters, streams: bool) -> tuple[int, int]:
    """The same for a beam search, which generates what it returns."""
    num_beams, n = parameters.num_beams or 1, 1 if parameters.n is None else parameters.n
    if streams:
        raise InvalidRequestError("num_beams: a beam search cannot stream; use /generate", "num_beams")
    if num_beams > context.config.max_choices:
        raise InvalidRequestError(
            f"`num_beams` must be in 1..{context.config.max_choices}. Given: {num_beams}", "num_beams"
        )
    if parameters.best_of not in (None, 1, num_beams):
        raise InvalidRequestError(f"`best_of` must be num_beams={num_beams} in a beam search", "best_of")
    if not 1 <= n <= num_beams:
        raise InvalidRequestError(f"`n` must be in 1..num_beams={num_beams}. Given: {n}", "n")
    return n, n


def _beam_params(parameters: LightllmParameters, prompt_request: PromptRequest, n: int) -> BeamParams | None:
    if not parameters.is_beam_search:
        return None
    for name in ("do_sample", "return_details"):
        if getattr(parameters, name):
            raise not_with_beam_search(name)
    refuse_excluded_params(prompt_request.params, {"stop": "stop_sequences", "bad_words_ids": "invalid_token_ids"})
    return parameters.beam_params(parameters.num_beams or 1, n, [prompt_request])


async def _prompt_ids(context: ServerContext, inputs: str | list[int], add_special_tokens: bool | None) -> list[int]:
    if isinstance(inputs, list):
        ids = inputs
    elif inputs:
        ids = await context.encode(inputs, add_special_tokens is not False)
    else:
        ids = []
    check_input_ids(context, ids)
    return ids


def _new_tokens(context: ServerContext, prompt_len: int, requested: int | None) -> int:
    if requested is None:
        default = context.default_new_tokens(DEFAULT_NEW_TOKENS) or DEFAULT_NEW_TOKENS
        return min(default, context.manager.max_new_tokens(prompt_len, None))
    return context.manager.max_new_tokens(prompt_len, requested, "max_new_tokens")


def _sampling_params(context: ServerContext, parameters: LightllmParameters) -> dict[str, Any]:
    """The parameters of the same name, and the model's defaults for the others."""
    values = {name: getattr(parameters, name) for name in SAME_NAME}
    given = {name: value for name, value in values.items() if value is not None}
    if parameters.is_beam_search:
        return given
    greedy = {} if parameters.do_sample else {"temperature": 0.0}
    return context.sampling_defaults.fill({**given, **greedy}) | given


def _stops(context: ServerContext, stop: str | list[str | list[int]] | None) -> dict[str, Any]:
    groups = [stop] if isinstance(stop, str) else stop or []
    if len(groups) > MAX_STOPS:
        raise InvalidRequestError(
            f"`stop_sequences` supports up to {MAX_STOPS} sequences. Given: {len(groups)}", "stop_sequences"
        )
    ids = [group[0] for group in groups if isinstance(group, list) and len(group) == 1]
    context.manager.check_ids("stop_sequences", ids)
    texts = [_stop_text(context, group) for group in groups if isinstance(group, str) or len(group) != 1]
    check_stop_strings("stop_sequences", texts)
    return {"stop": tuple(texts), "stop_token_ids": tuple(ids)}


def _stop_text(context: ServerContext, group: str | list[int]) -> str:
    """Several ids stand for their text: the same text in other tokens ends the output too."""
    if isinstance(group, str):
        return group
    if len(group) > MAX_STOP_IDS:
        raise InvalidRequestError(f"`stop_sequences`: at most {MAX_STOP_IDS} token ids a sequence", "stop_sequences")
    context.manager.check_ids("stop_sequences", group)
    text = context.tokenizer.decode(group, skip_special_tokens=False)
    if "\ufffd" in text:
        raise InvalidRequestError("`stop_sequences`: token ids that are not whole characters", "stop_sequences")
    return text


def _token_rules(context: ServerContext, parameters: LightllmParameters) -> dict[str, Any]:
    rules = parameters.token_rules(context)
    if parameters.allowed_token_ids is not None:
        context.manager.check_ids("allowed_token_ids", parameters.allowed_token_ids)
        rules["allowed_token_ids"] = tuple(parameters.allowed_token_ids)
    if parameters.invalid_token_ids:
        context.manager.check_ids("invalid_token_ids", parameters.invalid_token_ids)
        rules["bad_words_ids"] = tuple((token_id,) for token_id in parameters.invalid_token_ids)
    if parameters.logit_bias:
        rules["logit_bias"] = {int(token_id): value for token_id, value in parameters.logit_bias.items()}
        context.manager.check_ids("logit_bias", list(rules["logit_bias"]))
    return rules
