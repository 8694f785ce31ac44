"""The text of one request while its tokens arrive, up to the first stop string, which may span several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.output import RequestDrafts
from lightserve.messages.params import FinishReason, TextParams
from lightserve.model_files.tokenizer.decoding import Decoder, EmptyDecodeStream


class StopMatcher:
    """Returns text up to the first stop string. Holds back an end that may be the start of one.

    The stop string that ends first wins; of several, the longest. The result does not depend on where text is split.
    Time and space are linear in the text for each stop string, whatever its length.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.matched: str | None = None
        self._include_stop = include_stop
        self._stops = [_Stop(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._set_lengths([0] * len(stops))

    def push(self, text: str) -> str:
        """The text that can be returned now. Once ``matched`` is set, the rest is dropped."""
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        if not self._n_held and self._first_chars.isdisjoint(text):
            return text
        ends, lengths = self._scan(text)
        if any(ends):
            return self._stop_at(ends, text)
        shown = self._head(self._n_held + len(text) - max(lengths), text)
        self._set_lengths(lengths)
        return shown

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held = self._head(self._n_held, "")
        self._set_lengths([0] * len(self._stops))
        return held

    def _set_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths  # for each stop string: how many of its first characters the text ends with
        self._n_held = max(lengths, default=0)  # characters at the end of the text that were not returned yet

    def _scan(self, text: str) -> tuple[list[int], list[int]]:
        """Where each stop string first ends in ``text`` (0: nowhere), and the new lengths."""
        scanned = [stop.scan(text, length) for stop, length in zip(self._stops, self._lengths, strict=True)]
        return [end for end, _ in scanned], [length for _, length in scanned]

    def _stop_at(self, ends: Sequence[int], text: str) -> str:
        matches = [(end, -len(stop.text), stop.text) for stop, end in zip(self._stops, ends, strict=True) if end]
        end, n_back, self.matched = min(matches)
        shown = self._head(self._n_held + end + (0 if self._include_stop else n_back), text)
        self._set_lengths([0] * len(self._stops))
        return shown

    def _head(self, n_chars: int, text: str) -> str:
        """The first ``n_chars`` of the held text plus ``text``, in time proportional to ``n_chars``."""
        if not self._n_held:
            return text[:n_chars]
        held_in = self._stops[self._lengths.index(self._n_held)].text  # the held text is the start of a stop string
        return held_in[: min(n_chars, self._n_held)] + text[: max(n_chars - self._n_held, 0)]


class _Stop:
    """One stop string with its Knuth-Morris-Pratt table, which grows only as far as a text has matched."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]  # [n]: length of the longest proper prefix of text[:n] that is also its suffix

    def scan(self, text: str, length: int) -> tuple[int, int]:
        """Continue after ``length`` matched characters: where the first match ends (0: nowhere), and the new length."""
        stop = self.text
        if not length and stop[0] not in text:
            return 0, 0
        for end, char in enumerate(text, 1):
            while length and stop[length] != char:
                length = self._border(length)
            if stop[length] == char:
                length += 1
            if length == len(stop):
                return end, 0
        return 0, length

    def _border(self, length: int) -> int:
        stop, borders = self.text, self._borders
        for n in range(len(borders), length + 1):
            border = borders[-1]
            while border and stop[border] != stop[n - 1]:
                border = borders[border]
            borders.append(border + (stop[border] == stop[n - 1]))
        return borders[length]


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
        self.drafts: RequestDrafts | None = None  # None: it had none
        for token_id in output_ids:
            self.push(token_id, None)

    @property
    def matched_stop(self) -> str | None:
        return self._stop.matched

    def count_drafts(self, proposed: int, accepted: int) -> None:
        """Of a step."""
        before = self.drafts or RequestDrafts(0, 0)
        self.drafts = RequestDrafts(before.accepted + accepted, before.rejected + proposed - accepted)

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

    def push_plain(self, token_id: int) -> str:
        """``push`` for a token without a finish reason."""
        text = self._text_of(token_id) if self._shown_special_ids else self._stream.push(token_id)
        return self._stop.push(self._visible(text) if self._n_hidden else text)

    def flush(self) -> str:
        """The text that is still held back, when no token follows."""
        return self._stop.push(self._visible(self._stream.flush())) + self._stop.flush()

    def _visible(self, text: str) -> str:
        n_hidden = min(self._n_hidden, len(text))
        self._n_hidden -= n_hidden
        return text[n_hidden:]

    def _text_of(self, token_id: int) -> str:
        if self._decoder is None or token_id not in self._shown_special_ids:
            return self._stream.push(token_id)
        return self._stream.flush() + self._decoder.token_text(token_id)
