"""A small model that drafts for a larger one: it must have the same tokens under the same ids."""

from __future__ import annotations

from lightserve.errors import OptionError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource, require_weights, resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer_or_none


def draft_model_path(name: str | None, source: ModelSource, target: ModelConfig, needs_weights: bool) -> str:
    """Where its files are. Raises an OptionError if its vocabulary is not that of the model, ``target``."""
    files = resolve(name, needs_weights=False)
    tokenizers = load_tokenizer_or_none(source), load_tokenizer_or_none(files)
    if tokenizers[0] is not None and tokenizers[1] is not None:
        differing = tokenizers[0].differing_token(tokenizers[1])
        if differing is not None:
            raise _error(f"the token {differing!r} has another id in the draft model {files.path}")
    elif files.hf_config().get("vocab_size") != target.vocab_size:
        sizes = f"{files.hf_config().get('vocab_size')} tokens, and that of the model {target.vocab_size}"
        raise _error(f"the vocabulary of the draft model {files.path} has {sizes}")
    if needs_weights:
        require_weights(files)
    return str(files.path)


def _error(problem: str) -> OptionError:
    return OptionError(f"speculative_config: {problem}; use a draft model with the vocabulary of the model")
