"""A body in TGI's schema, checked as TGI checks it and in its words, as something to ask the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.body import Body
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate_call import check_prompt, check_stops
from lightserve.httpserver.grammar_fields import TgiGrammar, grammar_of
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.token_healing import heal
from lightserve.io_struct import GenerationParams

MAX_STOPS = 4
MAX_TOP_N_TOKENS = 5


class TgiParameters(Body):
    """A null is as good as absent."""

    best_of: int | None = Field(default=None, description="answers to generate, of which the likeliest is returned")
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
        default=None, fail_fast=True, description=f"up to {MAX_STOPS} texts that end the answer and stay in it"
    )
    truncate: int | None = Field(default=None, description="keep only so many of the prompt's last tokens")
    watermark: bool | None = Field(default=None, description="favour tokens by which the text can be told from others")
    details: bool | None = None
    decoder_input_details: bool | None = Field(
        default=None, description="details, and in them how likely the prompt's tokens were; not in a stream"
    )
    seed: int | None = None
    top_n_tokens: int | None = Field(
        default=None, description=f"up to {MAX_TOP_N_TOKENS} likeliest tokens at every step"
    )
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None
    token_healing: bool | None = Field(
        default=None, description="take back the last tokens of the prompt, and spell them anew"
    )
    ignore_eos_token: bool | None = Field(default=None, description="go on after an end token, for benchmarks")

    @property
    def is_sampling(self) -> bool:
        cuts = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(cut is not None for cut in cuts)


class TgiBody(Body):
    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = Field(default=None, description="only at POST /")


@dataclass(frozen=True, slots=True)
class TgiAsk:
    ask: Ask
    best_of: int
    seed: int | None  # as TGI tells it, unsigned; None: greedy
    details: bool
    before: str  # what generated_text begins with

    @property
    def top_n_tokens(self) -> int:
        return self.ask.params.sampling.logprobs or 0


async def tgi_ask(context: ServerContext, body: TgiBody, streams: bool) -> TgiAsk:
    parameters = body.parameters or TgiParameters()
    _check(context, parameters, streams)
    best_of = 1 if parameters.best_of is None else parameters.best_of
    seed = _seed(parameters)
    prompt_ids = await _prompt_ids(context, body.inputs, parameters.truncate)
    tells_prompt = bool(parameters.decoder_input_details)
    details = bool(parameters.details) or tells_prompt
    params = GenerationParams.of(
        max_new_tokens=_new_tokens(context, len(prompt_ids), parameters.max_new_tokens),
        seed=None if seed is None else _signed(seed),
        stop=tuple(parameters.stop or ()),
        include_stop=bool(parameters.stop),  # TGI leaves the stop string in the text
        ignore_eos=bool(parameters.ignore_eos_token),
        logprobs=(parameters.top_n_tokens or 0) if streams or details or best_of > 1 else None,
        prompt_logprobs=0 if tells_prompt else None,
        watermark=bool(parameters.watermark),
        grammar=None if parameters.grammar is None else await grammar_of(context, parameters.grammar),
        **_choice_of_tokens(parameters),
    )
    before = body.inputs if parameters.return_full_text else ""
    ask = Ask(prompt_ids, params)
    if parameters.token_healing:
        ask = await heal(context, ask)
    return TgiAsk(ask, best_of, seed, details, before)


def _check(context: ServerContext, parameters: TgiParameters, streams: bool) -> None:
    if parameters.adapter_id:
        raise NotSupportedYetError("`adapter_id`", "adapter_id")
    for is_fine, wanted in _rules(context, parameters, streams):
        if not is_fine:
            raise InvalidRequestError(wanted)
    check_stops("stop", parameters.stop or ())


def _rules(context: ServerContext, p: TgiParameters, streams: bool) -> Iterator[tuple[bool, str]]:
    """What TGI demands, in its order and its words."""
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
    """The seed to tell, drawn here where none was given; a greedy answer has none."""
    if not parameters.is_sampling:
        return None
    return random.getrandbits(64) if parameters.seed is None else parameters.seed


def _signed(seed: int) -> int:
    """The engine's seeds are signed."""
    return seed - 2**64 if seed >= 2**63 else seed


async def _prompt_ids(context: ServerContext, inputs: str, truncate: int | None) -> list[int]:
    if not inputs:
        check_prompt(context, [])
    if truncate is None:
        ids = await context.encode(inputs)
    else:
        enough = context.manager.limits.max_req_total_len * context.tokenizer.longest_token
        ids = (await context.encode(inputs[-enough:]))[-truncate:]
    check_prompt(context, ids)
    return ids


def _new_tokens(context: ServerContext, prompt_len: int, wanted: int | None) -> int:
    total = context.manager.limits.max_req_total_len
    if wanted is not None and prompt_len + wanted > total:
        raise InvalidRequestError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {prompt_len} `inputs` tokens and {wanted} `max_new_tokens`"
        )
    if prompt_len >= total:
        raise InvalidRequestError(f"`inputs` must have less than {total} tokens. Given: {prompt_len}")
    return context.manager.new_tokens(prompt_len, wanted)


def _choice_of_tokens(parameters: TgiParameters) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty")
    values = {name: getattr(parameters, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return given if parameters.is_sampling else {"temperature": 0.0} | given
