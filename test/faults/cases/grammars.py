"""Schemas and grammars that are small and expensive, and the process that compiles them."""

from __future__ import annotations

import signal
from operator import sub
from typing import Any

from test.faults.case import Case
from test.faults.cases.processes import STEP, Fault
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import Reaction, same_text, streams_continue
from test.text.grammar.test_lark_rules import rules
from test.text.json_schema.hostile import chain_of_branches, chain_of_objects

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
ITSELF = {"$ref": "#/$defs/x"}
BRANCHES_TO_ITSELF = {"type": "object", "properties": {"a": ITSELF}, "$defs": {"x": {"anyOf": [ITSELF] * 3}}}
MAX_GROWTH_BYTES = 64 * 2**20  # of a process while many grammars come
MANY_PROPERTIES = {f"f{i}": {"type": "string"} for i in range(8500)}


def ask(*bodies: dict[str, Any]) -> Fault:
    def fault(context: FaultContext) -> None:
        for body in bodies:
            status, _ = context.client.post(CHAT, {"messages": HI, "max_tokens": 4, **body})
            context.statuses.append(status)

    return fault


def with_schema(schema: dict[str, Any]) -> Fault:
    """As the schema of the answer, and of the arguments of a tool that must be called."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return ask({"response_format": answer}, {"tools": [tool], "tool_choice": "required"})


def texts(number: int, count: int) -> dict[str, Any]:
    """12,000 texts are 145 kB, and 231 MiB when they are compiled."""
    return {"guided_grammar": "start: " + " ".join(f'"a{number}_{i}"' for i in range(count))}


def flood_with_grammars(context: FaultContext) -> None:
    processes = [one for name, group in context.server.processes().items() if name != "ls-grammar" for one in group]
    before = [process.memory_info().rss for process in processes]
    ask(*(texts(number, 12_000) for number in range(100, 108)))(context)
    after = [process.memory_info().rss for process in processes]
    assert max(map(sub, after, before)) < MAX_GROWTH_BYTES


def kill_the_grammar_process(context: FaultContext) -> None:
    context.wait_until(lambda: len(context.server.processes().get("ls-grammar", ())) == 3)
    for process in context.server.processes()["ls-grammar"]:
        process.send_signal(signal.SIGKILL)
    ask({"guided_regex": "[ab]+"}, {"guided_regex": "[bc]+"})(context)


def gets(status: int) -> Reaction:
    """The status of the fault's requests, while streams go on."""

    def wait(context: FaultContext) -> None:
        assert set(context.statuses) == {status}, context.statuses
        streams_continue(context)

    return Reaction(f"{status}; streams go on, same text", wait, same_text)


def _case(name: str, fault: Fault, status: int, is_long: bool = False) -> Case:
    return Case(name, fault, gets(status), STREAMING, flags=STEP, within_s=30.0, is_long=is_long)


STRICT_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": BRANCHES_TO_ITSELF}}
SLOW = {"type": "object", "properties": MANY_PROPERTIES, "additionalProperties": True}
CASES = [
    _case("a schema of 3,000 references", with_schema(chain_of_branches(3000)), 400),
    _case("a schema of 1,000 objects in one another", with_schema(chain_of_objects(1000)), 400),
    _case("a grammar of 3,000 rules in one another", ask({"guided_grammar": rules(3000)}), 400),
    _case("a strict tool whose schema leads to itself three times", ask({"tools": [STRICT_TOOL]}), 200),
    _case("eight grammars of 12,000 texts", flood_with_grammars, 400),
    _case("a schema that takes long to compile", ask({"guided_json": SLOW}), 400, is_long=True),
    _case("kill -9 ls-grammar, streaming", kill_the_grammar_process, 200),
]
