"""The text of one request as its tokens come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.detokenization.stop import StopMatcher
from lightserve.io_struct import FinishReason
from lightserve.model_files.decoding import Decoder, NoTextStream


class ReqText:
    """Without a decoder, for a model that has no tokenizer, there is no text."""

    def __init__(
        self, decoder: Decoder | None, stop: Sequence[str], *, include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self._stream = NoTextStream() if decoder is None else decoder.stream(skip_special_tokens)
        self._stop = StopMatcher(stop, include_stop)
        self._include_stop = include_stop  # an end token stays in the text too

    @property
    def matched_stop(self) -> str | None:
        return self._stop.matched

    def push(self, token_id: int, finish_reason: FinishReason | None) -> str:
        """The text that may be shown after this token; with a finish reason, all the rest. See ``matched_stop``."""
        is_end_token = finish_reason is FinishReason.STOP
        text = self._stop.push("" if is_end_token and not self._include_stop else self._stream.push(token_id))
        if finish_reason is not None or self._stop.would_match(self._stream.ahead):
            text += self._stop.push(self._stream.flush())
        return text if finish_reason is None or self.matched_stop is not None else text + self._stop.flush()
