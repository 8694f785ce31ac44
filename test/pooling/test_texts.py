"""Which tokens of a query and a document stay if they are truncated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, processors

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.score_templates import PairPrompts, read_score_template
from lightserve.model_files.pooling.texts import PoolingTexts
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.pooling.files import VOCAB_SIZE, word_tokenizer

SCORE = PoolingConfig("classify", "cls", 1, labels=("LABEL_0",), type_vocab_size=2)
ONE_TYPE = PoolingConfig("classify", "cls", 1, labels=("LABEL_0",))
ANSWERS = PoolingConfig("score", "last", 2, answers=("no", "yes"))
# Qwen3-Reranker's, from its model card
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
OF_VLLM = (
    '{{ (messages | selectattr("role", "eq", "document") | first).content }} answers '
    '{{ (messages | selectattr("role", "eq", "query") | first).content }}'
)


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

    suffix = backend.encode(SUFFIX).ids
    assert cut == [*whole[: len(whole) - 100 - len(suffix)], *suffix]


def test_a_truncated_question_with_a_long_query_keeps_both() -> None:
    texts = texts_of(ANSWERS, byte_tokenizer())
    frame = len(texts.encode_pair("", "", "find it"))

    ids = texts.encode_pair("q" * 300, "d" * 50, "find it", limit=frame + 80)

    body = f"<Instruct>: find it\n<Query>: {'q' * 40}\n<Document>: {'d' * 40}"
    assert len(ids) == frame + 80
    assert byte_tokenizer().decode(ids, skip_special_tokens=False) == PREFIX + body + SUFFIX


def test_a_pair_that_fits_is_not_cut() -> None:
    texts = texts_of(SCORE, word_tokenizer())

    assert texts.encode_pair(words(5), words(6), limit=14) == texts.encode_pair(words(5), words(6))


def test_a_limit_without_room_for_both_texts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="3 tokens surround the query and the document; with a limit of 4"):
        texts_of(SCORE, word_tokenizer()).encode_pair(words(5), words(6), limit=4)


@pytest.mark.parametrize(
    ("name", "instruction", "begin", "end"),
    [
        (
            "mxbai-rerank-v2",
            None,
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nquery: QUERY\ndocument: DOC {{ x }}\nYou are a search relevance expert",
            "(0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("mxbai-rerank-v2", "find", "<|im_start|>system\nYou are Qwen", "<|im_end|>\n<|im_start|>assistant\n"),
        ("bge-reranker-v2-gemma", None, "A: QUERY\nB: DOC {{ x }}\nGiven a query A", "either 'Yes' or 'No'."),
        (
            "zerank",
            None,
            "<|im_start|>system\nQUERY<|im_end|>\n<|im_start|>user\nDOC {{ x }}<|im_end|>\n",
            "assistant\n",
        ),
        ("nemotron-rerank", None, "question:QUERY \n \n passage:DOC {{ x }}", "{{ x }}"),
        ("qwen3-reranker", "find", PREFIX + "<Instruct>: find\n<Query>: QUERY\n<Document>: DOC {{ x }}", SUFFIX),
        (OF_VLLM, None, "DOC {{ x }} answers ", "QUERY"),
    ],
)
def test_a_prompt_is_that_of_the_model_card(name: str, instruction: str | None, begin: str, end: str) -> None:
    """The texts are no templates, whatever is in them."""
    prompt, spans = PairPrompts(read_score_template(name)).of(instruction).render("QUERY", "DOC {{ x }}")

    assert prompt.startswith(begin)
    assert prompt.endswith(end)
    assert [prompt[start:stop] for start, stop in spans] == ["QUERY", "DOC {{ x }}"]
    assert instruction is None or instruction in prompt


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "score.jinja"
    path.write_text(OF_VLLM)

    assert read_score_template(str(path)).text == OF_VLLM


def test_a_template_that_is_not_there_is_refused_with_the_names() -> None:
    with pytest.raises(ModelFilesError, match=r"no such file; give one of qwen3-reranker, mxbai-rerank-v2"):
        read_score_template("mxbai")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ query }}", "does not show the query and the document once each"),
        ("{{ query }} {{ document }} {{ query }}", "once each"),
        ("{{ query }} {{ document", "--score_template: unexpected end"),
        ("{{ query }} {{ document | upside_down }}", "--score_template: No filter named"),
        ("{{ query }} {{ document }} {{ raise_exception('no') }}", "--score_template: .*rejects"),
    ],
)
def test_a_wrong_template_is_refused_at_the_start(text: str, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read_score_template(text)


def test_an_instruction_is_refused_by_a_template_that_shows_none() -> None:
    with pytest.raises(InvalidRequestError, match="instruction: the score template"):
        PairPrompts(read_score_template("{{ query }} {{ document }}")).of("find it")


def test_a_template_has_the_special_tokens_of_the_tokenizer_around_it() -> None:
    template = read_score_template("{{ query }} w6 {{ document }}")
    texts = texts_of(replace(ONE_TYPE, template=template), word_tokenizer())

    assert texts.encode_pair("w5", "w7 w8") == [2, 5, 6, 7, 8, 3]
    assert texts.encode_pair("w5", "w7 w8", limit=5) == [2, 5, 6, 7, 3]
