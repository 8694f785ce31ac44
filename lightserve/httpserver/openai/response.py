"""Responses of OpenAI's chat and completions, as one JSON body. stream.py writes them as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from lightserve import __version__
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.http.sse import KEEP_ALIVE
from lightserve.httpserver.openai.logprobs import Logprobs, PromptLogprobsWriter, TokenLogprobs, concatenated
from lightserve.httpserver.weight_versions import Json, WeightVersions
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import PromptLogprobs
from lightserve.text.parsing import Call, Delta, Output, merge_deltas

FINGERPRINT = f"lightserve-{__version__}"  # TGI's client does not accept null


@dataclass(frozen=True, slots=True)
class EndpointFormat:
    """How an endpoint, chat or completions, writes the text of a choice."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    text_fields: Callable[[str], JsonObject]
    first: Callable[[str], bytes]  # the first chunk of a choice, given the echo; empty: there is none
    before_text: bytes  # around a piece of text
    after_text: bytes
    last: bytes  # a chunk without text
    has_prompt_fields_in_choice: (
        bool  # where vLLM writes prompt_logprobs and prompt_token_ids; False: beside the choices
    )
    keep_alive: bytes = KEEP_ALIVE


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What to write about a generation."""

    endpoint: EndpointFormat
    request_id: str
    model: str
    n: int  # choices shown for each prompt; where more are generated, the best ones
    echoes: Sequence[str]  # by shown choice: the text before the output
    hidden_chars: Sequence[int] = ()  # by prompt, where output tokens repeat its end: their characters are not shown
    new_logprobs: Callable[[int], TokenLogprobs] | None = None  # for one choice, given the characters before its output
    new_parser: Callable[[], ChoiceParser] | None = None  # for one choice, where the output has reasoning or tool calls
    prompt_logprobs: Sequence[PromptLogprobsWriter] = ()  # by prompt, where they are requested
    prompt_token_ids: Sequence[list[int]] = ()  # by prompt, where token ids are requested
    is_prompt_only: bool = False  # max_tokens is 0: the one token that the engine generates is not shown
    returns_aborted: bool = False  # a choice that is aborted has its tokens, and the finish reason abort: --enable_rl
    versions: WeightVersions | None = None  # with which weights tokens were generated, where that is requested
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def has_token_fields(self) -> bool:
        """A chunk of a stream has more than text, or not even that."""
        return (
            self.new_logprobs is not None
            or bool(self.prompt_token_ids or self.prompt_logprobs)
            or self.is_prompt_only
            or self.versions is not None
        )

    @property
    def has_only_logprobs(self) -> bool:
        """A chunk of a stream has text, as the model wrote it, and logprobs."""
        of_tokens = self.prompt_token_ids or self.prompt_logprobs or self.is_prompt_only or self.versions is not None
        return self.new_logprobs is not None and self.new_parser is None and not of_tokens

    def head(self, is_chunk: bool = False) -> JsonObject:
        kind = self.endpoint.chunk_object_name if is_chunk else self.endpoint.object_name
        ident = self.endpoint.id_prefix + self.request_id
        return {"id": ident, "object": kind, "created": self.created, "model": self.model}

    def new_choice(self, prompt: int = 0) -> Choice:
        return Choice(self.logprobs_of(prompt), self.new_parser and self.new_parser(), self.is_prompt_only)

    def logprobs_of(self, prompt: int) -> TokenLogprobs | None:
        """For one choice of the prompt with this index."""
        if self.new_logprobs is None:
            return None
        hidden = self.hidden_chars[prompt] if self.hidden_chars else 0
        return self.new_logprobs(len(self.echoes[prompt * self.n]) - hidden)

    def prompt_logprobs_of(self, index: int) -> PromptLogprobsWriter | None:
        """For the prompt of the shown choice with this index."""
        return self.prompt_logprobs[index // self.n] if self.prompt_logprobs else None

    def prompt_fields(self, index: int, packed: PromptLogprobs | None) -> JsonObject:
        """vLLM's fields about the prompt of the shown choice with this index; null where they are not requested."""
        prompt = self.prompt_logprobs_of(index)
        ids = self.prompt_token_ids[index // self.n] if self.prompt_token_ids else None
        return {"prompt_logprobs": None if prompt is None else prompt.field(packed), "prompt_token_ids": ids}


class Choice:
    """One output sequence, collected token by token."""

    def __init__(
        self, logprobs_of: TokenLogprobs | None, parser: ChoiceParser | None, is_prompt_only: bool = False
    ) -> None:
        self.finish: StrOut | None = None
        self.packed_prompt_logprobs: PromptLogprobs | None = None
        self.parser = parser
        self.num_tokens = 0
        self.weight_versions: list[Json] | None = None  # None: nobody wants them
        self.token_ids: list[int] = []  # without those of reasoning that the response leaves out
        self._is_prompt_only = is_prompt_only
        self._deltas: list[Delta] = []
        self._logprobs_of = logprobs_of
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._total_logprob = 0.0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def message(self, echo: str) -> JsonObject:
        """The message, where the output is parsed; its content follows ``echo``."""
        output = merge_deltas(self._deltas)
        output.content = echo + output.content
        return message_of(output)

    def logprobs(self, prompt: PromptLogprobsWriter | None) -> Logprobs | None:
        echoed = None if prompt is None else prompt.echoed(self.packed_prompt_logprobs)
        return concatenated(self._logprobs if echoed is None else [echoed, *self._logprobs])

    @property
    def mean_logprob(self) -> float:
        return self._total_logprob / max(self.num_tokens, 1)

    def add(self, out: StrOut) -> None:
        self.packed_prompt_logprobs = self.packed_prompt_logprobs or out.token.prompt_logprobs
        if self._is_prompt_only and out.has_token:
            self.finish = prompt_only_end(out)
            return
        if self.parser is None:
            self._texts.append(out.text)
        else:
            self._deltas += self.parser.push(out)
        if out.finish_reason is not None:
            self.finish = out
        if not out.has_token:
            return
        self._total_logprob += out.token.logprob or 0.0
        self.num_tokens += 1
        if self.parser is None or not self.parser.is_hidden:
            self.token_ids.append(out.token.id)
            if self._logprobs_of is not None:
                self._logprobs.append(self._logprobs_of(out))


async def collect_response(generation: Generation, spec: ResponseSpec) -> JsonObject:
    """Run the generation to its end."""
    choices = [spec.new_choice(index // generation.n) for index in range(len(generation.prompt_requests))]
    async with generation:
        async for outs in generation:
            for index, out in outs:
                choices[index].add(out)
    if spec.versions is not None:
        for index, choice in enumerate(choices):
            choice.weight_versions = spec.versions.json(index, choice.num_tokens)
    shown = best_choices(choices, generation.n, spec.n)
    if spec.prompt_logprobs:  # those of long prompts take long to write: streams of other requests must not wait
        return await asyncio.to_thread(response_json, spec, shown, generation.log)
    return response_json(spec, shown, generation.log)


def best_choices(choices: Sequence[Choice], candidates: int, n: int) -> Sequence[Choice]:
    """The ``n`` most likely of every ``candidates`` choices, best first; all in their order where none is dropped."""
    if n == candidates:
        return choices
    groups = (choices[start : start + candidates] for start in range(0, len(choices), candidates))
    return [choice for group in groups for choice in sorted(group, key=lambda c: c.mean_logprob, reverse=True)[:n]]


def response_json(spec: ResponseSpec, choices: Sequence[Choice], log: AccessLog) -> JsonObject:
    written = [_choice_json(index, choice, spec) for index, choice in enumerate(choices)]
    usage = usage_fields(log, log.output_tokens, [choice.parser for choice in choices if choice.parser is not None])
    is_in_choice = spec.endpoint.has_prompt_fields_in_choice
    prompt = {} if is_in_choice else spec.prompt_fields(0, choices[0].packed_prompt_logprobs)
    return {**spec.head(), "choices": written, "system_fingerprint": FINGERPRINT, "usage": usage, **prompt}


def _choice_json(index: int, choice: Choice, spec: ResponseSpec) -> JsonObject:
    is_in_choice = spec.endpoint.has_prompt_fields_in_choice
    if choice.parser is None:
        text = spec.endpoint.text_fields(spec.echoes[index] + choice.text)
    else:
        text = {"message": choice.message(spec.echoes[index])}
    prompt = spec.prompt_fields(index, choice.packed_prompt_logprobs) if is_in_choice else {}
    logprobs = choice.logprobs(spec.prompt_logprobs_of(index))
    ids = {"token_ids": choice.token_ids if spec.prompt_token_ids else None}
    finish = finish_fields(choice.finish, choice.parser)
    versions = {} if choice.weight_versions is None else {"weight_versions": choice.weight_versions}
    return {"index": index, **text, "logprobs": logprobs, **finish, **ids, **prompt, **versions}


def prompt_only_end(out: StrOut) -> StrOut:
    """The end of a choice without output, whichever token the engine generated."""
    return msgspec.structs.replace(out, finish_reason=FinishReason.LENGTH, stop_reason=None)


def finish_fields(out: StrOut | None, parser: ChoiceParser | None = None) -> JsonObject:
    if out is None or out.finish_reason is None:
        return {"finish_reason": None, "stop_reason": None}
    is_call = parser is not None and parser.has_calls and out.finish_reason is FinishReason.STOP
    reason = "tool_calls" if is_call else out.finish_reason.value
    return {"finish_reason": reason, "stop_reason": out.stop_reason}


def usage_fields(log: AccessLog, output_tokens: int, parsers: Iterable[ChoiceParser] | None = None) -> JsonObject:
    usage: JsonObject = {
        "prompt_tokens": log.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": log.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": log.cached_tokens},
    }
    if log.image_tokens:
        usage["prompt_tokens_details"]["image_tokens"] = log.image_tokens
    if log.audio_tokens:
        usage["prompt_tokens_details"]["audio_tokens"] = log.audio_tokens
    details: JsonObject = {}
    if parsers:
        details["reasoning_tokens"] = sum(parser.reasoning_tokens for parser in parsers)
    if log.drafts is not None:
        details["accepted_prediction_tokens"] = log.drafts.accepted
        details["rejected_prediction_tokens"] = log.drafts.rejected
    return usage | {"completion_tokens_details": details} if details else usage


def message_fields(content: str | None, reasoning: str | None = None) -> JsonObject:
    """With null for no reasoning: the openai client has no attribute for a field that is left out."""
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
    }


def message_of(output: Output) -> JsonObject:
    content = output.content if output.content or not output.calls else None
    message = message_fields(content, output.reasoning or None)
    if output.calls:
        message["tool_calls"] = [_call_json(call) for call in output.calls]
    return message


def _call_json(call: Call) -> JsonObject:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
