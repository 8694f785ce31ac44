"""Grammars of requests, compiled by llguidance. This module depends on neither torch nor processes.

The HTTP process compiles a grammar to reject an invalid one early; the workers compile it to apply it. GrammarSpec.text
is, for each kind,

    json_schema     a JSON schema
    json_object     empty: any JSON object
    regex           a regular expression that the whole output matches, in the syntax of Rust's regex crate
    choice          a JSON list of strings
    lark            a grammar in llguidance's dialect of Lark
    ebnf            a grammar in GBNF or in Lark
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text, in which a trigger
                    starts a structure; or {"format": ...}: see structural_format.py
    prefix          a text that the output starts with. What follows is unconstrained
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from copy import copy
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.structural_format import format_grammar
from lightserve.text.grammar.vocabulary import GrammarVocabulary, not_possible
from lightserve.text.json_schema.schema import JsonSchema, is_deeper

MAX_REGEX_LENGTH = 16 * 1024  # characters
MAX_CACHED_MIB = 256  # of compiled grammars. Most take less than 1 MiB, and count as 1
# For a thread that compiles: llguidance recurses, and what is too deep for it kills the process. The process that
# compiles a client's grammar first has a quarter of it.
STACK_BYTES = 64 * 2**20
MAX_MESSAGE_LENGTH = 500  # characters of an error: it quotes the grammar
# Limits on the cost of a grammar. With llguidance's defaults a mask of (a{1000}){1000} takes 1 s, with these 0.1 s.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=20_000,  # 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Small models emit endless white space when the grammar forbids what they would say.
JSON_DEFAULTS: Any = {"whitespace_pattern": r"[ \t\n\r]{1,16}"}
MAX_RULE_DEPTH = 1000  # llguidance recurses along rules, with about 3 kB of stack each
# of a Lark grammar what is no name: strings, regular expressions, comments. A missing end is none of our business
_LARK_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])*/?')
_LARK_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n]*:", re.MULTILINE)
_LARK_NAME = re.compile(r"[A-Za-z_]\w*")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, from any thread, and caches the most recent ones.

    The constructor takes 0.3 s for 50,000 tokens and holds the GIL.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._added_tokens = vocabulary.added_tokens
        self._tokenizer = _ll_tokenizer(vocabulary)
        self._cache = MatcherCache(MAX_CACHED_MIB)

    def lanes(self, count: int) -> list[GrammarCompiler]:
        """``count`` compilers that share the cache size of this one. Matchers of different lanes share no lexer."""
        lanes = [copy(self) for _ in range(count)]
        for lane in lanes:
            lane._cache = MatcherCache(MAX_CACHED_MIB // count)
        return lanes

    @property
    def vocab_size(self) -> int:
        """At least the model's vocabulary size."""
        return self._tokenizer.vocab_size

    def find(self, spec: GrammarSpec) -> LLMatcher | None:
        """A matcher in its start state if the compiled grammar is cached."""
        return self._cache.find(spec)

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher in its start state, for one output. InvalidRequestError says what is wrong with the grammar."""
        cached_matcher = self._cache.find(spec)
        if cached_matcher is not None:
            return cached_matcher
        matcher = self.build(spec)
        self._cache.add(spec, matcher)
        return matcher.deep_copy()

    def discard(self, spec: GrammarSpec) -> None:
        """Compile the grammar anew for the next request: its lexer, which all matchers share, is beyond a limit."""
        self._cache.discard(spec)

    def clear_cache(self) -> None:
        self._cache.clear()

    def build(self, spec: GrammarSpec) -> LLMatcher:
        """The same, not cached."""
        matcher = LLMatcher(self._tokenizer, _llguidance(spec, self._added_tokens), limits=LIMITS, log_level=0)
        if not matcher.is_error():  # the first mask detects grammars that are too complex, and warms up the lexer
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self.vocab_size))
        if matcher.is_error():
            raise _error(matcher.get_error())
        return matcher


def _ll_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    eos_ids = list(vocabulary.eos_ids) or None
    try:
        return LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=eos_ids)
    except ValueError as error:
        raise not_possible(error) from error


def _llguidance(spec: GrammarSpec, added_tokens: frozenset[str]) -> str:
    """The grammar in llguidance's format: Lark or JSON."""
    text = _without_before(spec, added_tokens)
    if not text.startswith("{"):
        check_rules(text)
    if not spec.before:
        return text
    answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": spec.before}, {**answer, "name": "answer"}]})


