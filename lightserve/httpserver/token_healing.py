"""Token healing: a prompt that ends within a word ends with tokens that the word does not have.

They are taken back, and the answer must begin with their text, in whatever tokens the model likes best. That text is
not shown, since it is in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.manager import Ask
from lightserve.io_struct import GrammarSpec
from lightserve.model_files.tokenizer import Tokenizer

# How many tokens, the best first: two as LightLLM, more where these begin inside a character of up to four bytes, or
# one where the prompt has no more.
COUNTS = (2, 3, 4, 5, 1)


def not_healed(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"token_healing: only {where}", "token_healing")


async def heal(context: ServerContext, ask: Ask) -> Ask:
    """The same for a prompt without its last tokens; as many more may be generated."""
    if ask.params.sampling.grammar is not None:
        raise InvalidRequestError("token_healing: does not combine with structured output", "token_healing")
    count = count_to_take_back(context.tokenizer, ask.prompt_ids)
    if count == 0:
        return ask
    kept, taken = ask.prompt_ids[:-count], ask.prompt_ids[-count:]
    spec = GrammarSpec("prefix", _bytes(context.tokenizer, taken).decode())
    await context.grammars.check(context.tokenizer, spec)
    params = ask.params.replace(
        max_new_tokens=ask.params.stopping.max_new_tokens + count,
        grammar=spec,
        hidden_chars=len(_shown(context.tokenizer, taken)),
    )
    return replace(ask, prompt_ids=kept, params=params)


def count_to_take_back(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> int:
    """At least one token stays, and no special one goes; 0 where that leaves none."""
    return next((count for count in COUNTS if _can_take_back(tokenizer, prompt_ids, count)), 0)


def _can_take_back(tokenizer: Tokenizer, prompt_ids: Sequence[int], count: int) -> bool:
    taken = prompt_ids[-count:]
    if len(prompt_ids) <= count or not tokenizer.special_ids.isdisjoint(taken):
        return False
    try:
        return bool(_bytes(tokenizer, taken).decode())
    except UnicodeDecodeError:
        return False


def _bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.decoder.token_bytes, ids))


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What an answer shows that begins with these tokens: some tokenizers leave out its first space."""
    stream = tokenizer.decoder.stream(skip_special_tokens=True)
    return "".join([*map(stream.push, ids), stream.flush()])
