"""Makes the files in ``golden``: real vocabularies, restricted to tokens that occur in the texts, and the right ids.

A token that is not part of a text cannot change its ids, so the restricted vocabulary gives the same tokens as the
whole one. Ids are renumbered without gaps, in the same order. The ids come from sentencepiece, tiktoken, mistral-common
and transformers (by way of llama.cpp's test vectors) with the whole vocabularies. Not part of the tests:

    python -m test.model_files.make_golden LLAMA_CPP_MODELS NPM_TOKENIZERS MISTRAL_DATA
"""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightserve.model_files.gguf.header import USER_DEFINED, read_gguf_header
from lightserve.model_files.tokenizer.files import splits
from lightserve.model_files.tokenizer.files.byte_pairs import to_byte_level

GOLDEN = Path(__file__).parent / "golden"
GGUF = ("falcon", "deepseek-llm", "deepseek-coder", "command-r", "llama-bpe", "qwen2", "llama-spm", "gpt-2")
TEXTS = (
    *("Hello, world!", " Hello", "  two  spaces ", "a\n\n b\r\n\tc", "I'm, we'LL, they'd", "x = 3.14159 + 1234567890"),
    *(
        "naïve café — “quotes”…",
        "e\u0301 A\u030a ﬁ ① ½",
        "日本語の文章です。中文汉字测试",
        "한국어 텍스트",
        "Привет, мир!",
    ),
    *(
        "नमस्ते दुनिया",
        "العربية",
        "😀👩‍👩‍👧🏳️‍🌈",
        "def f(x):\n        return x**2  # ok\n",
        "camelCaseWordsAndHTML5",
        "a/b//c",
    ),
    *("", " ", "   ", "\n", "\u3000\u00a0.", "▁x", "<0x41>", "ab" * 20, "aaaaaaaaaaaaaaaaa", "1 22 333 4444"),
)


def restrict(tokens: Iterable[tuple[int, str]], texts: Sequence[str]) -> dict[int, str]:
    """The tokens that are part of a text, by id."""
    whole = "\n\n".join(texts)
    return {token_id: token for token_id, token in sorted(tokens) if token in whole}


def renumber(kept: Iterable[int], expected: Sequence[Sequence[int]]) -> list[list[int]]:
    new = {token_id: i for i, token_id in enumerate(sorted(kept))}
    return [[new[token_id] for token_id in ids] for ids in expected]


def in_bytes(texts: Sequence[str]) -> list[str]:
    forms = [*texts, *(unicodedata.normalize("NFC", text) for text in texts)]
    return [to_byte_level(text.encode()) for text in forms]


def of_gguf(models: Path, name: str) -> dict[str, Any]:
    path = models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(one) for one in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    texts = texts[: len(expected)]
    metadata = read_gguf_header(path).metadata
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    is_bpe = fields["model"] == "gpt2"
    within = in_bytes(texts) if is_bpe else [("▁" + text).replace(" ", "▁") for text in texts]
    kept = restrict(enumerate(fields["tokens"]), within)
    types = fields.get("token_type", [1] * len(fields["tokens"]))
    kept |= restrict(((i, token) for i, token in enumerate(fields["tokens"]) if types[i] == USER_DEFINED), texts)
    if not is_bpe:  # the unknown token and the bytes
        kept |= {i: fields["tokens"][i] for i in range(259)}
    known = set(kept.values())
    merges = [merge for merge in fields.get("merges", ()) if merge.replace(" ", "") in known]
    order = sorted(kept)
    result = {"model": fields["model"], "pre": fields.get("pre"), "tokens": [kept[i] for i in order]}
    result |= {"token_type": [types[i] for i in order]}
    if is_bpe:
        result |= {"merges": [merge for merge in merges if set(merge.split(" ")) <= known]}
    else:
        result |= {"scores": [fields["scores"][i] for i in order]}
    return result | {"texts": texts, "ids": renumber(kept, expected)}


