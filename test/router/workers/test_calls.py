"""Calls beside steps over real unix sockets and rpyc, with workers that answer without a model."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightserve.errors import WorkerCallError
from lightserve.ipc.worker_calls import COMPILE_GRAMMAR, LOAD_LORA, LORA_FAILED, PROFILE, WorkerCall, same_reply
from lightserve.messages.params import GrammarSpec
from lightserve.messages.step import Step, StepRow
from lightserve.messages.worker_calls import CompileGrammar, LoraLoad, LoraLoaded, ProfileCommand, ProfileResult
from lightserve.router.workers.client import RpycModelClient
from lightserve.worker.rpc import CallHandler, StepServer, handler
from test.router.workers.test_client import client_of, echo, in_order, within_deadline
from test.waiting import DEADLINE_S, until

DIGITS = CompileGrammar(GrammarSpec("regex", "[0-9]+é"), (3, 4))


def workers(tmp_path: Path, *ranks: Sequence[CallHandler]) -> list[str]:
    """Ranks that run steps at once; each has its own handlers for calls."""
    paths = []
    for rank, handlers in enumerate(ranks):
        path = str(tmp_path / f"worker-{rank}")
        server = StepServer(path)
        threading.Thread(target=server.serve, args=(in_order(echo), 1, handlers), daemon=True).start()
        paths.append(path)
    return paths


def compiling(tmp_path: Path, *compiles: Callable[[CompileGrammar], None]) -> list[str]:
    return workers(tmp_path, *([handler(COMPILE_GRAMMAR, compile_grammar)] for compile_grammar in compiles))


# a call that is not in the table: what adding one takes


class Resize(msgspec.Struct, frozen=True):
    num_tokens: int


class Resized(msgspec.Struct, frozen=True):
    num_tokens: int


RESIZE: WorkerCall[Resize, Resized] = WorkerCall("resize", Resize, Resized, same_reply)


def resize_to(num_tokens: int) -> CallHandler:
    return handler(RESIZE, lambda _: Resized(num_tokens))


def test_a_new_call_is_an_entry_and_a_handler(tmp_path: Path) -> None:
    seen: list[Resize] = []

    def resize(command: Resize) -> Resized:
        seen.append(command)
        return Resized(command.num_tokens // 64 * 64)

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [handler(RESIZE, resize)], [handler(RESIZE, resize)]))

        assert await client.call(RESIZE, Resize(100)) == Resized(64)
        assert seen == [Resize(100), Resize(100)]
        client.close()

    within_deadline(scenario())


def test_ranks_that_disagree_are_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)], [resize_to(64)], [resize_to(128)]))

        with pytest.raises(WorkerCallError, match=r"^resize: the ranks disagree: rank 0 .*=64\), rank 2 .*=128\)$"):
            await client.call(RESIZE, Resize(100))
        client.close()

    within_deadline(scenario())


def test_an_error_of_a_rank_names_it_and_the_call_and_the_next_call_works(tmp_path: Path) -> None:
    def resize(command: Resize) -> Resized:
        if command.num_tokens < 0:
            raise ValueError("num_tokens is -1")
        return Resized(64)

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)], [handler(RESIZE, resize)]))

        with pytest.raises(WorkerCallError, match=r"^model worker 1: resize: ValueError: num_tokens is -1$"):
            await client.call(RESIZE, Resize(-1))
        assert await client.call(RESIZE, Resize(1)) == Resized(64)
        assert not client.is_lost
        client.close()

    within_deadline(scenario())


def test_a_reply_of_another_type_is_an_error(tmp_path: Path) -> None:
    wrong: WorkerCall[Resize, Any] = WorkerCall("resize", Resize, int, same_reply)

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [handler(wrong, lambda _: 64)]))

        with pytest.raises(WorkerCallError, match=r"model worker 0: resize: the reply is not of the type .*Resized"):
            await client.call(RESIZE, Resize(1))
        assert not client.is_lost
        client.close()

    within_deadline(scenario())


def test_a_request_of_another_type_is_an_error_of_the_rank(tmp_path: Path) -> None:
    wrong: WorkerCall[Any, Resized] = WorkerCall("resize", int, Resized, same_reply)

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)]))

        with pytest.raises(WorkerCallError, match="resize: ValidationError: Expected `object`, got `int`"):
            await client.call(wrong, 3)
        client.close()

    within_deadline(scenario())


def test_a_call_that_the_workers_do_not_serve_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)]))

        assert client.serves(RESIZE)
        assert not client.serves(LOAD_LORA)
        with pytest.raises(WorkerCallError, match="do not serve the call 'load_lora'; they serve: resize"):
            client.call(LOAD_LORA, LoraLoad(1, "/a"))
        client.close()

    within_deadline(scenario())


def test_ranks_that_serve_different_calls_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConnectionError, match="workers 0 and 1 do not serve the same calls: only one has resize"):
            await client_of(workers(tmp_path, [], [resize_to(64)]))

    within_deadline(scenario())


def test_a_call_that_takes_long_delays_neither_steps_nor_other_calls(tmp_path: Path) -> None:
    may_end = threading.Event()

    def compile_grammar(_: CompileGrammar) -> None:
        assert may_end.wait(DEADLINE_S)

    async def scenario() -> None:
        handlers = [handler(COMPILE_GRAMMAR, compile_grammar), resize_to(64)]
        client = await client_of(workers(tmp_path, handlers))
        compiled = client.call(COMPILE_GRAMMAR, DIGITS)

        assert await client.call(RESIZE, Resize(1)) == Resized(64)
        assert (await client.run(Step([StepRow(1, [7])]))).tokens[0].token.id == 7
        assert not compiled.done()
        may_end.set()
        await compiled
        client.close()

    within_deadline(scenario())


def test_a_rank_that_hangs_has_failed_after_the_timeout_and_the_others_count(tmp_path: Path) -> None:
    may_end = threading.Event()

    def hang(_: Any) -> ProfileResult:
        may_end.wait(DEADLINE_S)
        return ProfileResult(["late"])

    async def scenario() -> None:
        quick = [handler(PROFILE, lambda _: ProfileResult(["quick"]))]
        client = await client_of(workers(tmp_path, [handler(PROFILE, hang)], quick))

        result = await client.call(PROFILE, ProfileCommand(), timeout_s=0.2)

        assert result == ProfileResult(["quick"], "model worker 0: profile: it did not reply within 0.2 s")
        may_end.set()
        client.close()

    within_deadline(scenario())


def test_a_grammar_is_compiled_when_every_rank_has_compiled_it_and_steps_run_meanwhile(tmp_path: Path) -> None:
    may_end = [threading.Event(), threading.Event()]
    compiled: list[tuple[int, CompileGrammar]] = []

    def rank(number: int) -> Callable[[CompileGrammar], None]:
        def compile_grammar(command: CompileGrammar) -> None:
            assert may_end[number].wait(DEADLINE_S)
            compiled.append((number, command))

        return compile_grammar

    async def scenario() -> None:
        client = await client_of(compiling(tmp_path, rank(0), rank(1)))
        future = client.call(COMPILE_GRAMMAR, DIGITS)

        for i in range(3):  # no step waits for the compilation
            assert (await client.run(Step([StepRow(1, [i])]))).tokens[0].token.id == i
        may_end[0].set()
        await until(lambda: len(compiled) == 1)
        assert (await client.run(Step([StepRow(1, [9])]))).tokens[0].token.id == 9
        assert not future.done()
        may_end[1].set()
        await future

        assert compiled == [(0, DIGITS), (1, DIGITS)]
        client.close()

    within_deadline(scenario())


def test_a_grammar_that_cannot_be_compiled_resolves_and_the_next_one_is_compiled(tmp_path: Path) -> None:
    def compile_grammar(command: CompileGrammar) -> None:
        if command.grammar.text == "(":
            raise ValueError("an error of the compiler")

    async def scenario() -> None:
        client = await client_of(compiling(tmp_path, compile_grammar))

        await client.call(COMPILE_GRAMMAR, CompileGrammar(GrammarSpec("regex", "("), ()))
        await client.call(COMPILE_GRAMMAR, DIGITS)

        assert not client.is_lost
        client.close()

    within_deadline(scenario())


@pytest.mark.parametrize("how", ["closed", "process died"])
def test_a_call_under_way_resolves_when_the_workers_are_lost(tmp_path: Path, how: str) -> None:
    may_end = threading.Event()

    def hang(_: Resize) -> Resized:
        may_end.wait(DEADLINE_S)
        return Resized(64)

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)], [handler(RESIZE, hang)]))
        resized = client.call(RESIZE, Resize(1))
        if how == "closed":
            client.close()
        else:
            shut_down(client, RESIZE.name, rank=1)

        assert await resized is None
        assert await client.call(RESIZE, Resize(1)) is None
        may_end.set()
        client.close()

    within_deadline(scenario())


def shut_down(client: RpycModelClient, name: str, rank: int) -> None:
    """As if the process of the rank had died."""
    sock = client._calls._connections[name][rank].connection._channel.stream.sock
    sock.shutdown(socket.SHUT_RDWR)


def test_a_call_to_lost_workers_touches_no_socket_that_has_got_the_number_of_theirs(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [resize_to(64)]))
        fileno = client._calls._connections[RESIZE.name][0].fileno
        ours, theirs = socket.socketpair()  # before the number is free: they would get it
        client.close()
        os.dup2(ours.fileno(), fileno)
        is_readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(fileno, is_readable.set)

        assert await client.call(RESIZE, Resize(1)) is None
        theirs.sendall(b"x")

        await is_readable.wait()
        asyncio.get_running_loop().remove_reader(fileno)
        os.close(fileno)
        ours.close()
        theirs.close()

    within_deadline(scenario())


def test_an_adapter_is_loaded_when_every_rank_has_it_and_the_first_error_counts(tmp_path: Path) -> None:
    def rank_0(command: LoraLoad) -> LoraLoaded:
        return LoraLoaded("wrong shape" if command.path == "/misshapen" else "")

    def rank_1(command: LoraLoad) -> LoraLoaded:
        if command.path == "/unreadable":
            raise OSError("an error that no rank expects")
        return LoraLoaded()

    async def scenario() -> None:
        client = await client_of(workers(tmp_path, [handler(LOAD_LORA, rank_0)], [handler(LOAD_LORA, rank_1)]))

        assert await client.call(LOAD_LORA, LoraLoad(1, "/good")) == LoraLoaded()
        assert await client.call(LOAD_LORA, LoraLoad(2, "/misshapen")) == LoraLoaded("wrong shape")
        assert await client.call(LOAD_LORA, LoraLoad(3, "/unreadable")) == LoraLoaded(LORA_FAILED)
        assert await client.call(LOAD_LORA, LoraLoad(4, "/good")) == LoraLoaded()

        assert not client.is_lost
        client.close()

    within_deadline(scenario())
