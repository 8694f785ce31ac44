"""How many tokens of background requests, such as lines of batches, a step computes while clients use the server.

While the prompt of a client's request is computed, steps leave background requests out: see StepPlanner. What remains
is the step in flight when the client's request arrives. It should be short, compared with the time to the first token.
How many tokens that allows is learned from the steps that have ended, so it holds for every device and model.

Even the shortest step may be long: a GPU that computes a chat's prompt in two steps' time. So there are pauses after
steps that had background requests only. Over time, clients wait for a twentieth of the time to the first token.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

CLIENT_S = 60.0  # after the last request of a client, another one may still come: a person reads the answer
SHARE_OF_TTFT = 0.1  # what a step may take. A request arrives in the middle of one on average, and waits for half of it
MIN_SHARE_OF_TIME = 0.05  # that background requests get in any case, so that they end
# A step that takes a little longer than the shortest one is not worth shortening: it reads the weights in any case. On
# a GPU that includes a chunk of a prompt: at 1.25 a batch beside chats had steps of one token on an H200.
SHARE_OF_SHORTEST = 1.5
MAX_RECENT = 16  # times to first tokens that count: their median
FIRST_TOKENS = 16
NEIGHBOURS = 3  # steps whose median counts as one: the results of two may be seen at once
GROWTH, MAX_SHRINKING = 1.1, 0.5  # of the tokens, after one step


class BackgroundLimit:
    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: of any step."""
        self._max_tokens = max_tokens
        self._tokens = float(min(FIRST_TOKENS, max_tokens))
        self._ttfts_s: deque[float] = deque(maxlen=MAX_RECENT)
        self._ttft_s = math.inf
        self._last_s: deque[float] = deque(maxlen=NEIGHBOURS)
        self._shortest_s = math.inf  # of those that had few background tokens for the sake of clients
        self._is_limited = False  # the step that was planned last
        self._client_until_s = -math.inf
        self.pause_s = 0.0  # after the last step, if it and the next one have background requests only

    def on_client(self, now_s: float) -> None:
        """A request of a client waits or runs."""
        self._client_until_s = now_s + CLIENT_S

    def tokens(self, now_s: float) -> int | None:
        """Of the next step; None: as many as it has room for, because no client is there."""
        self._is_limited = now_s < self._client_until_s
        return int(self._tokens) if self._is_limited else None

    def on_first_token(self, seconds: float) -> None:
        """A client's request got it so long after its admission."""
        self._ttfts_s.append(seconds)
        self._ttft_s = statistics.median(self._ttfts_s)

    def on_step(self, background_tokens: int, seconds: float) -> None:
        """A step with so many of them has ended.

        Only one such step is in flight at a time, so it takes longer than those of clients: launching it counts, too.
        """
        self.pause_s = self._pause_after(seconds) if background_tokens else 0.0
        if not background_tokens or not self._is_limited:
            return
        self._last_s.append(seconds)
        self._shortest_s = min(self._shortest_s, sorted(self._last_s)[len(self._last_s) // 2])
        longest_s = max(SHARE_OF_SHORTEST * self._shortest_s, SHARE_OF_TTFT * self._ttft_s)
        if math.isinf(longest_s):
            return
        if seconds > longest_s:
            shrunk = min(self._tokens, background_tokens) * max(longest_s / seconds, MAX_SHRINKING)
            self._tokens = max(shrunk, 1.0)
        elif background_tokens >= int(self._tokens):
            self._tokens = min(self._tokens * GROWTH + 1, float(self._max_tokens))

    def _pause_after(self, step_s: float) -> float:
        """A step that is n times as long as it may be runs for an nth of the time.

        Then n times fewer clients arrive in it, and wait n times as long.
        """
        excess = step_s / (SHARE_OF_TTFT * self._ttft_s)
        return step_s * min(max(excess - 1, 0.0), 1 / MIN_SHARE_OF_TIME - 1)
