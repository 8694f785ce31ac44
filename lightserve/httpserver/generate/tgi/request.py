"""Bodies in TGI's format, checked by TGI's rules with its messages, and the engine request that they make."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.grammar import TgiGrammar, requested_grammar
from lightserve.httpserver.fields.images import read_prompt_images, with_images, with_placeholders
from lightserve.httpserver.fields.shared import check_input_ids, check_stop_strings
from lightserve.httpserver.fields.token_healing import heal
from lightserve.httpserver.generate.tgi.markdown import split_images
from lightserve.httpserver.http.body import Body
from lightserve.messages.params import GenerationParams, SchedulingParams

MAX_STOPS = 4
MAX_TOP_N_TOKENS = 5


class TgiParameters(Body):
    """null means absent."""

    best_of: int | None = Field(default=None, description="sequences to generate, of which the most likely is returned")
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = Field(
        default=None, description="temperature, top_k, top_p and typical_p switch sampling on too"
    )
    max_new_tokens: int | None = Field(default=None, description="default: the rest of the context")
    return_full_text: bool | None = Field(default=None, description="begin generated_text with the prompt")
    stop: list[str] | None = Field(
        default=None, fail_fast=True, description=f"up to {MAX_STOPS} texts that end the output and stay in it"
    )
    truncate: int | None = Field(default=None, description="keep only this many of the prompt's last tokens")
    watermark: bool | None = Field(
        default=None, description="favour tokens by which the text can be recognised as generated"
    )
    details: bool | None = None
    decoder_input_details: bool | None = Field(
        default=None, description="details with the logprobs of the prompt's tokens; not in a stream"
    )
    seed: int | None = None
    top_n_tokens: int | None = Field(
        default=None, description=f"up to {MAX_TOP_N_TOKENS} most likely tokens at every step"
    )
    grammar: TgiGrammar | None = None
    adapter_id: Annotated[str, Field(max_length=256)] | None = Field(default=None, description="a LoRA adapter")
    token_healing: bool | None = Field(
        default=None, description="remove the last tokens of the prompt and generate their text again"
    )
    ignore_eos_token: bool | None = Field(default=None, description="continue after an end token, for benchmarks")
    speculative: bool | None = Field(
        default=None, description="false: no drafts of the next tokens; the text is the same"
    )

    @property
    def is_sampling(self) -> bool:
        cuts = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(cut is not None for cut in cuts)


class TgiBody(Body):
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = Field(default=None, description="only at POST /")


@dataclass(frozen=True, slots=True)
class TgiRequest:
    prompt_request: PromptRequest
    best_of: int
    seed: int | None  # unsigned, as TGI reports it; None: greedy
    details: bool
    before: str  # the text before the output in generated_text

    @property
    def top_n_tokens(self) -> int:
        return self.prompt_request.params.sampling.logprobs or 0


async def tgi_request(context: ServerContext, body: TgiBody, streams: bool) -> TgiRequest:
    parameters = body.parameters or TgiParameters()
    _check(context, parameters, streams)
    best_of = 1 if parameters.best_of is None else parameters.best_of
    seed = _seed(parameters)
    text, sources = split_images(context, body.inputs)
    images = await read_prompt_images(context, sources, "")
    if images and parameters.truncate is not None:
        raise InvalidRequestError("`truncate` does not combine with images")
    prompt_ids = with_placeholders(context, await _prompt_ids(context, text, parameters.truncate), images)
    has_prefill = bool(parameters.decoder_input_details)
    details = bool(parameters.details) or has_prefill
    params = GenerationParams.of(
        max_new_tokens=_new_tokens(context, len(prompt_ids), parameters.max_new_tokens),
        seed=None if seed is None else _signed(seed),
        stop=tuple(parameters.stop or ()),
        include_stop=bool(parameters.stop),  # TGI leaves the stop string in the text
        ignore_eos=bool(parameters.ignore_eos_token),
        logprobs=(parameters.top_n_tokens or 0) if streams or details or best_of > 1 else None,
        prompt_logprobs=0 if has_prefill else None,
        watermark=bool(parameters.watermark),
        speculative=parameters.speculative is not False,
        grammar=None if parameters.grammar is None else await requested_grammar(context, parameters.grammar),
        **context.sampling_defaults.fill(_sampling_params(parameters)),
    )
    before = body.inputs if parameters.return_full_text else ""
    scheduling = SchedulingParams(lora=parameters.adapter_id or "")
    prompt_request = with_images(context, images, PromptRequest(prompt_ids, params, scheduling))
    if parameters.token_healing:
        prompt_request = await heal(context, prompt_request)
    return TgiRequest(prompt_request, best_of, seed, details, before)


def _check(context: ServerContext, parameters: TgiParameters, streams: bool) -> None:
    if parameters.adapter_id and not context.has_adapters:
        raise InvalidRequestError("`adapter_id`: this server has no LoRA adapters (--lora_modules)", "adapter_id")
    for is_met, message in _rules(context, parameters, streams):
        if not is_met:
            raise InvalidRequestError(message)
    check_stop_strings("stop", parameters.stop or ())


def _rules(context: ServerContext, p: TgiParameters, streams: bool) -> Iterator[tuple[bool, str]]:
    """TGI's rules, in its order, with its messages."""
    best_of = 1 if p.best_of is None else p.best_of
    max_best_of, n_stops = context.config.max_choices, len(p.stop or ())
    max_input = context.manager.limits.max_req_total_len - 1
    yield not (streams and best_of != 1), "`best_of` != 1 is not supported when streaming tokens"
    yield (
        not (streams and p.decoder_input_details),
        "`decoder_input_details` == true is not supported when streaming tokens",
    )
    yield 1 <= best_of <= max_best_of, f"`best_of` must be > 0 and <= {max_best_of}. Given: {best_of}"
    yield best_of == 1 or p.is_sampling, "you must use sampling when `best_of` is > 1"
    yield p.temperature is None or p.temperature > 0, "`temperature` must be strictly positive"
    yield p.repetition_penalty is None or p.repetition_penalty > 0, "`repetition_penalty` must be strictly positive"
    yield (
        p.frequency_penalty is None or -2 <= p.frequency_penalty <= 2,
        "`frequency_penalty` must be >= -2.0 and <= 2.0",
    )
    yield p.top_p is None or 0 < p.top_p < 1, "`top_p` must be > 0.0 and < 1.0"
    yield p.typical_p is None or 0 < p.typical_p < 1, "`typical_p` must be > 0.0 and < 1.0"
    yield p.top_k is None or p.top_k > 0, "`top_k` must be strictly positive"
    yield p.max_new_tokens is None or p.max_new_tokens > 0, "`max_new_tokens` must be strictly positive"
    yield n_stops <= MAX_STOPS, f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {n_stops}"
    yield p.seed is None or best_of == 1, "`seed` must not be set when `best_of` > 1"
    yield p.seed is None or 0 <= p.seed < 2**64, "`seed` must be >= 0 and < 2^64"
    yield (
        0 <= (p.top_n_tokens or 0) <= MAX_TOP_N_TOKENS,
        f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {p.top_n_tokens}",
    )
    yield (
        p.truncate is None or 0 < p.truncate <= max_input,
        f"`truncate` must be strictly positive and less than {max_input}. Given: {p.truncate}",
    )


