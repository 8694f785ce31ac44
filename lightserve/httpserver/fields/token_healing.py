"""Token healing: a prompt that ends within a word ends with tokens that the whole word would not have.

The last tokens are removed from the prompt, and a grammar makes the output begin with their text, in any tokens. That
text is not shown, since the prompt has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.messages.params import GrammarSpec
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

# How many tokens to remove, the best count first: two as LightLLM, more where those begin inside a character of up to
# four bytes, one where the prompt has no more.
COUNTS = (2, 3, 4, 5, 1)


def healing_error(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"token_healing: only {where}", "token_healing")


async def heal(context: ServerContext, prompt_request: PromptRequest) -> PromptRequest:
    """The same request without the last tokens of its prompt; it may generate as many tokens more."""
    if prompt_request.params.sampling.grammar is not None:
        raise InvalidRequestError("token_healing: does not combine with structured output", "token_healing")
    count = tokens_to_remove(context.tokenizer, prompt_request.prompt_ids)
    if count == 0:
        return prompt_request
    remaining, removed = prompt_request.prompt_ids[:-count], prompt_request.prompt_ids[-count:]
    spec = GrammarSpec("prefix", _bytes(context.tokenizer, removed).decode())
    await context.grammars.check(context.tokenizer, spec)
    params = prompt_request.params.replace(
        max_new_tokens=prompt_request.params.stopping.max_new_tokens + count,
        grammar=spec,
        hidden_chars=len(_shown(context.tokenizer, removed)),
    )
    return replace(prompt_request, prompt_ids=remaining, params=params)


def tokens_to_remove(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> int:
    """How many tokens to remove. At least one token stays, and no special token is removed."""
    return next((count for count in COUNTS if _can_remove(tokenizer, prompt_ids, count)), 0)


def _can_remove(tokenizer: Tokenizer, prompt_ids: Sequence[int], count: int) -> bool:
    removed = prompt_ids[-count:]
    if len(prompt_ids) <= count or not tokenizer.special_ids.isdisjoint(removed):
        return False
    try:
        return bool(_bytes(tokenizer, removed).decode())
    except UnicodeDecodeError:
        return False


def _bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.decoder.token_bytes, ids))


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text that these tokens have at the start of an output."""
    stream = tokenizer.decoder.stream(skip_special_tokens=True, continues_text=True)
    return "".join([*map(stream.push, ids), stream.flush()])
