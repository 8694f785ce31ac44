"""The text of one request while its tokens arrive, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.detokenization.stop import StopMatcher
from lightserve.messages.params import FinishReason, TextParams
from lightserve.model_files.tokenizer.decoding import Decoder, EmptyDecodeStream


class ReqText:
    """Without a decoder (a model without a tokenizer) there is no text."""

    def __init__(self, decoder: Decoder | None, params: TextParams, output_ids: Sequence[int] = ()) -> None:
        """``output_ids`` are tokens whose text the client has already."""
        self._decoder = decoder
        self._shown_special_ids = params.shown_special_ids if params.skip_special_tokens else ()
        self._stream = (
            EmptyDecodeStream()
            if decoder is None
            else decoder.stream(params.skip_special_tokens, params.continues_text)
        )
        self._stop = StopMatcher(params.stop, params.include_stop)
        self._n_hidden = params.hidden_chars  # characters that are still to be hidden
        self._include_stop = params.include_stop  # then an end token stays in the text too
        for token_id in output_ids:
            self.push(token_id, None)

    @property
    def matched_stop(self) -> str | None:
        return self._stop.matched

    def push(self, token_id: int, finish_reason: FinishReason | None, is_text_token: bool = False) -> str:
        """The text that can be returned after this token; with a finish reason, all the rest. Sets ``matched_stop``.

        The last token of a request that stops is an end token, unless ``is_text_token``.
        """
        is_end_token = finish_reason is FinishReason.STOP and not is_text_token
        text = self._stop.push(
            "" if is_end_token and not self._include_stop else self._visible(self._text_of(token_id))
        )
        if finish_reason is not None:
            text += self._stop.push(self._visible(self._stream.flush()))
        return text if finish_reason is None or self.matched_stop is not None else text + self._stop.flush()

    def _visible(self, text: str) -> str:
        n_hidden = min(self._n_hidden, len(text))
        self._n_hidden -= n_hidden
        return text[n_hidden:]

    def _text_of(self, token_id: int) -> str:
        if self._decoder is None or token_id not in self._shown_special_ids:
            return self._stream.push(token_id)
        return self._stream.flush() + self._decoder.token_text(token_id)
