"""Beam search for HTTP requests: the engine is asked for one token of every beam at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.httpserver.beam_search.algorithm import (
    BeamBatch,
    BeamParams,
    BeamResult,
    BeamSearch,
)
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.manager import DEFAULT_SCHEDULING, Ask, Generation
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.io_struct import FinishReason, GenerationParams, SchedulingParams, StrOut, Token
from lightserve.model_files.decoding import NoTextStream


async def beam_answers(
    context: ServerContext, asks: Sequence[Ask], params: BeamParams, log: AccessLog
) -> list[list[StrOut]]:
    """The best answers, each as its tokens: those of the first prompt, the best first, then those of the next."""
    prompts = [ask.prompt_ids for ask in asks]
    found = await beam_search(context, prompts, params, log, asks[0].scheduling)
    return [_rows(context, result, asks[0].params) for results in found for result in results]


async def beam_search(
    context: ServerContext,
    prompts: Sequence[list[int]],
    params: BeamParams,
    log: AccessLog,
    scheduling: SchedulingParams = DEFAULT_SCHEDULING,
) -> list[list[BeamResult]]:
    """The best sequences of every prompt; cancel it to abort. One line of the log, and as output what is returned."""
    steps = _Steps(context, prompts, params, scheduling)
    try:
        async with context.manager.generate(steps.asks(), log.unwritten()) as generation:
            first = await steps.advance(generation)
            while asks := steps.asks():
                generation.ask(asks)
                await steps.advance(generation)
    except BaseException as error:
        log.close(error)
        raise
    _note(log, first, steps.best())
    log.close(None)
    return steps.best()


class _Steps:
    """What to ask the engine for, step by step. All sequences are one group: beams share their prefixes always."""

    def __init__(
        self,
        context: ServerContext,
        prompts: Sequence[list[int]],
        params: BeamParams,
        scheduling: SchedulingParams,
    ) -> None:
        manager = context.manager
        manager.check_ids("stop_token_ids", params.stop_token_ids)
        rooms = [manager.new_tokens(len(ids), None) for ids in prompts]
        eos_ids = manager.limits.eos_token_ids
        self._batch = BeamBatch(prompts, [BeamSearch(params, eos_ids, room) for room in rooms])
        self._scheduling = scheduling
        self._group = manager.new_group()

    def asks(self) -> list[Ask]:
        """Empty when all is done."""
        return [Ask(ids, self._batch.params, self._scheduling, self._group) for ids in self._batch.sequences()]

    async def advance(self, generation: Generation) -> list[StrOut]:
        """Every sequence gets its one token."""
        outs = {index: out async for news in generation for index, out in news}
        ordered = [outs[index] for index in range(len(generation.asks))]
        self._batch.advance([out.token.top_logprobs or [] for out in ordered])
        return ordered

    def best(self) -> list[list[BeamResult]]:
        return self._batch.best()


def _rows(context: ServerContext, result: BeamResult, params: GenerationParams) -> list[StrOut]:
    """An answer as the detokenizer would tell it, in one piece: all text comes with the last token."""
    tokenizer = context.maybe_tokenizer
    skips_special = params.text.skip_special_tokens and not params.text.shown_special_ids
    stream = NoTextStream() if tokenizer is None else tokenizer.decoder.stream(skips_special)
    *ids, last = result.token_ids
    is_end = result.finish_reason is FinishReason.STOP
    shown = ids if is_end and not params.text.include_stop else result.token_ids
    text = "".join([*map(stream.push, shown), stream.flush()])
    stop_reason = last if is_end and last in params.stopping.stop_token_ids else None
    end = StrOut(0, text, Token(last), finish_reason=result.finish_reason, stop_reason=stop_reason)
    return [*(StrOut(0, "", Token(token_id)) for token_id in ids), end]


def _note(log: AccessLog, first: Sequence[StrOut], found: Sequence[Sequence[BeamResult]]) -> None:
    """Each prompt was admitted with the first step."""
    for out, results in zip(first, found, strict=True):
        admission = out.admission
        for result in results:
            for count, token in enumerate(result.token_ids, start=1):
                reason = result.finish_reason if count == len(result.token_ids) else None
                log.note(StrOut(0, "", Token(token), finish_reason=reason, admission=admission), is_first_choice=True)
                admission = None
