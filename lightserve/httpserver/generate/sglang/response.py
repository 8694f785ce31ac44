"""Responses and streams in SGLang's format. An event of a stream has all of its sequence so far, as there."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.sglang.request import SglangBody, SglangRequest, prompt_lengths, sglang_request
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject, json_response, validate
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.sse import EventStream, EventWriter, GenerationEvents, Outs, until_disconnect
from lightserve.httpserver.routed_experts import RoutedExperts
from lightserve.httpserver.weight_versions import WeightVersions
from lightserve.messages.control import RoutedExpertsShape
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import PromptLogprobs
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.logprobs import finite_logprob, unpack_prompt_logprobs

DONE = b"data: [DONE]\n\n"
ABORTED = "Aborted by the server or its trainer"
ABORTED_BEFORE_PREFILL = "Abort before prefill"  # trainers look for it


async def sglang_response(
    context: ServerContext, request: Request, log: AccessLog, value: dict[str, Any], streams: bool | None
) -> Response:
    body = validate(SglangBody, value)
    context.check_fields(request, body)
    parsed = await sglang_request(context, body)
    if body.rid is not None:
        log.response_id = body.rid
    log.prompt_tokens = prompt_lengths(parsed.prompt_requests)
    generation = context.manager.generate(parsed.prompt_requests, log, parsed.n)
    generation.returns_aborted = True
    writer = SglangWriter(parsed, log, context.optional_tokenizer, body.rid or log.request_id, generation.versions)
    writer.shape = context.manager.limits.routed_experts
    if bool(body.stream) if streams is None else streams:
        return await EventStream.open(request, GenerationEvents(generation, writer, log.request_id))
    choices = await until_disconnect(request, generation.collect())
    for index, outs in enumerate(choices):
        for out in outs:
            writer.sequences[index].add(out)
    return await asyncio.to_thread(writer.whole) if writer.has_many_experts else writer.whole()


class Sequence:
    """What one sequence has so far."""

    def __init__(self) -> None:
        self.text = ""
        self.outs: list[StrOut] = []  # its tokens
        self.end: StrOut | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.cached_tokens = 0
        self.experts = RoutedExperts()

    def add(self, out: StrOut) -> None:
        self.text += out.text
        self.prompt_logprobs = self.prompt_logprobs or out.token.prompt_logprobs
        self.experts.add(out.token)
        if out.admission is not None:
            self.cached_tokens = out.admission.cached_tokens
        if out.has_token:
            self.outs.append(out)
        if out.finish_reason is not None:
            self.end = out


class SglangWriter(EventWriter):
    def __init__(
        self,
        parsed: SglangRequest,
        log: AccessLog,
        tokenizer: Tokenizer | None,
        request_id: str,
        versions: WeightVersions,
    ) -> None:
        self._versions = versions
        self._parsed = parsed
        self._log = log
        self._tokenizer = tokenizer
        self._request_id = request_id
        self.shape: RoutedExpertsShape | None = None  # of chosen experts, if they are kept
        self.sequences = [Sequence() for _ in range(len(parsed.prompt_requests) * parsed.n)]

    @property
    def has_many_experts(self) -> bool:
        return self._parsed.experts_start is not None and any(of.experts.are_many for of in self.sequences)

    def is_slow(self, outs: Outs) -> bool:
        return self.has_many_experts and any(out.finish_reason is not None for _, out in outs)

    def whole(self) -> Response:
        responses = [self.sequence_json(index) for index in range(len(self.sequences))]
        return json_response(responses if self._parsed.is_list else responses[0])

    def write(self, outs: Outs) -> bytes:
        """An event for each sequence that has new tokens: of several at once, the last says it all."""
        for index, out in outs:
            self.sequences[index].add(out)
        return b"".join(self._event(index) for index in dict.fromkeys(index for index, _ in outs))

    def end(self) -> bytes:
        return DONE

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(error_object(error, request_id)) + DONE

    def _event(self, index: int) -> bytes:
        index_field = {"index": index} if self._parsed.is_list else {}
        return b"data: %b\n\n" % orjson.dumps(self.sequence_json(index) | index_field)

    def sequence_json(self, index: int) -> JsonObject:
        sequence, parsed = self.sequences[index], self._parsed
        outs = [] if parsed.is_prompt_only else sequence.outs
        prompt_ids = parsed.prompt_requests[index // parsed.n].prompt_ids
        several = len(self.sequences) > 1
        meta: JsonObject = {
            "id": f"{self._request_id}-{index}" if several else self._request_id,
            "finish_reason": self._finish_reason(sequence),
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(outs),
            "cached_tokens": sequence.cached_tokens,
            "weight_version": self._versions.last(index),
            "e2e_latency": round(time.monotonic() - self._log.arrived_s, 6),
        }
        if parsed.has_logprobs and (sequence.outs or sequence.end is None):
            meta |= self._logprobs(sequence, outs, prompt_ids)
        if parsed.experts_start is not None and self.shape is not None and sequence.end is not None:
            tokens = len(prompt_ids) + len(outs) - 1
            meta["routed_experts"] = sequence.experts.for_sglang(self.shape, parsed.experts_start, tokens)
        text = "" if parsed.is_prompt_only else sequence.text
        return {"text": text, "output_ids": [out.token.id for out in outs], "meta_info": meta}

    def _finish_reason(self, sequence: Sequence) -> JsonObject | None:
        end = sequence.end
        if end is None:
            return None
        if end.finish_reason is FinishReason.ABORT:
            message = ABORTED if sequence.outs else f"{ABORTED_BEFORE_PREFILL}. {ABORTED}"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if end.finish_reason is FinishReason.LENGTH or self._parsed.is_prompt_only:
            return {"type": "length", "length": 0 if self._parsed.is_prompt_only else len(sequence.outs)}
        return {"type": "stop", "matched": end.token.id if end.stop_reason is None else end.stop_reason}

    def _logprobs(self, sequence: Sequence, outs: list[StrOut], prompt_ids: list[int]) -> JsonObject:
        parsed = self._parsed
        fields: JsonObject = {"output_token_logprobs": [self._entry(out.token.logprob, out.token.id) for out in outs]}
        if parsed.top_logprobs:
            fields["output_top_logprobs"] = [self._top(out.token.top_logprobs or ()) for out in outs]
        if parsed.prompt_start is None:
            return fields | {"input_token_logprobs": []}
        prompt = unpack_prompt_logprobs(prompt_ids, sequence.prompt_logprobs)[parsed.prompt_start :]
        fields["input_token_logprobs"] = [self._entry(token.logprob, token.token_id) for token in prompt]
        if parsed.top_logprobs:
            fields["input_top_logprobs"] = [self._top(token.top[: parsed.top_logprobs]) or None for token in prompt]
        return fields

    def _top(self, top: Any) -> list[list[Any]]:
        return [self._entry(logprob, token_id) for token_id, logprob in top]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        shown = self._tokenizer is not None and self._parsed.shows_text
        text = self._tokenizer.decoder.token_text(token_id) if shown and self._tokenizer is not None else None
        return [finite_logprob(logprob), token_id, text]