def _seed(parameters: TgiParameters) -> int | None:
    """The seed to report, a random one where none is given; a greedy request has none."""
    if not parameters.is_sampling:
        return None
    return random.getrandbits(64) if parameters.seed is None else parameters.seed


def _signed(seed: int) -> int:
    """The engine's seeds are signed."""
    return seed - 2**64 if seed >= 2**63 else seed


async def _prompt_ids(context: ServerContext, inputs: str, truncate: int | None) -> list[int]:
    if not inputs:
        check_input_ids(context, [])
    if truncate is None:
        ids = await context.encode(inputs)
    else:
        enough = context.manager.limits.max_req_total_len * context.tokenizer.longest_token
        ids = (await context.encode(inputs[-enough:]))[-truncate:]
    check_input_ids(context, ids)
    return ids


def _new_tokens(context: ServerContext, prompt_len: int, requested: int | None) -> int:
    total = context.manager.limits.max_req_total_len
    if prompt_len >= total:
        raise InvalidRequestError(f"`inputs` must have less than {total} tokens. Given: {prompt_len}")
    if requested is not None and prompt_len + requested > total:
        raise InvalidRequestError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {prompt_len} `inputs` tokens and {requested} `max_new_tokens`; "
            f"use `max_new_tokens` <= {total - prompt_len}"
        )
    rest, default = context.manager.max_new_tokens(prompt_len, requested), context.default_new_tokens()
    return rest if requested is not None or default is None else min(rest, default)


def _sampling_params(parameters: TgiParameters) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty")
    values = {name: getattr(parameters, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return given if parameters.is_sampling else {"temperature": 0.0} | given
