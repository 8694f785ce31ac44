"""Compiled grammars: the allowed tokens, compared with all texts of small languages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar import compiler as grammar_compiler
from lightserve.text.grammar.compiler import GrammarCompiler, MatcherCache, mask_of
from lightserve.text.grammar.specs import choice_grammar, schema_grammar, structural_tag_grammar
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from test.small_text import EOS, small_tokenizer
from test.text.json_schema.hostile import chain_of_branches, chain_of_objects, nested

TOKENIZER = small_tokenizer()
EOS_ID = TOKENIZER.eos_id or 0
COMPILER = GrammarCompiler(GrammarVocabulary.of(TOKENIZER, 131, (EOS_ID,)))


def allowed(matcher: LLMatcher) -> set[int]:
    bitmask = allocate_token_bitmask(1, COMPILER.vocab_size)
    fill_next_token_bitmask(matcher, bitmask)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def words(*choices: str, times: range) -> set[str]:
    return {"".join(parts) for count in times for parts in product(choices, repeat=count)}


NUMBERS = {str(i) for i in range(131)}
LANGUAGES: dict[str, tuple[GrammarSpec, set[str]]] = {
    "regex": (GrammarSpec("regex", "(ab|ba|c){1,3}"), words("ab", "ba", "c", times=range(1, 4))),
    "regex with an empty word": (GrammarSpec("regex", "(a|bab){0,2}"), words("a", "bab", times=range(3))),
    "choice": (choice_grammar(["a", "ab", "abc", "12", ""]), {"a", "ab", "abc", "12", ""}),
    "gbnf": (GrammarSpec("ebnf", 'root ::= x "-" x\nx ::= "a" | "12" | "123"'), set()),
    "lark": (GrammarSpec("lark", 'start: x "-" x\nx: "a" | "12" | "123"'), set()),
    "integers": (schema_grammar({"type": "integer", "minimum": 0, "maximum": 130}), NUMBERS),
    "enum": (schema_grammar({"enum": [1, True, "ab"]}), {"1", "true", '"ab"'}),
}
for name in ("gbnf", "lark"):
    LANGUAGES[name] = (LANGUAGES[name][0], {f"{a}-{b}" for a, b in product(("a", "12", "123"), repeat=2)})


def texts_of(matcher: LLMatcher, before: str = "") -> Iterator[str]:
    """All texts that the allowed tokens can produce. Also checks is_accepting and is_stopped on the way."""
    following = allowed(matcher)
    assert following, f"nothing may follow {before!r}"
    assert matcher.is_accepting() == (EOS_ID in following)
    assert matcher.is_stopped() <= (following == {EOS_ID})
    if EOS_ID in following:
        yield before
    for token_id in following - {EOS_ID}:
        after = matcher.deep_copy()
        assert after.consume_token(token_id)
        yield from texts_of(after, before + TOKENIZER.decode([token_id]))


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_allowed_tokens_produce_exactly_the_language(name: str) -> None:
    spec, language = LANGUAGES[name]

    assert set(texts_of(COMPILER.compile(spec))) == language


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_token_that_leaves_the_language_is_refused(name: str) -> None:
    spec, language = LANGUAGES[name]
    beginnings = {word[:length] for word in language for length in range(len(word) + 1)}

    for prefix in beginnings:
        matcher = COMPILER.compile(spec)
        assert matcher.consume_tokens(TOKENIZER.encode(prefix))
        for token_id in set(range(TOKENIZER.vocab_size)) - {EOS_ID}:
            is_beginning = prefix + TOKENIZER.decode([token_id]) in beginnings
            assert matcher.deep_copy().consume_token(token_id) == is_beginning


def test_any_tokenization_of_a_text_is_allowed() -> None:
    for pieces in (["abc"], ["ab", "c"], ["a", "b", "c"]):
        matcher = COMPILER.compile(GrammarSpec("regex", "abc"))
        ids = [TOKENIZER.token_to_id(piece) or 0 for piece in pieces]

        assert matcher.consume_tokens(ids)
        assert matcher.is_stopped()


def test_white_space_in_json_is_limited() -> None:
    matcher = COMPILER.compile(GrammarSpec("json_object"))
    assert matcher.consume_tokens(TOKENIZER.encode("{"))

    space = TOKENIZER.encode(" ")
    count = next(i for i in range(100) if not matcher.consume_tokens(space))

    assert 1 <= count <= 32


def test_a_structural_tag_constrains_only_the_text_after_its_trigger() -> None:
    tag = {"structures": [{"begin": "xyz", "schema": {"enum": [12]}, "end": "-"}], "triggers": ["xy"]}
    matcher = COMPILER.compile(structural_tag_grammar(tag))

    assert matcher.consume_tokens(TOKENIZER.encode("abc x xy"))
    assert allowed(matcher) == {TOKENIZER.token_to_id("z")}
    assert matcher.consume_tokens(TOKENIZER.encode("z12-"))
    assert EOS_ID in allowed(matcher)
    assert matcher.consume_tokens(TOKENIZER.encode("abc"))


BAD: dict[str, GrammarSpec] = {
    "a regex that is none": GrammarSpec("regex", "(a"),
    "a regex that is too long": GrammarSpec("regex", "a" * 20_000),
    "a regex that looks around": GrammarSpec("regex", "(?=a)b"),
    "no JSON": GrammarSpec("json_schema", "{"),
    "no object": GrammarSpec("json_schema", "[]"),
    "an unknown type": schema_grammar({"type": "nothing"}),
    "a schema that nothing fulfils": schema_grammar({"type": "object", "required": ["a"], "properties": {"a": False}}),
    "a keyword that cannot be enforced": schema_grammar({"type": "array", "uniqueItems": True}),
    "a GBNF that is none": GrammarSpec("ebnf", "root ::= ("),
    "nested beyond Python's stack": GrammarSpec("ebnf", "root ::= " + "(" * 10_000),
    "an unknown rule": GrammarSpec("lark", "start: x"),
    "a tag without a trigger": structural_tag_grammar(
        {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}
    ),
    "a tag of no structures": structural_tag_grammar({"structures": [], "triggers": ["b"]}),
    "a tag of nothing": structural_tag_grammar({}),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_grammar_is_refused_with_a_short_message(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        COMPILER.compile(BAD[name])

    assert len(str(refused.value)) < 1000


def test_the_error_about_a_schema_that_is_no_object_names_the_structure() -> None:
    tag = {"structures": [{"begin": "<call>", "schema": 5, "end": ""}], "triggers": ["<"]}

    with pytest.raises(InvalidRequestError, match="schema of the structure '<call>' must be an object"):
        COMPILER.compile(structural_tag_grammar(tag))


def test_keywords_that_cannot_be_enforced_are_ignored_if_the_schema_is_not_strict() -> None:
    matcher = COMPILER.compile(schema_grammar({"type": "array", "uniqueItems": True}, is_strict=False))

    assert matcher.consume_tokens(TOKENIZER.encode("[1,1]"))
    assert matcher.is_accepting()


@pytest.mark.parametrize("schema", [nested(200), chain_of_branches(3000), chain_of_objects(1000)], ids=len)
def test_a_schema_beyond_a_limit_is_refused_before_it_is_compiled(schema: dict[str, Any]) -> None:
    """llguidance would use up its stack and end the process."""
    tag = {"structures": [{"begin": "a", "schema": schema, "end": ""}], "triggers": ["a"]}

    with pytest.raises(InvalidRequestError, match="levels deep"):
        schema_grammar(schema)
    with pytest.raises(InvalidRequestError, match="levels deep"):
        structural_tag_grammar(tag)
    with pytest.raises(InvalidRequestError, match="levels deep"):
        COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))


def test_matchers_of_one_grammar_are_independent() -> None:
    spec = GrammarSpec("regex", "(a|b)c")
    one, other = COMPILER.compile(spec), COMPILER.compile(spec)

    assert one.consume_tokens(TOKENIZER.encode("a"))

    assert allowed(one) == {TOKENIZER.token_to_id("c")}
    assert allowed(other) == {TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")}


def test_only_the_most_recent_grammars_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_MIB", 2)
    compiler = GrammarCompiler(GrammarVocabulary.of(TOKENIZER, 131, (EOS_ID,)))
    first, second, third = (GrammarSpec("regex", text) for text in ("a", "b", "c"))

    compiler.compile(first)
    compiler.compile(second)
    compiler.compile(first)
    compiler.compile(third)

    assert compiler.find(second) is None
    assert compiler.find(first) is not None
    assert compiler.find(third) is not None


def test_a_large_grammar_takes_the_place_of_several() -> None:
    cache = MatcherCache(max_mib=8)
    small = [GrammarSpec("regex", str(i)) for i in range(4)]
    large = GrammarSpec("regex", "a", memory_mib=6)

    for spec in (*small, large):
        cache.add(spec, COMPILER.build(spec))
    assert [spec for spec in (*small, large) if cache.find(spec)] == [*small[2:], large]

    cache.discard(large)
    for spec in (*small, *small):
        cache.add(spec, COMPILER.build(spec))
    assert [spec for spec in (*small, large) if cache.find(spec)] == small


def test_lanes_compile_separately_and_share_one_cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_MIB", 4)
    one, other = GrammarCompiler(GrammarVocabulary.of(TOKENIZER, 131, (EOS_ID,))).lanes(2)
    specs = [GrammarSpec("regex", text) for text in ("a", "b", "c")]

    for spec in specs:
        one.compile(spec)

    assert [one.find(spec) is not None for spec in specs] == [False, True, True]
    assert all(other.find(spec) is None for spec in specs)
    assert allowed(other.compile(specs[1])) == allowed(one.compile(specs[1]))


def test_the_end_tokens_of_the_server_end_an_output() -> None:
    compiler = GrammarCompiler(GrammarVocabulary.of(TOKENIZER, 131, (0, 5)))

    matcher = compiler.compile(GrammarSpec("regex", "12"))
    matcher.consume_tokens(TOKENIZER.encode("12"))

    assert allowed(matcher) == {0, 5}
    assert TOKENIZER.token_to_id(EOS) not in (0, 5)


def test_a_mask_has_the_bits_of_its_tokens() -> None:
    bits = np.unpackbits(mask_of((0, 33, 63, 500), 70).view(np.uint8), bitorder="little")

    assert np.flatnonzero(bits).tolist() == [0, 33, 63]


def test_a_spec_contains_its_schema_as_json() -> None:
    assert json.loads(schema_grammar({"type": "object"}).text) == {"type": "object"}


CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
ENDLESS = {
    "a schema of itself": schema_grammar({"$ref": "#"}),
    "a cycle of schemas": schema_grammar(CYCLE),
    "a rule of itself": GrammarSpec("ebnf", "root ::= root"),
    "a schema elsewhere": schema_grammar({"$ref": "http://127.0.0.1:9/schema"}),
    "a schema in a file": schema_grammar({"$ref": "file:///etc/passwd"}),
    "a file of rules": GrammarSpec("lark", '%import /etc/passwd\nstart: "a"'),
    "a product of schemas": schema_grammar(
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(12)]}
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_or_unresolved_grammar_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used"):
        COMPILER.compile(ENDLESS[name])


@pytest.mark.parametrize("spec", [GrammarSpec("regex", "a\0b"), choice_grammar(["a\0b"])], ids=["regex", "choice"])
def test_a_nul_is_a_character_and_does_not_end_the_text(spec: GrammarSpec) -> None:
    matcher = COMPILER.compile(spec)

    assert matcher.consume_tokens(TOKENIZER.encode("a"))
    assert not matcher.is_accepting()
    assert not matcher.deep_copy().consume_tokens(TOKENIZER.encode("b"))
