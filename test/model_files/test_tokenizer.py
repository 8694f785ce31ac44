from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightserve.errors import InvalidRequestError, ModelFilesError
from lightserve.model_files import Tokenizer, load_tokenizer, resolve
from lightserve.model_files.gguf.header import read_gguf_header
from lightserve.model_files.gguf.pre_tokenizers import PRE_TOKENIZERS
from lightserve.model_files.gguf.tokenizer import tokenizer_from_gguf
from lightserve.model_files.tokenizer.special_tokens import set_surrounding_tokens
from test.cpu_time import cpu_seconds
from test.model_files.files import finish, save_as_gguf, tiny_model
from test.model_files.vocabulary_files import (
    ALL_BYTES,
    BYTES,
    SPECIAL,
    sentencepiece_model,
    tiktoken_file,
    write_folder,
)
from test.real_model import smollm2

CORPUS = [
    "",
    " ",
    "Hello world",
    "  leading, trailing and   inner runs  ",
    "def f(x):\n    return x**2 + 3.14e-10\n\n\t\tif a != b: pass  # ok",
    "a\n\n\n b\r\n\r\n  c\t\t\n   \n",
    "12345 6 78901 1,234.56 2024-01-31",
    "I'll don't WE'RE they've 's 'S",
    "日本語のテキスト、中文文本。한국어",
    "العربية हिन्दी ไทย Ελληνικά кириллица",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ok",
    "\u00e9 e\u0301 naïve café ﬁ",
    "\u200b\ufeff\x00\x01",
    "http://a.b/c?d=e&f=1#g",
    "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <repo_name>x <|im_start",
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & 'é'?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?"},
]


@functools.cache
def smol() -> Tokenizer:
    return load_tokenizer(smollm2())


@functools.cache
def oracle() -> Any:
    path = smollm2().path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", CORPUS)
def test_the_default_models_ids_and_text_equal_transformers(text: str) -> None:
    ids = smol().encode(text)

    assert ids == oracle().encode(text)
    assert smol().decode(ids) == oracle().decode(ids, skip_special_tokens=True)
    assert smol().decode(ids, skip_special_tokens=False) == text


def test_the_default_model_splits_digits_of_any_script() -> None:
    # transformers knows nothing of the pre-tokenizer "smollm" and joins the space to the numeral here
    assert [smol().decode([token_id]) for token_id in smol().encode(" 2")] == [" ", "2"]
    assert smol().encode(" Ⅳ")[0] == smol().encode(" ")[0]


def test_the_default_models_chat_prompt_equals_transformers() -> None:
    expected = oracle().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)

    assert smol().apply_chat_template(MESSAGES) == expected


def test_a_prompt_may_end_without_the_assistants_turn() -> None:
    text = smol().apply_chat_template(MESSAGES, add_generation_prompt=False)

    assert text.endswith("Sure?<|im_end|>\n")


def test_ids_and_tokens_of_the_default_model_are_known_by_name() -> None:
    assert (smol().bos_token, smol().bos_id) == ("<|im_start|>", 1)
    assert (smol().eos_token, smol().eos_id) == ("<|im_end|>", 2)
    assert smol().vocab_size == 49152
    assert smol().special_ids == frozenset(range(17))
    assert smol().id_to_token(smol().encode(" world")[0]) == "Ġworld"
    assert smol().token_to_id("Ġworld") == smol().encode(" world")[0]
    assert smol().token_to_id("no such token") is None


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert smol().decode([*smol().encode("Hello"), 1_000_000]) == "Hello"


def test_half_a_surrogate_pair_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        smol().encode("\ud83d")


def test_the_tokenizer_can_be_exported_as_json() -> None:
    copy = Backend.from_str(smol().to_json())

    assert copy.encode("Hello world").ids == smol().encode("Hello world")


def test_loading_the_default_models_tokenizer_takes_as_long_as_the_tokenizers_library() -> None:
    source, text = smollm2(), smol().to_json()

    load_s = cpu_seconds(lambda: load_tokenizer(source))

    assert load_s < 5 * cpu_seconds(lambda: Backend.from_str(text))  # the same time measured


