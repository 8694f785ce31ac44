"""Grammars of requests, compiled by llguidance. Neither torch nor a process is known here.

The HTTP process compiles a grammar to refuse a bad one before any token, the workers to obey it. The text of a spec is

    json_schema     a JSON schema
    json_object     empty: any JSON object
    regex           a regular expression that the whole answer matches, in the syntax of Rust's regex crate
    choice          a JSON list of strings
    lark            a grammar in llguidance's dialect of Lark
    ebnf            one in GBNF or in Lark
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text, in which a trigger
                    begins a structure
    prefix          a text that the answer begins with. What follows is free: who obeys it need not go on then
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from copy import copy
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from lightserve.errors import InvalidRequestError
from lightserve.io_struct import GrammarSpec
from lightserve.model_files.tokenizer import Tokenizer

MAX_REGEX_LENGTH = 16 * 1024  # characters
MAX_KEPT = 256  # compiled grammars
MAX_NESTING = 64  # of the JSON in a grammar: llguidance and Python recurse into it
MAX_MESSAGE_LENGTH = 500  # of an error: it quotes the grammar
# What a grammar may cost. With the defaults a mask of (a{1000}){1000} takes a second, with these a tenth of it.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=20_000,  # 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Whitespace without end is what small models fall into when nothing else is allowed that they would say.
JSON_DEFAULTS: Any = {"whitespace_pattern": r"[ \t\n\r]{1,16}"}


def schema_grammar(schema: dict[str, Any], is_strict: bool = True) -> GrammarSpec:
    """Any JSON that a schema allows; if it is not strict, what cannot be enforced is ignored and not refused."""
    if not is_strict:
        options = schema.get("x-guidance")
        schema = schema | {"x-guidance": (options if isinstance(options, dict) else {}) | {"lenient": True}}
    return _spec("json_schema", schema)


def choice_grammar(choices: list[str]) -> GrammarSpec:
    """One of these texts."""
    return _spec("choice", choices)


def structural_tag_grammar(tag: dict[str, Any]) -> GrammarSpec:
    return _spec("structural_tag", tag)


def _spec(kind: Any, value: Any) -> GrammarSpec:
    check_nesting(value)
    return GrammarSpec(kind, json.dumps(value, ensure_ascii=False))


def check_nesting(value: Any) -> None:
    """InvalidRequestError where JSON is nested too deeply to be part of a grammar."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        children = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in children if isinstance(item, dict | list)]
    if level:
        raise InvalidRequestError(f"the grammar is nested more than {MAX_NESTING} levels deep")


class GrammarCompiler:
    """Compiles for one tokenizer, from any thread, and keeps the last grammars.

    To make one takes 0.3 s for 50,000 tokens, in which no other thread of the process runs.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int = 0, eos_ids: tuple[int, ...] = ()) -> None:
        """``vocab_size`` of the model; ``eos_ids`` may end an answer that is complete."""
        self._special_tokens = tokenizer.special_tokens
        self._tokenizer = _ll_tokenizer(tokenizer, vocab_size, eos_ids)
        self._max_kept = MAX_KEPT
        self._kept: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def lanes(self, count: int) -> list[GrammarCompiler]:
        """Compilers that keep as much as this one together. Matchers of two of them share no lexer."""
        lanes = [copy(self) for _ in range(count)]
        for lane in lanes:
            lane._max_kept = MAX_KEPT // count
            lane._kept, lane._lock = OrderedDict(), threading.Lock()
        return lanes

    @property
    def vocab_size(self) -> int:
        """At least that of the model."""
        return self._tokenizer.vocab_size

    def find(self, spec: GrammarSpec) -> LLMatcher | None:
        """A matcher at its beginning, if the grammar was compiled lately."""
        with self._lock:
            if spec not in self._kept:
                return None
            self._kept.move_to_end(spec)
            return self._kept[spec].deep_copy()

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher at its beginning, for one answer. InvalidRequestError tells what is wrong with the grammar."""
        found = self.find(spec)
        if found is not None:
            return found
        matcher = LLMatcher(self._tokenizer, _llguidance(spec, self._special_tokens), limits=LIMITS, log_level=0)
        if not matcher.is_error():  # the first mask shows what is too complex, and later ones gain from it
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self.vocab_size))
        if matcher.is_error():
            raise _error(matcher.get_error())
        with self._lock:
            self._kept[spec] = matcher
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
            return matcher.deep_copy()


def _ll_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    vocab_size = max(vocab_size, tokenizer.vocab_size)
    default = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    try:
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_ids) or default or None)
    except ValueError as error:
        raise InvalidRequestError(f"structured output does not work with this model's tokenizer: {error}") from error


def _llguidance(spec: GrammarSpec, special_tokens: frozenset[str]) -> str:
    """The grammar as llguidance takes it, in Lark or as JSON."""
    text = _without_before(spec, special_tokens)
    if not spec.before:
        return text
    answer = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": spec.before}, {**answer, "name": "answer"}]})


def _without_before(spec: GrammarSpec, special_tokens: frozenset[str]) -> str:
    try:
        if spec.kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults=JSON_DEFAULTS)
        if spec.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.text, defaults=JSON_DEFAULTS)
        if spec.kind == "structural_tag":
            return _tagged(json.loads(spec.text), special_tokens)
        if spec.kind == "prefix":
            return grammar_from("regex", _literal(spec.text) + "(?s:.*)")
        if spec.kind == "regex" and len(spec.text) > MAX_REGEX_LENGTH:
            raise InvalidRequestError(f"a regular expression has at most {MAX_REGEX_LENGTH} characters")
        return grammar_from(spec.kind, spec.text)
    except (ValueError, RecursionError) as error:
        raise _error(str(error)) from error


def _literal(text: str) -> str:
    """A regular expression of this text alone."""
    return "".join([char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text])


def _tagged(tag: Any, special_tokens: frozenset[str]) -> str:
    """Free text with structures: vLLM's and SGLang's older form of a structural tag."""
    try:
        structures = [(one["begin"], one["schema"], one["end"]) for one in tag["structures"]]
        triggers = list(tag["triggers"])
    except (KeyError, TypeError) as error:
        raise InvalidRequestError(
            "a structural tag has structures, each with begin, schema and end, and triggers"
        ) from error
    texts = [*triggers, *(text for begin, _, end in structures for text in (begin, end))]
    if not structures or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("a structural tag has one structure or more, and texts in them")
    tags = [_structure(triggers, *structure) for structure in structures]
    is_special = all(one.trigger in special_tokens for one in tags)
    return StructTag.to_grammar(tags, assume_special=is_special)


def _structure(triggers: list[str], begin: str, schema: Any, end: str) -> StructTag:
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise InvalidRequestError(f"a structure begins with none of the triggers: {begin[:100]!r}")
    if not isinstance(schema, dict):
        raise InvalidRequestError("the schema of a structure must be an object")
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar cannot be used: {message.strip()[:MAX_MESSAGE_LENGTH]}")


def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """A mask of these tokens, uint32; those beyond the vocabulary are in none."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in token_ids:
        if token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask
