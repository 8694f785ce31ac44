"""The limit on how deep the rules of a grammar refer to one another."""

from __future__ import annotations

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.compiler import MAX_RULE_DEPTH, GrammarCompiler, check_rules
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from test.cpu_time import growth
from test.small_text import small_tokenizer


def rules(count: int) -> str:
    """So many rules, each of which refers to the next one."""
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(count)) + f'r{count}: "z"\n'


def gbnf(count: int) -> str:
    return rules(count).replace("start:", "root:").replace(":", " ::=")


@pytest.mark.parametrize(
    "spec", [GrammarSpec("lark", rules(3000)), GrammarSpec("ebnf", gbnf(3000))], ids=lambda spec: spec.kind
)
def test_rules_that_are_too_deep_are_refused_before_they_are_compiled(spec: GrammarSpec) -> None:
    """llguidance would use up its stack and end the process."""
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_RULE_DEPTH} rules deep"):
        GrammarCompiler(GrammarVocabulary.of(small_tokenizer())).compile(spec)


DEEP = {
    "terminals": rules(2000).replace("r", "R").replace("staRt: R0", "start: R0"),
    "attributes": rules(2000).replace(": ", "[capture]: "),
    "continued lines": rules(2000).replace('"a" ', '"a"\n  | "b" '),
    "modifiers": rules(2000).replace("\nr", "\n?r"),
}
FLAT = {
    "few rules": rules(MAX_RULE_DEPTH - 2),
    "a rule of itself": 'start: start "a" | "b"',
    "rules side by side": "start: "
    + " ".join(f"r{i}" for i in range(3000))
    + "".join(f'\nr{i}: "a"' for i in range(3000)),
    "names in strings": "\n".join(f'r{i}: "r{i + 1}" // r{i + 1}' for i in range(3000)).replace("r0:", "start:"),
    "names in expressions": "\n".join(f"r{i}: /r{i + 1}/ # r{i + 1}" for i in range(3000)).replace("r0:", "start:"),
    "names in JSON": "\n".join(f'r{i}: %json {{"const": "r{i + 1}"}}' for i in range(3000)).replace("r0:", "start:"),
    "no grammar": '"\\' * 1000,
}


@pytest.mark.parametrize("name", DEEP)
def test_every_way_to_refer_to_a_rule_counts(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="rules deep"):
        check_rules(DEEP[name])


@pytest.mark.parametrize("name", FLAT)
def test_rules_that_are_not_deep_are_accepted(name: str) -> None:
    check_rules(FLAT[name])


@pytest.mark.parametrize("text", ['"\\"', "/\\/", 'r: "a" r\n', "start: r ", "\n", "r:"], ids=repr)
def test_the_check_takes_linear_time(text: str) -> None:
    assert growth(lambda count: check_rules(text * count), 80_000) < 8
