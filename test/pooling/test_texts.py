"""Which tokens of a query and a document stay if they are truncated."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, processors

from lightserve.errors import InvalidRequestError
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.texts import RERANK_PREFIX, RERANK_SUFFIX, PoolingTexts
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.pooling.files import VOCAB_SIZE, word_tokenizer

SCORE = PoolingConfig("classify", "cls", 1, labels=("LABEL_0",), type_vocab_size=2)
ONE_TYPE = PoolingConfig("classify", "cls", 1, labels=("LABEL_0",))
ANSWERS = PoolingConfig("score", "last", 2, answers=("no", "yes"))


def words(count: int, first: int = 5) -> str:
    return " ".join(f"w{first + i}" for i in range(count))


def roberta_tokenizer() -> Backend:
    backend = word_tokenizer()
    backend.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), add_prefix_space=False)
    return backend


def byte_tokenizer() -> Backend:
    """A token for each byte, and the chat tokens of Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


def texts_of(config: PoolingConfig, backend: Backend) -> PoolingTexts:
    return PoolingTexts(config, Tokenizer(backend, SpecialTokens(), None), VOCAB_SIZE)


@pytest.mark.parametrize("backend", [word_tokenizer(), roberta_tokenizer()], ids=["bert", "roberta"])
@pytest.mark.parametrize("limit", [7, 16, 17, 40])
def test_a_truncated_pair_equals_that_of_the_tokenizers_library(backend: Backend, limit: int) -> None:
    texts = texts_of(ONE_TYPE, backend)
    oracle = Backend.from_str(backend.to_str())
    oracle.enable_truncation(limit, strategy="longest_first")

    for lengths in itertools.product((0, 1, 5, 6, 7, 30, 31), repeat=2):
        query, document = words(lengths[0]), words(lengths[1], 50)
        assert texts.encode_pair(query, document, limit=limit) == oracle.encode(query, document).ids, lengths


def test_a_long_query_leaves_room_for_the_document_and_its_token_type() -> None:
    texts = texts_of(SCORE, word_tokenizer())

    first, second = (texts.encode_pair(words(30), document, limit=16) for document in (words(2, 60), words(2, 70)))

    assert len(first) == 16
    assert first != second
    assert [token_id - VOCAB_SIZE for token_id in first if token_id >= VOCAB_SIZE] == [60, 61, 3]


def test_a_truncated_question_loses_the_end_of_the_document_and_keeps_the_suffix() -> None:
    backend = byte_tokenizer()
    texts = texts_of(ANSWERS, backend)
    whole = texts.encode_pair("what is it", "é word " * 30, "find it")

    cut = texts.encode_pair("what is it", "é word " * 30, "find it", limit=len(whole) - 100)

    suffix = backend.encode(RERANK_SUFFIX).ids
    assert cut == [*whole[: len(whole) - 100 - len(suffix)], *suffix]


def test_a_truncated_question_with_a_long_query_keeps_both() -> None:
    texts = texts_of(ANSWERS, byte_tokenizer())
    frame = len(texts.encode_pair("", "", "find it"))

    ids = texts.encode_pair("q" * 300, "d" * 50, "find it", limit=frame + 80)

    body = f"<Instruct>: find it\n<Query>: {'q' * 40}\n<Document>: {'d' * 40}"
    assert len(ids) == frame + 80
    assert byte_tokenizer().decode(ids, skip_special_tokens=False) == RERANK_PREFIX + body + RERANK_SUFFIX


def test_a_pair_that_fits_is_not_cut() -> None:
    texts = texts_of(SCORE, word_tokenizer())

    assert texts.encode_pair(words(5), words(6), limit=14) == texts.encode_pair(words(5), words(6))


def test_a_limit_without_room_for_both_texts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="3 tokens surround the query and the document; with a limit of 4"):
        texts_of(SCORE, word_tokenizer()).encode_pair(words(5), words(6), limit=4)
