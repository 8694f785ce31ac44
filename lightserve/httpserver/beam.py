"""Beam search for HTTP requests: the engine is asked for one token of every beam at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.beam_search import BeamBatch, BeamParams, BeamResult, BeamSearch
from lightserve.httpserver.access_log import AccessLog
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.manager import Ask, Generation
from lightserve.io_struct import StrOut


async def beam_search(
    context: ServerContext, prompts: Sequence[list[int]], params: BeamParams, log: AccessLog
) -> list[list[BeamResult]]:
    """The best sequences of every prompt; cancel it to abort. One line of the log, and as output what is returned."""
    room = [context.manager.new_tokens(len(ids), None) for ids in prompts]
    context.manager.check_ids("stop_token_ids", params.stop_token_ids)
    eos_ids = context.manager.limits.eos_token_ids
    batch = BeamBatch(prompts, [BeamSearch(params, eos_ids, tokens) for tokens in room])
    try:
        async with context.manager.generate(_asks(batch), log.unwritten()) as generation:
            first = await _step(batch, generation)
            while asks := _asks(batch):
                generation.ask(asks)
                await _step(batch, generation)
    except BaseException as error:
        log.close(error)
        raise
    _note(log, first, batch.best())
    log.close(None)
    return batch.best()


def _asks(batch: BeamBatch) -> list[Ask]:
    return [Ask(ids, batch.sampling) for ids in batch.sequences()]


async def _step(batch: BeamBatch, generation: Generation) -> list[StrOut]:
    """Every sequence gets its one token."""
    outs = {index: out async for news in generation for index, out in news}
    ordered = [outs[index] for index in range(len(generation.asks))]
    batch.advance([out.top or [] for out in ordered])
    return ordered


def _note(log: AccessLog, first: Sequence[StrOut], found: Sequence[Sequence[BeamResult]]) -> None:
    """Each prompt was admitted with the first step."""
    for out, results in zip(first, found, strict=True):
        admission = out.admission
        for result in results:
            for count, token in enumerate(result.token_ids, start=1):
                reason = result.finish_reason if count == len(result.token_ids) else None
                log.note(StrOut(0, "", token, finish_reason=reason, admission=admission), is_first_choice=True)
                admission = None