def _without_before(spec: GrammarSpec, added_tokens: frozenset[str]) -> str:
    try:
        if spec.kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=JSON_DEFAULTS)
        if spec.kind == "json_schema":
            JsonSchema(json.loads(spec.text)).check()
            return LLMatcher.grammar_from_json_schema(spec.text, defaults=JSON_DEFAULTS)
        if spec.kind == "structural_tag":
            tag = json.loads(spec.text)
            return format_grammar(tag["format"], added_tokens) if "format" in tag else _tagged(tag, added_tokens)
        if spec.kind == "prefix":
            return grammar_from("regex", _literal(spec.text) + "(?s:.*)")
        if spec.kind == "regex" and len(spec.text) > MAX_REGEX_LENGTH:
            raise InvalidRequestError(
                f"the regular expression has {len(spec.text)} characters; the limit is {MAX_REGEX_LENGTH}"
            )
        return grammar_from(spec.kind, spec.text)
    except (ValueError, RecursionError) as error:
        raise _error(str(error)) from error


def _literal(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join([char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text])


def _tagged(tag: Any, added_tokens: frozenset[str]) -> str:
    """Free text with structures: the older structural tags of vLLM and SGLang."""
    try:
        structures = [(structure["begin"], structure["schema"], structure["end"]) for structure in tag["structures"]]
        triggers = list(tag["triggers"])
    except (KeyError, TypeError) as error:
        raise InvalidRequestError(
            "a structural tag needs `triggers` and `structures`, each with `begin`, `schema` and `end`"
        ) from error
    texts = [*triggers, *(text for begin, _, end in structures for text in (begin, end))]
    if not structures or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("a structural tag needs a structure or more; triggers, begin and end are strings")
    tags = [_structure(triggers, *structure) for structure in structures]
    is_special = all(struct_tag.trigger in added_tokens for struct_tag in tags)
    return StructTag.to_grammar(tags, assume_special=is_special)


def _structure(triggers: list[str], begin: str, schema: Any, end: str) -> StructTag:
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise InvalidRequestError(f"the structure {begin[:100]!r} starts with none of the triggers")
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"the schema of the structure {begin[:100]!r} must be an object")
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be used: {message.strip()[:MAX_MESSAGE_LENGTH]}")


def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """A bit mask of these tokens, as uint32. Ids outside the vocabulary are ignored."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in token_ids:
        if token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def check_rules(lark: str) -> None:
    """Raise InvalidRequestError if rules refer to one another too deeply."""
    rules = _references(lark)
    if is_deeper("start", MAX_RULE_DEPTH, lambda name: rules.get(name, ()), str):
        raise InvalidRequestError(
            f"rules of the grammar refer to one another more than {MAX_RULE_DEPTH} rules deep; simplify it"
        )


def _references(lark: str) -> dict[str, list[str]]:
    """The names in each rule, in their order."""
    text = _LARK_TEXTS.sub('""', lark)
    definitions = list(_LARK_DEFINITION.finditer(text))
    starts = [*(definition.start() for definition in definitions), len(text)]
    return {
        definition[1]: _LARK_NAME.findall(text, definition.end(), end)
        for definition, end in zip(definitions, starts[1:], strict=True)
    }


class MatcherCache:
    """Any thread may use it."""

    def __init__(self, max_mib: int) -> None:
        """``max_mib`` counts what the grammars took when they were compiled. A lexer grows while it is used."""
        self._max_mib = max_mib
        self._used_mib = 0
        self._matchers: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, spec: GrammarSpec) -> LLMatcher | None:
        """A copy in the start state."""
        with self._lock:
            if spec not in self._matchers:
                return None
            self._matchers.move_to_end(spec)
            return self._matchers[spec].deep_copy()

    def add(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        with self._lock:
            self._remove(spec)
            self._matchers[spec] = matcher
            self._used_mib += spec.memory_mib
            while self._used_mib > self._max_mib:
                self._remove(next(iter(self._matchers)))

    def discard(self, spec: GrammarSpec) -> None:
        with self._lock:
            self._remove(spec)

    def clear(self) -> None:
        with self._lock:
            self._matchers.clear()
            self._used_mib = 0

    def _remove(self, spec: GrammarSpec) -> None:
        if self._matchers.pop(spec, None) is not None:
            self._used_mib -= spec.memory_mib