@pytest.mark.parametrize("kind", ["gguf", "folder", "tokenizer.model", "qwen.tiktoken"])
def test_tokenizing_imports_neither_torch_nor_transformers(kind: str, tmp_path: Path) -> None:
    model_dir = str(smollm2().path) if kind == "gguf" else str(make_folder(tmp_path))
    if "." in kind:
        (Path(model_dir) / "tokenizer.json").unlink()
        (Path(model_dir) / "tokenizer_config.json").unlink()
        write_folder(Path(model_dir), {kind: VOCABULARIES[kind]})
    code = (
        "import sys\n"
        "from lightserve.model_files import load_tokenizer, resolve\n"
        "load_tokenizer(resolve(sys.argv[1])).encode('Hello')\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    root = str(Path(__file__).parents[2])

    answer = subprocess.run(
        [sys.executable, "-c", code, model_dir], cwd=root, capture_output=True, text=True, check=True
    )

    assert answer.stdout == "[]\n"


VOCABULARIES = {
    "tokenizer.model": sentencepiece_model([*SPECIAL, *BYTES]),
    "qwen.tiktoken": tiktoken_file(ALL_BYTES),
}


def trained_backend(specials: list[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def make_folder(tmp_path: Path, **config: Any) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    backend = trained_backend(["<unk>", "<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return tmp_path


@pytest.mark.parametrize("first", [None, "<s>"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_folders_ids_equal_transformers(tmp_path: Path, config: dict[str, bool], first: str | None) -> None:
    folder = make_folder(tmp_path, **config)
    if first is not None:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        set_surrounding_tokens(backend, [first], [])
        backend.save(str(folder / "tokenizer.json"))
    expected = AutoTokenizer.from_pretrained(folder)

    tokenizer = load_tokenizer(resolve(str(folder)))

    for text in CORPUS:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("a")[0] == (1 if first else tokenizer.token_to_id("a"))


def test_tokens_that_are_only_in_the_tokenizer_config_are_added(tmp_path: Path) -> None:
    size = trained_backend(["<unk>", "<s>", "</s>"]).get_vocab_size()
    added = {"1": {"content": "<s>", "special": True}, str(size): {"content": "<tool>", "special": True}}
    folder = make_folder(tmp_path, added_tokens_decoder=added)

    tokenizer = load_tokenizer(resolve(str(folder)))

    assert tokenizer.encode("<tool>") == [size]
    assert size in tokenizer.special_ids


def test_a_token_with_a_role_is_special_even_if_it_was_an_ordinary_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, eos_token="x")
    expected = AutoTokenizer.from_pretrained(folder)

    tokenizer = load_tokenizer(resolve(str(folder)))

    assert tokenizer.eos_id in tokenizer.special_ids
    text = tokenizer.decode(tokenizer.encode("axa"))
    assert "x" not in text
    assert text == expected.decode(expected.encode("axa"), skip_special_tokens=True)


def test_added_tokens_that_contradict_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, added_tokens_decoder={"5000": {"content": "<tool>", "special": True}})

    with pytest.raises(ModelFilesError, match=r"tokenizer_config.json: added token '<tool>' has id 5000"):
        load_tokenizer(resolve(str(folder)))


def test_a_corrupt_tokenizer_json_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": 3}')

    with pytest.raises(ModelFilesError, match=r"tokenizer.json: not readable as a tokenizer"):
        load_tokenizer(resolve(str(folder)))


def with_template(tmp_path: Path, template: str) -> Tokenizer:
    return load_tokenizer(resolve(str(make_folder(tmp_path, chat_template=template))))


def test_a_template_can_use_everything_that_transformers_offers(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}\n"
        "{{ tools | tojson }} {{ strftime_now('%Y') | length }} {{ mood }}"
    )
    folder = make_folder(tmp_path, chat_template=template)
    tools = [{"name": "<é>"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, tools=tools, mood="calm", tokenize=False, add_generation_prompt=True
    )

    assert load_tokenizer(resolve(str(folder))).apply_chat_template(MESSAGES, tools=tools, mood="calm") == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].absent.deeper }}", "absent"),
    ],
)
def test_messages_that_a_template_rejects_are_an_invalid_request(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = with_template(tmp_path, template)

    with pytest.raises(InvalidRequestError, match=reason):
        tokenizer.apply_chat_template(MESSAGES)


def test_the_error_of_a_template_that_quotes_a_long_text_is_short(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ raise_exception(messages[0].content) }}")

    with pytest.raises(InvalidRequestError) as refused:
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 100_000}])
    assert len(str(refused.value)) < 600


def test_a_template_that_is_not_jinja_is_a_model_files_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="not valid Jinja"):
        with_template(tmp_path, "{% if %}")


def test_a_chat_with_a_model_without_a_template_is_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve(str(make_folder(tmp_path))))

    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def vocabulary_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, *value_type(value))
    return finish(writer, path)


