"""The process that compiles the grammars of clients: what kills it harms nobody else."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from lightserve.errors import InvalidRequestError, LightserveError, UnavailableError
from lightserve.httpserver.grammar import check as grammar_check
from lightserve.httpserver.grammar.check import GrammarCheck
from lightserve.messages.params import GrammarSpec
from lightserve.text.grammar.process import MAX_MEMORY_MIB
from lightserve.text.grammar.specs import schema_grammar
from test.httpserver.grammar import impatient_process
from test.small_text import small_tokenizer
from test.text.grammar.test_lark_rules import rules
from test.waiting import has_ended, wait_until

TOKENIZER = small_tokenizer()
REGEX = GrammarSpec("regex", "[ab]+")
# llguidance's own format: the limit on the depth of rules is for Lark alone
DEADLY = GrammarSpec("lark", json.dumps({"grammars": [{"lark_grammar": rules(12_000)}]}))
LARGE = GrammarSpec("lark", "start: " + " ".join(f'"a0_{i}"' for i in range(12_000)))
Result = GrammarSpec | LightserveError


@contextmanager
def checking() -> Iterator[GrammarCheck]:
    check = GrammarCheck()
    try:
        yield check
    finally:
        check.close()


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    with checking() as check:
        yield check


def results(check: GrammarCheck, *specs: GrammarSpec) -> list[Result]:
    """Of grammars that are checked at the same time."""

    async def run() -> Any:
        return await asyncio.gather(*(check.check(TOKENIZER, spec) for spec in specs), return_exceptions=True)

    found: list[Result] = asyncio.run(run())
    return found


def regexes(count: int, prefix: str = "") -> list[GrammarSpec]:
    return [GrammarSpec("regex", f"{prefix}{i}[ab]+") for i in range(count)]


def grammar_checkes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.name() == "ls-grammar" and not has_ended(one)]


def test_a_grammar_that_can_be_compiled_is_returned(check: GrammarCheck) -> None:
    assert results(check, REGEX, REGEX) == [REGEX, REGEX]


def test_the_process_is_started_once_and_not_before_the_server_is_ready() -> None:
    before = len(psutil.Process().children())
    with checking() as check:
        check.prepare(TOKENIZER)
        while_loading = len(psutil.Process().children())
        check.start()
        check.start()
        started = len(psutil.Process().children())

    assert (while_loading, started) == (before, before + 1)


def test_an_error_says_what_is_wrong_with_the_grammar(check: GrammarCheck) -> None:
    (error,) = results(check, GrammarSpec("regex", "("))

    assert isinstance(error, InvalidRequestError)
    assert "the grammar cannot be used" in str(error)


def test_a_grammar_that_kills_the_process_is_refused_and_harms_no_other(check: GrammarCheck) -> None:
    others = regexes(8)

    deadly, *rest = results(check, DEADLY, *others)

    assert isinstance(deadly, InvalidRequestError)
    assert "too deep or too large" in str(deadly)
    assert rest == others
    assert results(check, *regexes(2, "x")) == regexes(2, "x")


def test_a_grammar_that_takes_too_much_memory_is_refused_by_the_limit(check: GrammarCheck) -> None:
    large, small = results(check, LARGE, GrammarSpec("regex", "y+"))

    assert isinstance(large, InvalidRequestError)
    assert f"MiB of memory; the limit is {MAX_MEMORY_MIB}" in str(large)
    assert isinstance(small, GrammarSpec)


def test_the_memory_of_a_grammar_is_measured(check: GrammarCheck) -> None:
    small, large = results(check, REGEX, GrammarSpec("lark", "start: " + " ".join(f'"b0_{i}"' for i in range(3000))))

    assert isinstance(small, GrammarSpec)
    assert isinstance(large, GrammarSpec)
    assert small.memory_mib == 1
    assert 5 < large.memory_mib <= MAX_MEMORY_MIB


def test_a_grammar_that_takes_too_long_is_refused_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "REPLY_LIMIT_S", 600.0)  # the limit on CPU time may take long
    monkeypatch.setattr(grammar_check, "MODULE", impatient_process.__name__)
    properties = {f"f{i}": {"type": "string"} for i in range(8500)}
    slow = schema_grammar({"type": "object", "properties": properties, "additionalProperties": True})

    with checking() as check:
        late, *rest = results(check, slow, *regexes(4, "z"))

    assert isinstance(late, InvalidRequestError)
    assert f"takes longer than {impatient_process.LIMIT_S:.0f} s" in str(late)
    assert rest == regexes(4, "z")


def test_a_process_that_is_killed_is_started_again_and_nobody_is_blamed() -> None:
    with checking() as check:
        assert results(check, REGEX) == [REGEX]
        parent = grammar_checkes()[0]

        parent.send_signal(signal.SIGKILL)

        assert results(check, *regexes(4)) == regexes(4)
        assert parent.pid not in [one.pid for one in grammar_checkes()]


def test_a_grammar_that_waits_too_long_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "WAIT_LIMIT_S", 0.0)
    with checking() as check:
        (error,) = results(check, REGEX)

    assert isinstance(error, UnavailableError)


def test_too_many_grammars_at_once_are_refused_for_now(monkeypatch: pytest.MonkeyPatch, check: GrammarCheck) -> None:
    monkeypatch.setattr(grammar_check, "MAX_COMPILING", 1)
    first, second = regexes(2, "w")

    accepted, same, refused = results(check, first, first, second)

    assert accepted == same == first
    assert isinstance(refused, UnavailableError)
    assert results(check, second) == [second]


def test_only_the_last_reports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_REPORTS", 2)
    with checking() as check:
        results(check, *regexes(4))

        assert len(check._reports) == 2


AS_A_WORKER = """
from lightserve.text.grammar.compiler import STACK_BYTES, GrammarCompiler
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.utils.threads import pool_with_stack
from test.httpserver.grammar.test_process import DEADLY, TOKENIZER
compiler = GrammarCompiler(GrammarVocabulary.of(TOKENIZER))
pool_with_stack(1, "", STACK_BYTES).submit(compiler.build, DEADLY).result()
"""


def test_a_worker_has_stack_enough_even_for_what_is_too_deep_here() -> None:
    assert subprocess.run([sys.executable, "-c", AS_A_WORKER]).returncode == 0


PARENT = """
import asyncio, sys
from lightserve.httpserver.grammar.check import GrammarCheck
from test.httpserver.grammar.test_process import REGEX, TOKENIZER
check = GrammarCheck()
asyncio.run(check.check(TOKENIZER, REGEX))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_processes_end_with_their_parent(is_killed: bool) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert [one.name() for one in processes] == ["ls-grammar"] * 3

        if is_killed:
            parent.kill()

    wait_until(lambda: all(map(has_ended, processes)))
