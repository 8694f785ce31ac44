"""Ends the thinking of a request after a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightserve.messages.params import ThinkingLimit


class ThinkingBudget:
    """Forces the tag that ends the thinking of one request, one token at a time.

    The forced tokens depend on the output alone, so a preemption changes nothing. Before the limit, and after the
    thinking has ended, the output need not be known.
    """

    def __init__(self, limit: ThinkingLimit, token_bytes: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._token_bytes = token_bytes
        self._begin, self._end = limit.begin.encode(), limit.end.encode()
        self._is_over = False  # no token is forced any more

    def may_force(self, output_len: int) -> bool:
        """Whether ``forced_after`` may return a token for an output of this length."""
        return output_len >= self._limit.max_tokens and not self._is_over

    def forced_after(self, output: Sequence[int]) -> int | None:
        """The token that must follow. None: any token."""
        start = 0 if self._limit.is_begun else self._start(output)
        if start is None:
            return None
        thoughts = output[start : start + self._limit.max_tokens]
        n_forced = len(output) - start - self._limit.max_tokens
        if n_forced < 0:
            return None
        if n_forced >= len(self._limit.end_ids) or self._end in self._text(thoughts):
            self._is_over = True
            return None
        return self._limit.end_ids[n_forced]

    def forced_if(self, output: Sequence[int]) -> int | None:
        """As ``forced_after``, if the output were so. The last tokens are drafts."""
        was_over = self._is_over
        token_id = self.forced_after(output)
        self._is_over = was_over
        return token_id

    def _start(self, output: Sequence[int]) -> int | None:
        """The number of tokens up to the end of the first tag. None: it has not come (yet)."""
        text = b""
        for count, token_id in enumerate(output, start=1):
            text = (text + self._token_bytes(token_id)).lstrip()
            if text.startswith(self._begin):
                return count
            if not self._begin.startswith(text):
                self._is_over = True  # it does not think
                return None
        return None

    def _text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self._token_bytes, token_ids))