def of_ranks(ranks: dict[bytes, int], encode: Callable[[str], list[int]], special: int = 0) -> dict[str, Any]:
    """``special``: ids before those of the ranks."""
    expected = [encode(text) for text in TEXTS]
    tokens = [(rank, to_byte_level(token)) for token, rank in ranks.items()]
    kept = restrict(tokens, in_bytes(TEXTS)) | {rank: token for rank, token in tokens if len(token) == 1}
    back = {to_byte_level(token): token for token in ranks}
    lines = [base64.b64encode(back[kept[i]]).decode() for i in sorted(kept)]
    return {"tokens": lines, "texts": TEXTS, "ids": renumber(kept, [[i - special for i in ids] for ids in expected])}


def of_tiktoken(tokenizer_json: Path, split: str, is_nfc: bool) -> dict[str, Any]:
    import tiktoken  # type: ignore[import-not-found]

    char_to_byte = {to_byte_level(bytes([byte])): byte for byte in range(256)}
    vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    ranks = {bytes(char_to_byte[char] for char in token): rank for token, rank in vocabulary.items()}
    encoding = tiktoken.Encoding("test", pat_str=split, mergeable_ranks=ranks, special_tokens={})
    return of_ranks(
        ranks, lambda text: encoding.encode_ordinary(unicodedata.normalize("NFC", text) if is_nfc else text)
    )


def of_tekken(path: Path) -> dict[str, Any]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # type: ignore[import-not-found]

    reference = Tekkenizer.from_file(path)
    content = json.loads(path.read_text())
    size = content["config"]["default_vocab_size"] - reference.num_special_tokens
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:size]}
    result = of_ranks(ranks, lambda text: reference.encode(text, False, False), reference.num_special_tokens)
    return result | {"pattern": content["config"]["pattern"]}


def of_sentencepiece(path: Path) -> dict[str, Any]:
    import sentencepiece  # type: ignore[import-not-found]
    from sentencepiece import sentencepiece_model_pb2

    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    within = [("▁" + text).replace(" ", "▁") for text in TEXTS]
    kept = restrict(((i, piece.piece) for i, piece in enumerate(proto.pieces)), within)
    always = [i for i, piece in enumerate(proto.pieces) if piece.type in (2, 6) or i < 3]
    order = sorted({*kept, *always})
    pieces = [(proto.pieces[i].piece, proto.pieces[i].score, proto.pieces[i].type) for i in order]
    return {"pieces": pieces, "texts": TEXTS, "ids": renumber(order, [reference.encode(text) for text in TEXTS])}


def of_vocab_merges(tokenizer_json: Path) -> dict[str, Any]:
    import tokenizers

    model = json.loads(tokenizer_json.read_text())["model"]
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    kept = restrict(((i, token) for token, i in model["vocab"].items()), in_bytes(TEXTS))
    known = set(kept.values())
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [" ".join(pair) for pair in pairs if {*pair, "".join(pair)} <= known]
    ids = renumber(kept, [reference.encode(text).ids for text in TEXTS])
    return {"tokens": [kept[i] for i in sorted(kept)], "merges": merges, "texts": TEXTS, "ids": ids}


def main(llama_cpp: Path, npm: Path, mistral: Path) -> None:
    qwen, llama3, gpt2 = (npm / f"{name}/package/models/tokenizer.json" for name in ("qwen3", "llama3", "gpt2"))
    made = {f"gguf-{name}": of_gguf(llama_cpp, name) for name in GGUF} | {
        "tiktoken-qwen": of_tiktoken(qwen, splits.QWEN2, is_nfc=True),
        "tiktoken-kimi": of_tiktoken(qwen, splits.KIMI, is_nfc=False),
        "tiktoken-llama3": of_tiktoken(llama3, splits.LLAMA3, is_nfc=False),
        "tekken": of_tekken(mistral / "tekken_240718.json"),
        "sentencepiece": of_sentencepiece(mistral / "tokenizer.model.v1"),
        "vocab-merges": of_vocab_merges(gpt2),
    }
    for name, content in made.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
