"""How much a step may take: of requests, of tokens, and of prompts beside requests that decode."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.io_struct import StepLimits

TOKENS_PER_DECODE = 2  # that a step with prompts has more for every request that decodes in it
# And for every one beyond so many, whose own step is long anyhow. Else prompts come in more slowly than requests end:
# of 256 streams with prompts of 1,024 tokens, steps of 1,024 keep 50 waiting for good, for 2 s each.
MANY_DECODES, TOKENS_PER_DECODE_OF_MANY = 128, 12
FIRST_WAITING = 3  # requests without a first token, each of which makes a step longer by a quarter of a chunk
CHUNK_PER_WAITING = 1 / 128  # that it has more for each of them: a long queue wants long steps
MOST_CHUNKS = 4  # that it has beside those of decodes
# Tokens before those of a prompt, from which on a step is shorter, and by how much in the end.
SHORT_CONTEXT, LONG_CONTEXT, MOST_SHORTER = 500, 1_500, 1 / 3


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    batch_max_tokens: int  # tokens of a step
    chunk_size: int | None  # prompt tokens of a step in which others decode: see prompt_tokens; None: whole prompts
    sizes: tuple[int, ...] = ()  # tokens of a step with prompts that the device computes well; none: any number
    token_ratio: float = 0.0  # share of the pool up to which outputs are guessed; beyond it all they may make counts

    def prompt_tokens(self, decodes: int, waiting: int, context: float = 0.0) -> int:
        """That a step may take beside ``decodes`` requests, which wait for it; ``waiting`` wait for their first token.

        Where none decodes, as many as the step holds. The more decode, the longer their own step takes, and the more it
        may be stretched without being felt: a busy server then spends its steps well. ``context``: what is before a
        token of a prompt on average, which makes it cost more.
        """
        room = self.batch_max_tokens - decodes
        if decodes == 0 or self.chunk_size is None:
            return room
        chunks = min(1 + min(waiting, FIRST_WAITING) / 4 + waiting * CHUNK_PER_WAITING, MOST_CHUNKS)
        length = min(max(context - SHORT_CONTEXT, 0) / (LONG_CONTEXT - SHORT_CONTEXT), 1)
        for_decodes = TOKENS_PER_DECODE * decodes + TOKENS_PER_DECODE_OF_MANY * max(decodes - MANY_DECODES, 0)
        total = round((chunks * self.chunk_size + for_decodes) * (1 - MOST_SHORTER * length))
        if self.sizes:
            total = min(self.sizes, key=lambda size: abs(size - total))
        return max(min(room, total - decodes), min(room, 1))


def limits_of(worker: WorkerConfig, router: RouterConfig, device: StepLimits) -> Limits:
    """What the operator said, else what suits the device."""
    batch_max_tokens = worker.batch_max_tokens or device.batch_max_tokens
    chunk_size = router.chunked_prefill_size or device.chunked_prefill_size or batch_max_tokens
    return Limits(
        max_running=worker.running_max_req_size,
        batch_max_tokens=batch_max_tokens,
        chunk_size=None if router.disable_chunked_prefill else min(chunk_size, batch_max_tokens),
        sizes=device.sizes,
        token_ratio=router.router_token_ratio,
    )
