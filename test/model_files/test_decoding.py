"""Pieces of text add up to the text of all ids, come as early as they can, and no piece is half a character."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from lightserve.detokenization.req_text import StopMatcher
from lightserve.model_files.tokenizer.decoding import make_decoder
from lightserve.model_files.tokenizer.decoding.base import REPLACEMENT, Decoder, DecodeStream
from lightserve.model_files.tokenizer.decoding.byte_level import ByteLevelDecoder
from lightserve.model_files.tokenizer.decoding.sentencepiece import SentencePieceDecoder
from lightserve.model_files.tokenizer.decoding.window import WindowDecoder
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer
from test.cpu_time import cpu_seconds, growth
from test.real_model import smollm2

N_SEQUENCES = 10_000  # a kind of tokenizer and an option
RAW_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["", " ", "  ", "a", "b c", "é", "日本", "😀", REPLACEMENT, "▁", "▁▁", "▁the", "x▁y", "the", ".", "n't", "do"]
SUBWORDS = ["##", "##a", "##é", "a</w>", "the</w>", "</w>", "<0x+4>", "<0x4>", "<0xé>", "<pad>", "|"]
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("é", special=True),  # a byte-level vocabulary reads it as a byte
    AddedToken("▁special", special=True),
    AddedToken("<0xFE>", special=True),
    AddedToken("<tool>", special=False),
    AddedToken("日 本", special=False),
    AddedToken("Upper", special=True, normalized=True),  # decoded as the normalizer leaves it, and then not special
]


def made(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    backend = Backend(model)
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens(ADDED)
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, SpecialTokens(None, None, None, None), None)


def byte_level(*more_steps: decoders.Decoder) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longer = [as_bytes.pre_tokenize_str(text)[0][0] for text in ("the", " a", "日本", "😀", "é.", REPLACEMENT)]
    parts = [token[:cut] + tail for token in longer[2:] for cut in (1, 2) for tail in ("", "a", "ł")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *longer, *parts, "", "日"]))}
    decoder = decoders.ByteLevel()
    return made(models.BPE(vocabulary, []), decoders.Sequence([decoder, *more_steps]) if more_steps else decoder)


def pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    tokens = dict.fromkeys(["<unk>", *RAW_BYTES, *WORDS, *SUBWORDS])
    return made(models.BPE({token: i for i, token in enumerate(tokens)}, []), decoder)


def unigram(decoder: decoders.Decoder) -> Tokenizer:
    return made(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS[1:])], unk_id=0), decoder)


def sequence(*steps: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(list(steps))


SPACE = decoders.Replace("▁", " ")
BYTES, FUSE = decoders.ByteFallback(), decoders.Fuse()

KINDS: dict[str, tuple[type[Decoder], Callable[[], Tokenizer]]] = {
    "smollm2": (ByteLevelDecoder, lambda: load_tokenizer(smollm2())),
    "byte level": (ByteLevelDecoder, byte_level),
    "llama": (SentencePieceDecoder, lambda: pieces(sequence(SPACE, BYTES, FUSE, decoders.Strip(" ", 1, 0)))),
    "gemma": (SentencePieceDecoder, lambda: pieces(sequence(SPACE, BYTES, FUSE))),
    "two stripped": (SentencePieceDecoder, lambda: pieces(sequence(SPACE, BYTES, FUSE, decoders.Strip(" ", 2, 0)))),
    "raw bytes only": (SentencePieceDecoder, lambda: pieces(BYTES)),
    "nested": (SentencePieceDecoder, lambda: pieces(sequence(sequence(SPACE), sequence(BYTES, FUSE)))),
    "metaspace": (SentencePieceDecoder, lambda: unigram(decoders.Metaspace())),
    "metaspace in the middle": (SentencePieceDecoder, lambda: pieces(decoders.Metaspace(prepend_scheme="first"))),
    "metaspace without prefix": (SentencePieceDecoder, lambda: unigram(decoders.Metaspace(prepend_scheme="never"))),
    "word piece": (WindowDecoder, lambda: pieces(decoders.WordPiece())),
    "suffixes": (WindowDecoder, lambda: pieces(decoders.BPEDecoder())),
    "ctc": (WindowDecoder, lambda: pieces(decoders.CTC())),
    "no decoder": (WindowDecoder, lambda: pieces(None)),
    "bytes, then metaspace": (WindowDecoder, lambda: pieces(sequence(BYTES, decoders.Metaspace()))),
    "stripped bytes": (WindowDecoder, lambda: byte_level(decoders.Strip(" ", 1, 0))),
    "regex": (WindowDecoder, lambda: pieces(sequence(decoders.Replace(Regex("▁+"), " "), BYTES, FUSE))),
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind][1]()


@functools.cache
def decoder_for(kind: str) -> Decoder:
    return make_decoder(tokenizer_of(kind))


@functools.cache
def byte_ids(kind: str) -> dict[int, int]:
    """Byte to the id that stands for it alone, as far as the vocabulary has them."""
    tokenizer, token_bytes = tokenizer_of(kind), decoder_for(kind).token_bytes
    alone = {data[0]: i for i in range(tokenizer.vocab_size) if len(data := token_bytes(i)) == 1}
    raw = {byte: i for byte, token in enumerate(RAW_BYTES) if (i := tokenizer.token_to_id(token)) is not None}
    return alone | raw


def ids_of_bytes(kind: str, data: Sequence[int]) -> list[int]:
    return [byte_ids(kind)[byte] for byte in data if byte in byte_ids(kind)]


def random_ids(kind: str, rng: random.Random) -> list[int]:
    match rng.randrange(4):
        case 0:
            data = "".join(rng.choices("a é日€😀\ufffd\ud7ff▁\n", k=rng.randrange(1, 4))).encode()
            return ids_of_bytes(kind, data[rng.randrange(2) : len(data) - rng.randrange(2)])
        case 1:
            return ids_of_bytes(kind, rng.choices(b"\x80\x90\xbf\xc3\xe2\xed\xf0\xf4\xff ", k=2))
        case 2:
            return [rng.choice([*tokenizer_of(kind).special_ids, 10**6])]
    return rng.choices(range(tokenizer_of(kind).vocab_size), k=rng.randrange(1, 4))


def random_sequences(kind: str, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Any ids, special ones often; whole, cut and mixed up characters in bytes."""
    rng = random.Random(f"{kind} {seed}")
    for _ in range(count):
        yield list(itertools.chain.from_iterable(random_ids(kind, rng) for _ in range(rng.randrange(8))))


