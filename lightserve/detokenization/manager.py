"""The detokenizer's loop: receives the tokens of a step and sends their text to the HTTP processes."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.detokenization.req_text import ReqText
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.output import (
    BatchStrOut,
    BatchTokenIdOut,
    EmbeddingOut,
    EndedOut,
    QueryReply,
    StrOut,
    ToDetokenization,
    ToHttpserver,
    TokenIdOut,
)
from lightserve.messages.params import FinishReason
from lightserve.messages.request import AbortReq, ToRouter, http_process_of
from lightserve.messages.step import DraftColumns, ReqFailed, Token, TokenColumns
from lightserve.model_files.tokenizer.decoding import Decoder


class DetokenizationManager:
    def __init__(
        self,
        decoder: Decoder | None,
        inbox: Receiver[ToDetokenization],
        to_router: Sender[ToRouter],
        to_http: Sequence[Sender[ToHttpserver]],
    ) -> None:
        self._decoder = decoder
        self._inbox = inbox
        self._to_router = to_router
        self._to_http = to_http
        self._texts: dict[int, ReqText] = {}

    @property
    def num_open(self) -> int:
        return len(self._texts)

    async def run(self) -> None:
        while True:
            message = await self._inbox.recv()
            if isinstance(message, BatchTokenIdOut):
                self._handle(message)
            elif isinstance(message, QueryReply):
                self._to_http[self._index_of(message.query_id)].send(message)
            else:  # a heartbeat for every HTTP process; it passes through here to prove that this process runs too
                for sender in self._to_http:
                    sender.send(message)

    def _handle(self, batch: BatchTokenIdOut) -> None:
        for req in batch.new:
            self._texts[req.req_id] = ReqText(self._decoder, req.text, req.output_ids)
        outs: list[list[StrOut]] = [[] for _ in self._to_http]
        failed: list[list[ReqFailed]] = [[] for _ in self._to_http]
        self._count_drafts(batch.drafts)
        self._add_plain(batch.plain, outs)
        for out in batch.outs:
            text = self._texts.get(out.req_id)
            if text is not None:  # otherwise a stop string ended the request while this token was in flight
                piece = text.push(out.token.id, out.finish_reason, out.is_text_token)
                outs[self._index_of(out.req_id)].append(self._str_out(text, out, piece))
        embeddings: list[list[EmbeddingOut]] = [[] for _ in self._to_http]
        for embedding in batch.embeddings:
            self._texts.pop(embedding.req_id, None)  # a dispatcher announces requests without knowing the model
            embeddings[self._index_of(embedding.req_id)].append(embedding)
        for failure in batch.failed:
            self._texts.pop(failure.req_id, None)
            failed[self._index_of(failure.req_id)].append(failure)
        for req_id in batch.aborted:
            self._texts.pop(req_id, None)
        for sender, own_outs, own_failed, own_embeddings in zip(self._to_http, outs, failed, embeddings, strict=True):
            if own_outs or own_failed or own_embeddings:
                sender.send(BatchStrOut(own_outs, own_failed, own_embeddings))
        self._end(batch.ended)

    def _add_plain(self, plain: TokenColumns, outs: list[list[StrOut]]) -> None:
        """Nearly all tokens: few calls for each."""
        for req_id, token_id in plain.pairs():
            text = self._texts.get(req_id)
            if text is None:
                continue
            piece = text.push_plain(token_id)
            if text.matched_stop is None:
                out = StrOut(req_id, piece, Token(token_id))
            else:
                out = self._str_out(text, TokenIdOut(req_id, Token(token_id)), piece)
            outs[self._index_of(req_id)].append(out)

    def _end(self, req_ids: Sequence[int]) -> None:
        """These requests were aborted. Their clients get the text that was held back."""
        for req_id in req_ids:
            text = self._texts.pop(req_id, None)
            if text is not None:  # otherwise it has ended before
                self._to_http[self._index_of(req_id)].send(BatchStrOut(ended=[EndedOut(req_id, text.flush())]))

    def _count_drafts(self, drafts: DraftColumns) -> None:
        for req_id, proposed, accepted in drafts.rows():
            if (text := self._texts.get(req_id)) is not None:
                text.count_drafts(proposed, accepted)

    def _index_of(self, req_id: int) -> int:
        """The HTTP process that sent the request, or the one that has replaced it: see ChildConfig.http_process."""
        return http_process_of(req_id) % len(self._to_http)

    def _str_out(self, text: ReqText, out: TokenIdOut, piece: str) -> StrOut:
        finish_reason: FinishReason | None = out.finish_reason
        stop_reason: int | str | None = out.stop_reason
        if text.matched_stop is not None:
            if finish_reason is None:
                self._to_router.send(AbortReq(out.req_id, FinishReason.STOP))
            finish_reason, stop_reason = FinishReason.STOP, text.matched_stop
        if finish_reason is not None:
            del self._texts[out.req_id]
        return StrOut(
            out.req_id,
            piece,
            out.token,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            admission=out.admission,
            drafts=None if finish_reason is None else text.drafts,
        )
