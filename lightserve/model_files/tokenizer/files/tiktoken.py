"""Files of tiktoken: a line for each token with its bytes in base64 and its rank (Qwen 1, GLM-4, Kimi, Llama 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from lightserve.errors import ModelFilesError
from lightserve.model_files.tokenizer.files import splits
from lightserve.model_files.tokenizer.files.base import TokenizerFile
from lightserve.model_files.tokenizer.files.byte_pairs import byte_level_backend
from lightserve.model_files.tokenizer.files.ranks import check_ranks, decode_base64
from lightserve.model_files.tokenizer.files.settings import TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n?")


class Family(NamedTuple):
    """What a tokenizer class has in its code and not in its files."""

    split: str
    is_nfc: bool = False
    special: Sequence[str] = ()  # with the ids after the ranks, unless the config names them
    n_reserved: int = 0  # ids after the ranks; those without a name are reserved
    n_skipped: int = 0  # ids between ranks and special tokens
    before: tuple[str, ...] = ()  # before each text
    roles: SpecialTokens = SpecialTokens()


_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_ARCADE_TOKENS = (
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<gh_stars>", "<filename>", "<issue_start>", "<issue_comment>", "<issue_closed>"),
    *("<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<empty_output>"),
    *("<commit_before>", "<commit_msg>", "<commit_after>", "<reponame>", "<|endofprompt|>"),
    *("<|im_start|>", "<|im_end|>", "<|pause|>", *(f"<|reg{i}|>" for i in range(8)), "<|extra0|>"),
)
_GLM_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
_END = SpecialTokens(eos="<|endoftext|>")

_LLAMA3 = Family(splits.LLAMA3)
QWEN = Family(splits.QWEN2, is_nfc=True, special=_QWEN_TOKENS, roles=_END)
GLM4 = Family(splits.LLAMA3, special=_GLM_TOKENS, before=("[gMASK]", "<sop>"), roles=_END)
KIMI = Family(splits.KIMI, n_reserved=256)
ARCADE = Family(splits.QWEN2, is_nfc=True, special=_ARCADE_TOKENS, n_skipped=1, roles=_END)

# by tokenizer class; those of the last four are Python code in the folders of their models
FAMILIES = {
    "": _LLAMA3,
    "TokenizersBackend": _LLAMA3,
    "PreTrainedTokenizer": _LLAMA3,
    "LlamaTokenizer": _LLAMA3,
    "QWenTokenizer": QWEN,
    "ChatGLM4Tokenizer": GLM4,
    "TikTokenTokenizer": KIMI,
    "Arcade100kTokenizer": ARCADE,
}
# by file name, for folders that name no class
FAMILY_OF_FILE = {"qwen.tiktoken": QWEN, "tiktoken.model": KIMI, "arcade100k.tiktoken": ARCADE}


def is_tiktoken(path: Path) -> bool:
    """Whether the first line is one of tiktoken. A SentencePiece model begins with a line break."""
    try:
        with path.open("rb") as file:
            return _LINE.fullmatch(file.readline(1000)) is not None
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


class TiktokenFile(TokenizerFile):
    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self._ranks = _read_ranks(path)
        self._family = FAMILIES[settings.class_name]
        if not settings.class_name:
            self._family = FAMILY_OF_FILE.get(path.name, self._family)
        super().__init__(path, settings)

    @property
    def special(self) -> SpecialTokens:
        return self._roles(self._family.roles)

    def id_of(self, token: str) -> int | None:
        return self._id_of_added.get(token, self._ranks.get(token.encode()))

    def _added(self) -> dict[int, AddedToken]:
        family, named = self._family, self.settings.added
        start = len(self._ranks) + family.n_skipped
        tokens = {} if any(token_id >= start for token_id in named) else dict(enumerate(family.special, start))
        if family.n_reserved:
            tokens = {i: f"<|reserved_token_{i}|>" for i in range(start, start + family.n_reserved)}
        usual = {i: AddedToken(text, normalized=False, special=True) for i, text in tokens.items()}
        return dict(sorted((usual | named).items()))

    def _backend(self) -> Tokenizer:
        added = {token_id: token.content for token_id, token in self.added.items()}
        return byte_level_backend(self._ranks, added, self._family.split, self._family.is_nfc)

    def _surrounding(self) -> tuple[list[str], list[str]]:
        bos, eos = self._bos_and_eos(adds_bos=False)
        return [*self._family.before, *bos], eos


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        ranks = dict(_tokens(path.read_bytes()))
        check_ranks(ranks)
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: not readable as a file of tiktoken ({error}); download it again") from error
    return ranks


def _tokens(data: bytes) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(data.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        if not line:
            continue
        try:
            yield decode_base64(token), int(rank)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
