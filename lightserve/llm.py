"""A model without a server: prompts in, texts out, on the runtime that the server runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightserve.batching import ContinuousBatching, Req
from lightserve.common.tp import TpGroup
from lightserve.config import WorkerConfig
from lightserve.detokenization.decode import TextStream
from lightserve.detokenization.stop import StopMatcher
from lightserve.errors import InvalidRequestError, PromptTooLongError, ServerError
from lightserve.io_struct import FinishReason, SamplingParams, TokenOut
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer import load_tokenizer
from lightserve.router.model_infer.worker import ModelWorker

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class StreamOut:
    """One token of one prompt. The texts of a prompt's tokens add up to its whole text."""

    index: int  # of the prompt
    token_id: int
    logprob: float | None  # where asked for
    text: str
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Generation:
    """What became of one prompt."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class LLM:
    """``LLM()`` is the default model; options are the fields of WorkerConfig."""

    def __init__(self, model_dir: str | None = None, **options: Any) -> None:
        self.config = WorkerConfig(model_dir=model_dir, **options)
        if self.config.tp != 1:
            raise ServerError("LLM runs a single rank; tp > 1 needs the server")
        source = resolve(model_dir, needs_weights=self.config.load_format == "auto")
        self.tokenizer = load_tokenizer(source)
        self.eos_token_ids = source.eos_token_ids()
        self.worker = ModelWorker(self.config, source, TpGroup())
        self._ids = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Complete every prompt, text or token ids; one set of parameters for all or one each."""
        requests = self._requests(prompts, params)
        generations = [Generation(req.prompt_ids) for req in requests]
        for out in self._run(requests):
            generation = generations[out.index]
            generation.text += out.text
            generation.token_ids.append(out.token_id)
            if out.logprob is not None:
                generation.logprobs.append(out.logprob)
            generation.finish_reason = out.finish_reason
        return generations

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamOut]:
        """The same, token by token as they come; prompts take turns."""
        return self._run(self._requests(prompts, params))

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Iterator[StreamOut]:
        """Answer a conversation, token by token."""
        prompt = self.tokenizer.apply_chat_template(messages)
        return self.stream([self.tokenizer.encode(prompt, add_special_tokens=False)], params)

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Req]:
        many = [prompts] if _is_one(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts but {len(params)} sets of parameters")
        return [self._request(prompt, sampling) for prompt, sampling in zip(many, params, strict=True)]

    def _request(self, prompt: Any, sampling: SamplingParams) -> Req:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        longest = min(self.worker.max_req_total_len, self.worker.max_total_token_num)
        vocab_size = self.worker.model_config.vocab_size
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        if not all(0 <= token < vocab_size for token in ids):
            raise InvalidRequestError(f"a prompt's token ids must lie in 0..{vocab_size - 1}")
        if len(ids) >= longest:
            raise PromptTooLongError(len(ids), longest - 1)
        max_new_tokens = min(sampling.max_new_tokens, longest - len(ids))
        return Req(next(self._ids), ids, sampling, max_new_tokens, self.eos_token_ids)

    def _run(self, requests: Sequence[Req]) -> Iterator[StreamOut]:
        batching = ContinuousBatching(
            self.worker.max_total_token_num, self.config.running_max_req_size, self.config.batch_max_tokens
        )
        texts = {req.req_id: _Text(self, i, req) for i, req in enumerate(requests)}
        for req in requests:
            batching.add(req)
        try:
            while step := batching.next_step():
                outs = self.worker.run(step)
                for req, out in zip(batching.take(outs), outs, strict=True):
                    yield texts[req.req_id].push(out)
                    if req.finish_reason is not None:
                        batching.release(req)
        finally:  # the caller may leave in the middle
            if step := batching.abort_all():
                self.worker.run(step)


class _Text:
    """The text of one request as its tokens come; a stop string ends the request."""

    def __init__(self, llm: LLM, index: int, req: Req) -> None:
        decode = partial(llm.tokenizer.decode, skip_special_tokens=req.sampling.skip_special_tokens)
        self._index = index
        self._req = req
        self._stream = TextStream(decode)
        self._stop = StopMatcher(req.sampling.stop)

    def push(self, out: TokenOut) -> StreamOut:
        text = self._stop.push(self._stream.push(out.token_id))
        if self._req.finish_reason is not None:
            text += self._stop.push(self._stream.flush())
        if self._stop.matched is not None:
            self._req.finish_reason = FinishReason.STOP
        elif self._req.finish_reason is not None:
            text += self._stop.flush()
        return StreamOut(self._index, out.token_id, out.logprob, text, self._req.finish_reason)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
