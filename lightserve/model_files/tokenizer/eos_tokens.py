"""The tokens that end a response, from all files of a model that name some.

transformers stops at the ids of generation_config.json only, SGLang and vLLM also at the tokenizer's ``eos_token``,
llama.cpp at every token with one of the known texts. Models whose files disagree mean all of them: a chat model often
ends its turns with another token than the base model that its config.json comes from.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json, read_json_if_exists
from lightserve.model_files.gguf.header import CONTROL, USER_DEFINED, GgufHeader
from lightserve.model_files.tokenizer.folder_tokenizer import end_ids_without_json, has_vocabulary
from lightserve.model_files.tokenizer.special_tokens import special_token_texts

# by which llama.cpp recognises end tokens; a GGUF file may name only one of several
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "</s>",
        "<eos>",
    }
)
# a vocabulary with one of these pairs ends messages with <|end|> and turns with another token
_ENDS_MESSAGES_ONLY = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


def eos_tokens_of_folder(folder: Path) -> tuple[int, ...]:
    ids = _eos_ids(folder / "config.json") | _eos_ids(folder / "generation_config.json")
    return tuple(sorted(ids | _tokenizer_eos_ids(folder)))


def eos_tokens_of_gguf(header: GgufHeader) -> tuple[int, ...]:
    named = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {token_id for token_id in named if token_id is not None}
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    types = header.metadata.get("tokenizer.ggml.token_type") or [CONTROL] * len(tokens)
    end_ids = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in END_TEXTS and kind in (CONTROL, USER_DEFINED)  # in ordinary text, a model may write "</s>"
    }
    if any(pair <= end_ids.keys() for pair in _ENDS_MESSAGES_ONLY):
        end_ids.pop("<|end|>", None)
    return tuple(sorted(ids | set(end_ids.values())))


def _eos_ids(path: Path) -> set[int]:
    """The ``eos_token_id`` of a config: it may be missing, null, one id or a list."""
    value = read_json_if_exists(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        text = reprlib.repr(value)
        raise ModelFilesError(f"{path}: eos_token_id is {text}, not an integer or a list of integers; correct it")
    return {token_id for token_id in ids if token_id >= 0}  # -1 means none


def _tokenizer_eos_ids(folder: Path) -> set[int]:
    """The id of the tokenizer's ``eos_token``, without loading the tokenizer."""
    text = special_token_texts(folder).eos
    path = folder / "tokenizer.json"
    added = read_json_if_exists(folder / "tokenizer_config.json").get("added_tokens_decoder")
    token_id = None if text is None else _id_in_added_tokens(added, text)
    if not path.is_file():
        ids = end_ids_without_json(folder) if has_vocabulary(folder) else set()
        return ids if token_id is None else ids | {token_id}
    if token_id is None and text is not None:
        token_id = _id_in_tokenizer(read_json(path), text)
    return set() if token_id is None else {token_id}


def _id_in_added_tokens(entries: Any, text: str) -> int | None:
    if not isinstance(entries, dict):
        return None
    ids = [key for key, entry in entries.items() if isinstance(entry, dict) and entry.get("content") == text]
    return int(ids[0]) if ids and ids[0].isdecimal() else None


def _id_in_tokenizer(content: dict[str, Any], text: str) -> int | None:
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        match entry:
            case {"content": str(token), "id": int(token_id)} if token == text:
                return token_id
    match content.get("model"):
        case {"vocab": dict(vocab)} if isinstance(vocab.get(text), int):
            return int(vocab[text])
    return None
