"""Answers in OpenAI's JSON, whole or as server-sent events. Chat and completions differ by a Form.

Nothing is built per token but bytes: the JSON around a piece of text is prepared once a choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.access_log import AccessLog
from lightserve.httpserver.error_handlers import error_object
from lightserve.httpserver.generate_call import json_response
from lightserve.httpserver.manager import Generation
from lightserve.httpserver.openai_logprobs import Logprobs, LogprobsOf, joined
from lightserve.httpserver.openai_output import ChoiceOutput, delta_json, message_of
from lightserve.httpserver.openai_protocol import GenerationBody
from lightserve.httpserver.scored_prompt import ScoredPrompt
from lightserve.httpserver.sse import EventStream, events_of, unless_gone
from lightserve.io_struct import FinishReason, PromptLogprobs, StrOut
from lightserve.output_parsing import Delta, fold

DONE = b"data: [DONE]\n\n"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint writes the text of a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole_text: Callable[[str], Object]
    first: Callable[[str], bytes]  # what a choice begins with in a stream, given the echo; empty: no such chunk
    before_text: bytes  # around a piece of text
    after_text: bytes
    last: bytes  # beside the finish reason
    scores_in_choice: bool  # where vLLM has prompt_logprobs; False: beside the choices


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be written about a generation."""

    form: Form
    request_id: str
    model: str
    n: int  # answers shown for each prompt; where more are generated, the best
    echoes: Sequence[str]  # by choice shown: what stands before its text
    hidden_chars: Sequence[int] = ()  # by prompt, where tokens repeat its end: characters of them that are not shown
    new_logprobs: Callable[[int], LogprobsOf] | None = None  # for one choice, given the characters before its tokens
    new_output: Callable[[], ChoiceOutput] | None = None  # for one choice of a chat whose output has parts
    scored: Sequence[ScoredPrompt] = ()  # by prompt, where the logprobs of prompts are asked for
    is_scoring: bool = False  # nothing is generated: the one token that comes is not shown
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, is_whole: bool) -> Object:
        kind = self.form.whole_object if is_whole else self.form.chunk_object
        ident = self.form.id_prefix + self.request_id
        return {"id": ident, "object": kind, "created": self.created, "model": self.model}

    def new_choice(self, prompt: int = 0) -> Choice:
        return Choice(self.logprobs_of(prompt), self.new_output and self.new_output(), self.is_scoring)

    def logprobs_of(self, prompt: int) -> LogprobsOf | None:
        """For one choice."""
        if self.new_logprobs is None:
            return None
        hidden = self.hidden_chars[prompt] if self.hidden_chars else 0
        return self.new_logprobs(len(self.echoes[prompt * self.n]) - hidden)

    def scored_of(self, index: int) -> ScoredPrompt | None:
        """The prompt of a choice that is shown."""
        return self.scored[index // self.n] if self.scored else None


async def respond(request: Request, body: GenerationBody, generation: Generation, answer: Answer) -> Response:
    if body.stream:
        chunks = Chunks(answer, generation.log, body.wants_usage, body.wants_running_usage)
        return await EventStream.open(request, events_of(generation, chunks))
    return json_response(await unless_gone(request, collect(generation, answer)))


def name_request(request: Request, body: GenerationBody) -> None:
    """The body may name the request where no header does."""
    if body.request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = body.request_id


# the whole answer


async def collect(generation: Generation, answer: Answer) -> Object:
    choices = [answer.new_choice(index // generation.n) for index in range(len(generation.asks))]
    async with generation:
        async for news in generation:
            for index, out in news:
                choices[index].add(out)
    chosen = best(choices, generation.n, answer.n)
    if answer.scored:  # of long prompts that is a lot to write, while others wait for their tokens
        return await asyncio.to_thread(whole, answer, chosen, generation.log)
    return whole(answer, chosen, generation.log)


def whole(answer: Answer, choices: Sequence[Choice], log: AccessLog) -> Object:
    written = [write(index, choice, answer) for index, choice in enumerate(choices)]
    usage = usage_of(log, log.output_tokens, [choice.output for choice in choices if choice.output is not None])
    scores = {} if answer.form.scores_in_choice else _scores(answer, 0, choices[0].prompt)
    return {**answer.head(is_whole=True), "choices": written, "system_fingerprint": None, "usage": usage, **scores}


def _scores(answer: Answer, index: int, packed: PromptLogprobs | None) -> Object:
    """vLLM's field, where it is asked for."""
    scored = answer.scored_of(index)
    if scored is None or scored.listed_k is None:
        return {}
    return {"prompt_logprobs": scored.listed(packed)}


class Choice:
    """One answer, from its tokens."""

    def __init__(self, logprobs_of: LogprobsOf | None, output: ChoiceOutput | None, is_scoring: bool = False) -> None:
        self.finish: StrOut | None = None
        self.prompt: PromptLogprobs | None = None
        self.output = output
        self._is_scoring = is_scoring
        self._deltas: list[Delta] = []
        self._logprobs_of = logprobs_of
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._total_logprob = 0.0
        self._n_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> Object:
        """Of a choice that is taken apart."""
        return message_of(fold(self._deltas))

    def logprobs(self, scored: ScoredPrompt | None) -> Logprobs | None:
        before = None if scored is None else scored.echoed(self.prompt)
        return joined(self._logprobs if before is None else [before, *self._logprobs])

    @property
    def mean_logprob(self) -> float:
        return self._total_logprob / max(self._n_tokens, 1)

    def add(self, out: StrOut) -> None:
        self.prompt = self.prompt or out.token.prompt_logprobs
        if self._is_scoring:
            self.finish = _scored_end(out)
            return
        if self.output is None:
            self._texts.append(out.text)
        else:
            self._deltas += self.output.push(out)
        self._total_logprob += out.token.logprob or 0.0
        self._n_tokens += 1
        if self._logprobs_of is not None and not (self.output and self.output.is_hidden):
            self._logprobs.append(self._logprobs_of(out))
        if out.finish_reason is not None:
            self.finish = out


def best(choices: Sequence[Choice], candidates: int, n: int) -> Sequence[Choice]:
    """Of every ``candidates`` choices the ``n`` most likely, best first; all in their order where none is dropped."""
    if n == candidates:
        return choices
    groups = (choices[start : start + candidates] for start in range(0, len(choices), candidates))
    return [one for group in groups for one in sorted(group, key=lambda c: c.mean_logprob, reverse=True)[:n]]


def write(index: int, choice: Choice, answer: Answer) -> Object:
    is_plain = choice.output is None
    text = answer.form.whole_text(answer.echoes[index] + choice.text) if is_plain else {"message": choice.message}
    scores = _scores(answer, index, choice.prompt) if answer.form.scores_in_choice else {}
    logprobs = choice.logprobs(answer.scored_of(index))
    return {"index": index, **text, "logprobs": logprobs, **finish_of(choice.finish, choice.output), **scores}


# the same in pieces


class Chunks:
    """Writes what comes as events: a chunk a token that has text, more for the first and the last of a choice."""

    def __init__(self, answer: Answer, log: AccessLog, has_usage: bool, has_running_usage: bool) -> None:
        form = answer.form
        echoes = answer.echoes
        self._answer = answer
        self._log = log
        self._has_usage = has_usage
        self._has_running_usage = has_running_usage
        self._is_full = has_running_usage or answer.new_logprobs is not None  # there is more to say than text
        self._n_written = 0  # tokens, counted for running usage only
        self._unopened = set(range(len(echoes)))
        self._logprobs_of = [answer.logprobs_of(index // answer.n) for index in range(len(echoes))]
        self._outputs = [answer.new_output() for _ in echoes] if answer.new_output is not None else None
        head = b"data: " + orjson.dumps(answer.head(is_whole=False))[:-1] + b',"choices":[{"index":'
        self._heads = [head + b"%d," % index for index in range(len(echoes))]
        self._text_heads = [head + form.before_text for head in self._heads]
        usage = b',"usage":null' if has_usage else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._text_tail = form.after_text + self._tail

    def write(self, news: Iterable[tuple[int, StrOut]]) -> bytes:
        events: list[bytes] = []
        for index, out in news:
            if index in self._unopened:
                events.append(self._open(index, out))
            if self._answer.is_scoring:
                events.append(self._chunk(index, self._answer.form.last, **finish_of(_scored_end(out))))
                continue
            if self._has_running_usage:
                self._n_written += 1
            if self._outputs is not None:
                events += self._parts(index, out, self._outputs[index])
            elif self._is_full:
                events.append(self._full_piece(index, out))
            elif out.text:
                events += (self._text_heads[index], orjson.dumps(out.text), self._text_tail)
            if out.finish_reason is not None:
                finish = finish_of(out, None if self._outputs is None else self._outputs[index])
                events.append(self._chunk(index, self._answer.form.last, **finish))
        return b"".join(events)

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        usage = usage_of(self._log, self._log.output_tokens, self._outputs)
        return _event({**self._answer.head(is_whole=False), "choices": [], "usage": usage}) + DONE

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return _event(error_object(error, request_id)) + DONE

    def _open(self, index: int, out: StrOut) -> bytes:
        answer, form = self._answer, self._answer.form
        self._unopened.discard(index)
        first = form.first(answer.echoes[index])
        scored = answer.scored_of(index)
        if scored is None:
            return self._chunk(index, first) if first else b""
        first = first or form.before_text + b'""' + form.after_text
        echoed = scored.echoed(out.token.prompt_logprobs)
        fields: Object = {} if echoed is None else {"logprobs": echoed}
        scores = _scores(answer, index, out.token.prompt_logprobs)
        if form.scores_in_choice:
            return self._chunk(index, first, **fields, **scores)
        beside = b"," + orjson.dumps(scores)[1:-1] if scores and index == 0 else b""
        return self._chunk(index, first, beside, **fields)

    def _full_piece(self, index: int, out: StrOut) -> bytes:
        """A chunk with logprobs or running usage."""
        form = self._answer.form
        logprobs_of = self._logprobs_of[index]
        logprobs = None if logprobs_of is None else logprobs_of(out)
        if not out.text and logprobs is None:
            return b""
        return self._chunk(index, form.before_text + orjson.dumps(out.text) + form.after_text, logprobs=logprobs)

    def _parts(self, index: int, out: StrOut, output: ChoiceOutput) -> list[bytes]:
        """Chunks of what a token adds, each of one part; its logprobs are in the first."""
        form = self._answer.form
        bodies = [delta_json(delta) for delta in output.push(out)]
        logprobs_of = self._logprobs_of[index]
        if logprobs_of is None or output.is_hidden:
            return [self._chunk(index, body) for body in bodies]
        first, *rest = bodies or [form.before_text + b'""' + form.after_text]
        chunk = self._chunk(index, first, logprobs=logprobs_of(out))
        return [chunk, *(self._chunk(index, body) for body in rest)]

    def _chunk(self, index: int, body: bytes, beside: bytes = b"", **fields: Any) -> bytes:
        """``body`` and ``fields`` are of the choice, ``beside`` stands beside the choices."""
        if not fields and not beside and not self._has_running_usage:
            return self._heads[index] + body + self._tail
        rest = orjson.dumps({"logprobs": None, "finish_reason": None} | fields)[1:]
        return self._heads[index] + body + b"," + rest + b"]" + self._usage() + beside + b"}\n\n"

    def _usage(self) -> bytes:
        if not self._has_usage:
            return b""
        running = usage_of(self._log, self._n_written, self._outputs) if self._has_running_usage else None
        return b',"usage":' + orjson.dumps(running)


def _scored_end(out: StrOut) -> StrOut:
    """How a prompt that is only scored ends, whatever token would have come."""
    return msgspec.structs.replace(out, finish_reason=FinishReason.LENGTH, stop_reason=None)


def finish_of(out: StrOut | None, output: ChoiceOutput | None = None) -> Object:
    if out is None or out.finish_reason is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = out.finish_reason.value if output is None else output.finish_reason(out.finish_reason)
    return {"finish_reason": reason, "stop_reason": out.stop_reason}


def usage_of(log: AccessLog, output_tokens: int, outputs: Iterable[ChoiceOutput] | None = None) -> Object:
    usage: Object = {
        "prompt_tokens": log.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": log.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": log.cached_tokens},
    }
    if outputs:
        reasoning_tokens = sum(output.reasoning_tokens for output in outputs)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def _event(value: Object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
