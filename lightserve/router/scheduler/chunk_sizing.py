"""How many prompt tokens a step computes beside the requests that decode in it."""

from __future__ import annotations

from lightserve.router.scheduler.limits import Limits

TOKENS_PER_DECODE = 2  # that a step with prompts has more for every decoding request
# And for every decode beyond MANY_DECODES, whose step is long anyway. Otherwise prompts arrive faster than they are
# computed: of 256 streams with prompts of 1,024 tokens, steps of 1,024 tokens keep 50 waiting, for 2 s each.
MANY_DECODES, TOKENS_PER_DECODE_OF_MANY = 128, 12
FIRST_WAITING = 3  # requests without a first token, each of which makes a step longer by a quarter of a chunk
CHUNKS_PER_WAITING = 1 / 128  # that each further waiting request adds: a long queue needs long steps
MAX_CHUNKS = 4  # beside the tokens for decodes
# A step is shorter if its prompt tokens have between SHORT_CONTEXT and LONG_CONTEXT tokens before them.
SHORT_CONTEXT, LONG_CONTEXT, MAX_SHORTENING = 500, 1_500, 1 / 3


def prompt_tokens(limits: Limits, decodes: int, waiting: int, context: float = 0.0) -> int:
    """Prompt tokens of a step with ``decodes`` decoding requests, while ``waiting`` requests have no first token.

    Without decodes, prompts fill the step. The more requests decode, the longer their step takes anyway, and the more
    prompt tokens it can take without being noticed. ``context``: tokens before a prompt token, on average; they make
    its attention more expensive.
    """
    room = limits.batch_max_tokens - decodes
    if decodes == 0 or limits.chunk_size is None:
        return room
    chunks = min(1 + min(waiting, FIRST_WAITING) / 4 + waiting * CHUNKS_PER_WAITING, MAX_CHUNKS)
    length = min(max(context - SHORT_CONTEXT, 0) / (LONG_CONTEXT - SHORT_CONTEXT), 1)
    for_decodes = TOKENS_PER_DECODE * decodes + TOKENS_PER_DECODE_OF_MANY * max(decodes - MANY_DECODES, 0)
    total = round((chunks * limits.chunk_size + for_decodes) * (1 - MAX_SHORTENING * length))
    if limits.sizes:
        total = min(limits.sizes, key=lambda size: abs(size - total))
    return max(min(room, total - decodes), min(room, 1))
