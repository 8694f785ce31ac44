"""``add_bos_token`` and ``add_eos_token`` of folders that were made for transformers 4.

There, some classes replaced the post-processor of ``tokenizer.json`` by one that follows these flags. Such folders may
have a ``tokenizer.json`` that adds no token (DeepSeek), or no EOS (embedders that pool the last token).
transformers 5 ignores the flags, and saves a ``tokenizer.json`` that needs none.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from lightserve.model_files.tokenizer.files.settings import CONFIG, TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens, set_surrounding_tokens

CLASSES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"})
SAVED_BY_5 = "backend"  # a field of tokenizer_config.json


def follow_flags(backend: tokenizers.Tokenizer, special: SpecialTokens, folder: Path, config: dict[str, object]) -> str:
    """Make ``backend`` add the tokens of the flags. A line for the log if that changes anything, else ""."""
    settings = TokenizerSettings(folder, config)
    if settings.class_name not in CLASSES or SAVED_BY_5 in config:
        return ""
    ids: list[int] = backend.encode("").ids
    before = _token(backend, special.bos, settings.flag("add_bos_token", _is_at(backend, special.bos, ids[:1])))
    after = _token(backend, special.eos, settings.flag("add_eos_token", _is_at(backend, special.eos, ids[-1:])))
    if [backend.token_to_id(token) for token in (*before, *after)] == ids:
        return ""
    set_surrounding_tokens(backend, before, after)
    return (
        f"{folder / CONFIG}: a text is encoded as {' '.join([*before, 'text', *after])}, by add_bos_token and "
        f"add_eos_token of a {config['tokenizer_class']}; tokenizer.json alone, as transformers 5 reads it, differs"
    )


def _is_at(backend: tokenizers.Tokenizer, token: str | None, ids: list[int]) -> bool:
    return token is not None and ids == [backend.token_to_id(token)]


def _token(backend: tokenizers.Tokenizer, token: str | None, is_wanted: bool) -> list[str]:
    return [token] if is_wanted and token is not None and backend.token_to_id(token) is not None else []