def expected_text(kind: str, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text by the tokenizers library, which replaces all bytes in a row if they are not UTF-8 together.

    An empty token after each character, and after each byte that is none, lets it decode them as SentencePiece does.
    """
    decoder, tokenizer = decoder_for(kind), tokenizer_of(kind)
    if isinstance(decoder, SentencePieceDecoder) and decoder._scheme.has_raw_bytes:
        ids = with_breaks(decoder._pieces[skip_special_tokens], ids, tokenizer.token_to_id("") or 0)
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def with_breaks(pieces: Mapping[int, str | int | None], ids: Sequence[int], empty: int) -> list[int]:
    found: list[int] = []
    pending: list[int] = []  # ids of bytes that may be the beginning of a character

    def resolve(is_end: bool) -> None:
        while pending:
            data = bytes(piece for token in pending if isinstance(piece := pieces[token], int))
            n_bytes = next((n for n in range(1, 5) if is_character(data[:n])), 0)
            if not n_bytes and not is_end and may_continue(data):
                return
            taken = pending[: n_bytes or 1]
            del pending[: len(taken)]
            found.extend([*taken, empty])

    for token in ids:
        piece = pieces[token]
        if isinstance(piece, int):
            pending.append(token)
        elif piece is not None:
            resolve(is_end=True)
            found.append(token)
        resolve(is_end=False)
    resolve(is_end=True)
    return found


@functools.cache
def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@functools.cache
def may_continue(data: bytes) -> bool:
    """Whether some bytes after ``data`` make it a character."""
    ends = (bytes(end) for n in (1, 2, 3) for end in itertools.product(b"\x80\x90\xa0\xbf", repeat=n))
    return any(is_character(data + end) for end in ends)


def fold(stream: DecodeStream, ids: Sequence[int]) -> str:
    return "".join([*map(stream.push, ids), stream.flush()])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_is_recognised(kind: str) -> None:
    assert type(decoder_for(kind)) is KINDS[kind][0]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_random_ids_add_up_to_the_whole_text(kind: str, skip_special_tokens: bool) -> None:
    decoder = decoder_for(kind)

    for ids in random_sequences(kind, N_SEQUENCES):
        expected = expected_text(kind, ids, skip_special_tokens)
        assert fold(decoder.stream(skip_special_tokens), ids) == expected, ids


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_add_up_too(kind: str) -> None:
    ids = list(itertools.chain.from_iterable(random_sequences(kind, 2_000, seed=1)))

    assert fold(decoder_for(kind).stream(True), ids) == expected_text(kind, ids)


def common_beginning(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    n_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))
    return low[:n_equal]


ENDS = [b"", b"a", b"\xff", *(bytes([byte] * n) for byte in (0x80, 0x90, 0xA0, 0xBF) for n in (1, 2, 3))]


@pytest.mark.parametrize("kind", ["smollm2", "byte level", "llama", "gemma", "two stripped"])
def test_text_is_returned_as_soon_as_no_further_id_can_change_it(kind: str) -> None:
    tokenizer, decoder = tokenizer_of(kind), decoder_for(kind)
    the = tokenizer.token_to_id("the")
    assert the is not None
    ends = [[the], *(ids_of_bytes(kind, end) for end in ENDS)]
    for ids in random_sequences(kind, 500, seed=2):
        if REPLACEMENT.encode() in b"".join(map(decoder.token_bytes, ids)):
            continue  # written out it looks like bytes that are no character, so it could come a little sooner
        stream, given = decoder.stream(True), ""

        for n, token_id in enumerate(ids, 1):
            given += stream.push(token_id)

            assert given == common_beginning([expected_text(kind, ids[:n] + end) for end in ends]), ids[:n]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "日本の首都は東京です。",
        "😀👩‍👩‍👧‍👦🏳️‍🌈",
        "naïve café\n\n\tdef f(x):\n        return x",
        "a" * 50 + "   " * 20,
    ],
)
def test_pieces_of_a_text_contain_no_incomplete_characters(text: str) -> None:
    stream = decoder_for("smollm2").stream(True)

    given = [stream.push(token) for token in tokenizer_of("smollm2").encode(text)] + [stream.flush()]

    assert "".join(given) == text
    assert all(REPLACEMENT not in piece for piece in given)


def test_bytes_that_never_become_a_character_are_returned_at_the_end() -> None:
    half = tokenizer_of("smollm2").encode("😀")[:1]
    stream = decoder_for("smollm2").stream(True)

    assert stream.push(half[0]) == ""
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


def test_streams_of_one_decoder_are_independent() -> None:
    tokenizer, decoder = tokenizer_of("smollm2"), decoder_for("smollm2")
    first, second = tokenizer.encode("😀"), tokenizer.encode("日")
    one, other = decoder.stream(True), decoder.stream(True)

    texts = [(one.push(a), other.push(b)) for a, b in itertools.zip_longest(first, second, fillvalue=10**6)]

    assert ["".join(pieces) for pieces in zip(*texts, strict=True)] == ["😀", "日"]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_text_of_byte_tokens_comes_character_by_character(kind: str) -> None:
    text = "ሰላም ለዓለም\n😀"
    stream = decoder_for(kind).stream(True)

    given = [[stream.push(token) for token in ids_of_bytes(kind, char.encode())] for char in text]

    assert given == [[""] * (len(char.encode()) - 1) + [char] for char in text]
    assert stream.flush() == ""


def test_bytes_that_are_no_character_leave_the_text_before_and_after_them() -> None:
    data = "é日".encode() + b"\xffa\xe6\x97" + "é".encode() + b"\xf0\x9f"

    text = fold(decoder_for("gemma").stream(True), ids_of_bytes("gemma", data))

    assert text == f"é日{REPLACEMENT}a{REPLACEMENT * 2}é{REPLACEMENT * 2}"


@pytest.mark.parametrize(("kind", "alone"), [("llama", "the the"), ("metaspace", "the the"), ("gemma", " the the")])
def test_a_text_that_continues_another_keeps_its_first_space(kind: str, alone: str) -> None:
    token_id = tokenizer_of(kind).token_to_id("▁the")
    assert token_id is not None

    assert fold(decoder_for(kind).stream(True), [token_id] * 2) == alone
    assert fold(decoder_for(kind).stream(True, continues_text=True), [token_id] * 2) == " the the"


def text_until_stop(stream: DecodeStream, stop: StopMatcher, ids: Sequence[int]) -> tuple[str, int]:
    """The text, and the number of ids that it took."""
    text = ""
    for n, token_id in enumerate(ids, 1):
        text += stop.push(stream.push(token_id))
        if stop.matched is not None:
            return text, n
    return text + stop.push(stream.flush()) + stop.flush(), len(ids)


@pytest.mark.parametrize("kind", ["byte level", "gemma"])
def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(kind: str) -> None:
    decoder = decoder_for(kind)
    n_stopped = 0
    for ids in random_sequences(kind, 2_000, seed=5):
        texts = [expected_text(kind, ids[:n]) for n in range(len(ids) + 1)]
        for stop in ("the", " a", "\n", "日日", "é", "€\n", "aa"):
            stopped = ((text.partition(stop)[0], n) for n, text in enumerate(texts) if stop in text)
            expected = next(stopped, (texts[-1], len(ids)))
            n_stopped += expected[0] != texts[-1]

            assert text_until_stop(decoder.stream(True), StopMatcher((stop,)), ids) == expected, (ids, stop)
    assert n_stopped > 100


def test_the_bytes_of_the_tokens_add_up_to_the_text() -> None:
    for kind in ("smollm2", "byte level"):
        tokenizer, decoder = tokenizer_of(kind), decoder_for(kind)
        for ids in random_sequences(kind, 1_000, seed=4):
            data = b"".join(map(decoder.token_bytes, ids))
            assert data.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "token", "data"),
    [
        ("smollm2", "Ġworld", b" world"),
        ("smollm2", "<|im_end|>", b"<|im_end|>"),
        ("byte level", "ð", b"\xf0"),
        ("llama", "▁the", b" the"),
        ("llama", "<0xF0>", b"\xf0"),
        ("metaspace", "▁the", b" the"),
        ("word piece", "the", b" the"),
        ("word piece", "##a", b"a"),
    ],
)
def test_token_bytes_are_what_a_token_adds_in_the_middle_of_a_text(kind: str, token: str, data: bytes) -> None:
    token_id = tokenizer_of(kind).token_to_id(token)
    assert token_id is not None

    assert decoder_for(kind).token_bytes(token_id) == data
    assert decoder_for(kind).token_text(token_id) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_outside_the_vocabulary_adds_nothing(kind: str) -> None:
    assert decoder_for(kind).token_bytes(10**6) == b""
    assert fold(decoder_for(kind).stream(True), [10**6]) == ""


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("smollm2", "<|im_end|>"),
        ("smollm2", "ð"),
        *itertools.product(["llama", "word piece"], ["<s>", "", "▁", REPLACEMENT, "<0xF0>", "<0x0A>"]),
    ],
)
def test_no_token_makes_a_long_text_slow(kind: str, token: str) -> None:
    token_id = tokenizer_of(kind).token_to_id(token)
    assert token_id is not None

    def decode(count: int) -> None:
        fold(decoder_for(kind).stream(True), [token_id] * count)

    decode(20_000)  # fills the tables
    assert growth(decode, 20_000) < 10


def test_decoding_a_token_takes_little_more_than_a_lookup() -> None:
    ids = tokenizer_of("smollm2").encode("The capital of France is Paris, as everybody knows.") * 1_000
    table = dict.fromkeys(ids, "text")

    def look_up() -> None:
        "".join([table[token_id] for token_id in ids])

    decode_s = cpu_seconds(lambda: fold(decoder_for("smollm2").stream(True), ids))

    assert decode_s < 50 * cpu_seconds(look_up)  # 3 to 8 times measured


def test_making_a_decoder_does_not_read_the_vocabulary() -> None:
    tokenizer = tokenizer_of("smollm2")

    assert cpu_seconds(lambda: make_decoder(tokenizer)) < cpu_seconds(tokenizer.to_json) / 10  # a 2,000th measured
