"""Beam search for HTTP requests: in each step the engine generates one token for every beam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import Generation, PromptRequest
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.step import Token
from lightserve.model_files.tokenizer.decoding import EmptyDecodeStream
from lightserve.text.beam_search import BeamBatch, BeamParams, BeamResult, BeamSearch


async def beam_search_outputs(
    context: ServerContext, prompt_requests: Sequence[PromptRequest], params: BeamParams, log: AccessLog
) -> list[list[StrOut]]:
    """The tokens of the best sequences: of the first prompt, best first, then of the next prompt."""
    prompt_results = await run_beam_search(context, prompt_requests, params, log)
    return [_outs(context, result, prompt_requests[0].params) for results in prompt_results for result in results]


async def run_beam_search(
    context: ServerContext, prompt_requests: Sequence[PromptRequest], params: BeamParams, log: AccessLog
) -> list[list[BeamResult]]:
    """The best sequences of every prompt. Cancelling it aborts the search. It writes one log line."""
    steps = _Steps(context, prompt_requests, params)
    try:
        async with context.manager.generate(steps.prompt_requests(), log.silent_copy()) as generation:
            first = await steps.advance(generation)
            while extended := steps.prompt_requests():
                generation.continue_with(extended)
                await steps.advance(generation)
    except BaseException as error:
        log.close(error)
        raise
    _record(log, first, steps.best())
    log.close(None)
    return steps.best()


class _Steps:
    """The engine requests of each step. All sequences are one group, so that beams always share their prefixes."""

    def __init__(self, context: ServerContext, prompt_requests: Sequence[PromptRequest], params: BeamParams) -> None:
        """Only a prompt that is alone may have images."""
        manager, prompts = context.manager, [prompt_request.prompt_ids for prompt_request in prompt_requests]
        manager.check_ids("stop_token_ids", params.stop_token_ids)
        rooms = [manager.max_new_tokens(len(ids), None) for ids in prompts]
        eos_ids = manager.limits.eos_token_ids
        self._batch = BeamBatch(prompts, [BeamSearch(params, eos_ids, room) for room in rooms])
        self._first = replace(prompt_requests[0], params=self._batch.params, group=manager.new_group())

    def prompt_requests(self) -> list[PromptRequest]:
        """Of the next step; empty when the search is done. After the first step, each has one token and a parent."""
        first = replace(self._first, params=self._batch.params)
        if self._batch.is_at_start:
            return [replace(first, prompt_ids=ids) for ids in self._batch.sequences()]
        return [replace(first, prompt_ids=[token], parent=at) for at, token in self._batch.extensions]

    async def advance(self, generation: Generation) -> list[StrOut]:
        """Wait for the one token of every sequence."""
        outs = {index: out async for arrived in generation for index, out in arrived}
        ordered = [outs[index] for index in range(len(generation.prompt_requests))]
        self._batch.advance([out.token.top_logprobs or [] for out in ordered])
        return ordered

    def best(self) -> list[list[BeamResult]]:
        return self._batch.best()


def _outs(context: ServerContext, result: BeamResult, params: GenerationParams) -> list[StrOut]:
    """A sequence as the detokenizer would send it, with the whole text at the last token."""
    tokenizer = context.optional_tokenizer
    skips_special = params.text.skip_special_tokens and not params.text.shown_special_ids
    stream = EmptyDecodeStream() if tokenizer is None else tokenizer.decoder.stream(skips_special, continues_text=True)
    *ids, last = result.token_ids
    is_end = result.finish_reason is FinishReason.STOP
    shown = ids if is_end and not params.text.include_stop else result.token_ids
    text = "".join([*map(stream.push, shown), stream.flush()])
    stop_reason = last if is_end and last in params.stopping.stop_token_ids else None
    end = StrOut(0, text, Token(last), finish_reason=result.finish_reason, stop_reason=stop_reason)
    return [*(StrOut(0, "", Token(token_id)) for token_id in ids), end]


def _record(log: AccessLog, first: Sequence[StrOut], prompt_results: Sequence[Sequence[BeamResult]]) -> None:
    """Count the tokens of the result. Each prompt was admitted with the first step."""
    for out, results in zip(first, prompt_results, strict=True):
        if out.admission is not None:
            log.record_admission(out.admission, is_first_choice=True)
        for result in results:
            log.generated_tokens += len(result.token_ids)
            log.record_finish(result.finish_reason)