def value_type(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    kind = gguf.GGUFValueType.get_type(value)
    if not isinstance(value, list):
        return (kind,)
    return kind, gguf.GGUFValueType.get_type(value[0])


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    model = json.loads(trained_backend(["<|end|>"]).to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<think>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3] + [1] * (len(tokens) - 2) + [4],
        "eos_token_id": 0,
    }
    return metadata | changes


def test_control_and_user_tokens_of_a_gguf_stay_whole_and_only_control_is_skipped(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    backend, special = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", metadata)))

    ids = backend.encode("<think>Hello<|end|>").ids

    assert (ids[0], ids[-1]) == (len(metadata["tokens"]) - 1, 0)
    assert backend.decode(ids) == "<think>Hello"
    assert special.eos == "<|end|>"


def test_trinity_groups_digits_from_the_last_one() -> None:
    parts = PRE_TOKENIZERS["afmoe"].steps().pre_tokenize_str("in 1234567, 12 and 123456")

    texts = [text for text, _ in parts if text[-1].isdigit()]
    assert texts == ["1", "234", "567", "12", "123", "456"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_preserves_the_text(pre: str, tmp_path: Path) -> None:
    metadata = byte_level_metadata(pre=pre, add_bos_token=False)
    backend, _ = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", metadata)))

    for text in CORPUS:
        expected = backend.normalizer.normalize_str(text) if backend.normalizer else text
        assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == expected


def test_an_unknown_pre_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    header = read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", byte_level_metadata(pre="martian")))

    with pytest.raises(ModelFilesError, match=r"v.gguf: pre-tokenizer 'martian' is not supported; supported: default"):
        tokenizer_from_gguf(header)


def test_an_unknown_tokenizer_model_is_refused_with_its_name(tmp_path: Path) -> None:
    header = read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", byte_level_metadata(model="rwkv")))

    with pytest.raises(ModelFilesError, match=r"v.gguf: tokenizer model 'rwkv' is not supported"):
        tokenizer_from_gguf(header)


def test_a_gguf_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    source = resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf")))

    with pytest.raises(ModelFilesError, match=r"metadata tokenizer.ggml.model is missing"):
        load_tokenizer(source)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["▁t", "he", "▁the", "▁c", "at", "▁cat", "bc", "ab"]  # the sooner, the better the score
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    specials = ["<unk>", "<s>", "</s>"]
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*specials, *raw_bytes, *pieces, *letters]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return metadata | changes


def pieces_of(backend: Backend, text: str) -> list[str]:
    return list(backend.encode(text).tokens)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    backend, _ = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", sentencepiece_metadata())))

    assert pieces_of(backend, "the cat") == ["<s>", "▁the", "▁cat"]
    assert pieces_of(backend, "abc") == ["<s>", "▁", "a", "bc"]
    assert pieces_of(backend, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert backend.decode(backend.encode("the  café cat").ids) == "the  café cat"


def test_sentencepiece_omits_prefix_and_bos_if_the_file_says_so(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    backend, _ = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", metadata)))

    assert pieces_of(backend, "he cat") == ["he", "▁cat", "</s>"]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_user_defined_tokens_of_spaces_are_found_in_sentencepiece_texts(has_prefix: bool, tmp_path: Path) -> None:
    """llama.cpp's converter writes them with ``▁`` or, if a config lists them, with spaces (Gemma)."""
    metadata = sentencepiece_metadata(add_space_prefix=has_prefix, add_bos_token=False)
    for text in ("▁▁▁", "    ", "<turn>"):
        metadata["tokens"].append(text)
        metadata["scores"].append(0.0)
        metadata["token_type"].append(4)
    backend, _ = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", metadata)))

    assert pieces_of(backend, "a   b")[-2:] == ["▁▁▁", "b"]
    assert pieces_of(backend, "a    <turn>")[-2:] == ["    ", "<turn>"]


def test_a_unigram_vocabulary_of_a_gguf_takes_the_best_segmentation(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(model="t5", add_eos_token=True, remove_extra_whitespaces=True)
    backend, _ = tokenizer_from_gguf(read_gguf_header(vocabulary_gguf(tmp_path / "v.gguf", metadata)))

    assert pieces_of(backend, " the  cat ") == ["▁t", "he", "▁cat", "</s>"]  # scores 0 - 1 are better than -2
    assert pieces_of(backend, "abc") == ["▁", "a", "bc", "</s>"]
