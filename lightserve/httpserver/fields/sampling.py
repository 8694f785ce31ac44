"""From the fields of a body to requests for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.generation import GenerationBody
from lightserve.media.tokens import room_for_tokens
from lightserve.messages.params import GenerationParams, GrammarSpec
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

# body field: generation parameter
PARAM_NAMES = {
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "watermark": "watermark",
    "ignore_eos": "ignore_eos",
    "speculative": "speculative",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "skip_special_tokens",
}


def check_choices(context: ServerContext, prompts: int, choices: int) -> None:
    limit = context.config.choices_limit
    if prompts > limit:
        raise InvalidRequestError(f"prompt: {prompts} prompts; the limit is {limit} (--max_choices)", "prompt")
    if prompts * choices > limit:
        raise InvalidRequestError(
            f"n: {choices} choices for {prompts} prompts; the limit is {limit} in all (--max_choices)", "n"
        )


def build_prompt_requests(
    context: ServerContext,
    body: GenerationBody,
    prompts: Sequence[list[int]],
    logprobs: int | None,
    default_new_tokens: int | None = None,
    grammar: GrammarSpec | None = None,
) -> list[PromptRequest]:
    """One request per prompt.

    ``default_new_tokens`` is the endpoint's maximum for a request without max_tokens.
    """
    default_new_tokens = context.default_new_tokens(default_new_tokens)
    fields = _fields(context, body) | {"logprobs": logprobs, "grammar": grammar}
    fields["prompt_logprobs"] = body.prompt_top_logprobs
    fields["processed_logprobs"] = bool(context.config.processed_logprobs)
    scheduling = msgspec.structs.replace(body.scheduling, lora=context.adapter_of(body.model))
    prompt_requests = []
    for prompt in prompts:
        ids = context.with_pinned_prefix(body.task_id, _truncated(context, body, prompt))
        limit = context.manager.limits.max_req_total_len
        room = room_for_tokens(limit, len(ids), body.image_sizes) - len(ids)
        new_tokens = context.manager.max_new_tokens(limit - room, body.new_tokens_within(room), body.new_tokens_field)
        if body.new_tokens is None and default_new_tokens is not None:
            new_tokens = min(new_tokens, default_new_tokens)
        if (body.min_tokens or 0) > new_tokens:
            message = f"min_tokens={body.min_tokens}: only {new_tokens} can be generated"
            raise InvalidRequestError(message, "min_tokens")
        # the engine generates at least one token; with max_tokens=0 it is not shown
        prompt_requests.append(
            PromptRequest(ids, GenerationParams.of(max_new_tokens=max(new_tokens, 1), **fields), scheduling)
        )
    return prompt_requests


def _truncated(context: ServerContext, body: GenerationBody, ids: list[int]) -> list[int]:
    """The last truncate_prompt_tokens tokens of a prompt, or the first ones."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = max(1, context.manager.limits.max_req_total_len - (body.new_tokens or 1))
    if keep >= len(ids):
        return ids
    return ids[:keep] if body.truncation_side == "right" else ids[-keep:]


def _fields(context: ServerContext, body: GenerationBody) -> dict[str, Any]:
    """The generation parameters that the body sets or the model recommends, without max_new_tokens."""
    plain = {name: getattr(body, field) for field, name in PARAM_NAMES.items()}
    given = {name: value for name, value in plain.items() if value is not None}
    if body.do_sample is False:
        given["temperature"] = 0.0
    if body.no_stop_trim:
        given["include_stop"] = True
    if body.beam_width is None:  # a beam search takes no sampling parameters
        given = context.sampling_defaults.fill(given)
    seed = None if body.seed == -1 else body.seed
    return {**given, **_token_rules(context, body), "seed": seed, "stop": tuple(body.stop or ())}


def _token_rules(context: ServerContext, body: GenerationBody) -> dict[str, Any]:
    """The parameters that name tokens by their ids."""
    rules = body.token_rules(context)
    if body.stop_token_ids:
        rules["stop_token_ids"] = _checked(context, "stop_token_ids", body.stop_token_ids)
    if body.allowed_token_ids is not None:
        rules["allowed_token_ids"] = _checked(context, "allowed_token_ids", body.allowed_token_ids)
    if body.logit_bias:
        bias = {int(token_id): value for token_id, value in body.logit_bias.items()}
        context.manager.check_ids("logit_bias", list(bias))
        rules["logit_bias"] = bias
    if body.bad_words:
        rules["bad_words_ids"] = tuple(ids for word in body.bad_words for ids in bad_word_ids(context.tokenizer, word))
    return rules


def _checked(context: ServerContext, name: str, ids: Sequence[int]) -> tuple[int, ...]:
    context.manager.check_ids(name, ids)
    return tuple(dict.fromkeys(ids))


def bad_word_ids(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """The tokens of a word at the start of a text. After a space too, if they are as many and the first differs."""
    bare = word.lstrip()
    at_start = tuple(tokenizer.encode(bare, add_special_tokens=False))
    if not at_start:
        raise InvalidRequestError(f"bad_words: {word!r} has no tokens", "bad_words")
    inside = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
    differs = inside[0] != at_start[0] and len(inside) == len(at_start)
    return [at_start, inside] if differs else [at_start]
