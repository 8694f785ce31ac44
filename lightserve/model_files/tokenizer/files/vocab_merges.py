"""``vocab.json`` with ``merges.txt``: byte-level BPE as GPT-2 stores it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json, read_text
from lightserve.model_files.tokenizer.files import splits
from lightserve.model_files.tokenizer.files.base import TokenizerFile
from lightserve.model_files.tokenizer.files.byte_pairs import split_bytes
from lightserve.model_files.tokenizer.files.settings import TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

_END = "<|endoftext|>"
# the roles that a tokenizer class gives if no file does
_DEFAULT_ROLES = {
    "GPT2Tokenizer": SpecialTokens(_END, _END, _END),
    "CodeGenTokenizer": SpecialTokens(_END, _END, _END),
    "Qwen2Tokenizer": SpecialTokens(None, _END, None, _END),
}
# by tokenizer class: whether the text is split as Qwen 2 does it, else as GPT-2
CLASSES = {
    "": False,
    "GPT2Tokenizer": False,
    "CodeGenTokenizer": False,
    "TokenizersBackend": False,
    "PreTrainedTokenizer": False,
    "Qwen2Tokenizer": True,
}


class VocabMergesFile(TokenizerFile):
    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self._vocabulary = _read_vocabulary(path)
        super().__init__(path, settings)

    @property
    def special(self) -> SpecialTokens:
        usual = _DEFAULT_ROLES.get(self.settings.class_name, SpecialTokens())
        return self._roles(token if token is not None and self.id_of(token) is not None else None for token in usual)

    def id_of(self, token: str) -> int | None:
        return self._id_of_added.get(token, self._vocabulary.get(token))

    @property
    def _is_qwen2(self) -> bool:
        name = self.settings.class_name
        return CLASSES[name] or (not name and self.settings.model_type.startswith(("qwen2", "qwen3")))

    def _backend(self) -> Tokenizer:
        merges = _read_merges(self.path.parent / "merges.txt", self._vocabulary)
        vocabulary = {token.content: i for i, token in self.added.items()} | self._vocabulary
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        if self._is_qwen2:
            backend.normalizer = normalizers.NFC()
            backend.pre_tokenizer = split_bytes(splits.QWEN2)
        else:
            has_prefix = self.settings.flag("add_prefix_space", False)
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        return backend

    def _surrounding(self) -> tuple[list[str], list[str]]:
        return self._bos_and_eos(adds_bos=False)


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(path)
    wrong = [token for token, token_id in vocabulary.items() if not isinstance(token_id, int) or token_id < 0]
    if wrong:
        raise ModelFilesError(f"{path}: the id of {wrong[0][:50]!r} is not a number; download it again")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ModelFilesError(f"{path}: two tokens have the same id; download it again")
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    if not path.is_file():
        raise ModelFilesError(f"{path}: no such file; vocab.json needs it, download it again")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFilesError(
                f"{path}: line {number} merges {line[:50]!r}, but vocab.json lacks a token of it; download both again"
            )
        merges.append((left, right))
    return merges
