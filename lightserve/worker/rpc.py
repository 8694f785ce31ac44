"""The worker's end of rpyc: steps come in as bytes, results go out as bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import rpyc
from rpyc.core import Channel, SocketStream

from lightserve.io_struct import (
    GrammarSpec,
    KvFetch,
    KvFetched,
    KvFlush,
    KvFlushed,
    KvLoaded,
    KvLookup,
    KvReceived,
    LoraLoad,
    LoraLoaded,
    ProfileCommand,
    ProfileResult,
    Step,
    StepResult,
)
from lightserve.utils.codec import encode, make_decode

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "log_exceptions": False}

GetResult = Callable[[], StepResult]
Launch = Callable[[Step], GetResult]  # starts a step, and returns a function that waits for its result
CompileGrammar = Callable[[GrammarSpec, tuple[int, ...]], None]  # compiles a grammar, for these end tokens
LoadLora = Callable[[LoraLoad], LoraLoaded]  # reads an adapter into host memory
WaitForLoad = Callable[[int], KvLoaded]  # waits for the end of a load of KV


class LowerTierCalls(Protocol):
    def lookup(self, command: KvLookup) -> list[int]: ...

    def fetch(self, command: KvFetch) -> KvFetched: ...

    def flush(self, command: KvFlush) -> KvFlushed: ...


class KvInboxCalls(Protocol):
    def next_received(self) -> list[KvReceived]: ...

    def cancel(self, ticket: int) -> None: ...


RunProfile = Callable[["ModelRpc", ProfileCommand], ProfileResult]  # starts or ends a profile of these steps

decode_step = make_decode(Step)
_decode_profile = make_decode(ProfileCommand)
_decode_lora = make_decode(LoraLoad)
_decode_load_id = _decode_ticket = make_decode(int)
_decode_lookup, _decode_fetch, _decode_flush = make_decode(KvLookup), make_decode(KvFetch), make_decode(KvFlush)
_decode_grammar = make_decode(tuple[GrammarSpec, tuple[int, ...]])


class ModelRpc(rpyc.Service):  # type: ignore[misc]  # rpyc is untyped
    """Serves the connection for steps with as many threads as steps may be in flight.

    One thread waits for a result while another reads the next step. Only the thread that holds ``_launching`` reads and
    launches, so steps are launched in the order in which they come.
    """

    def __init__(self, launch: Launch) -> None:
        self.failure: BaseException | None = None
        self.launch = launch  # a profile replaces it for a while
        self.plain_launch = launch
        self._launching = threading.Lock()
        self._thread = threading.local()

    def on_connect(self, connection: Any) -> None:
        self._connection = connection

    def exposed_run(self, command: bytes) -> bytes:
        try:
            began_s = time.monotonic()
            collect = self.launch(decode_step(command))
            launch_s = time.monotonic() - began_s
            self._let_others_launch()
            return encode(msgspec.structs.replace(collect(), launch_s=launch_s))
        except BaseException as error:  # this process reports it; rpyc would raise it in the router
            self.failure = self.failure or error
            self._connection.close()
            return b""

    def serve(self) -> None:
        """Until the router closes the connection or a step fails."""
        try:
            while not self._connection.closed:
                self._launching.acquire()
                self._thread.is_launching = True
                try:
                    self._connection.serve(None)
                finally:
                    self._let_others_launch()
        except EOFError:  # either side has closed it
            pass
        except RuntimeError:  # rpyc releases its lock twice if another thread closes it while this one sends
            if not self._connection.closed:
                raise

    def _let_others_launch(self) -> None:
        if self._thread.is_launching:
            self._thread.is_launching = False
            self._launching.release()


class GrammarRpc(rpyc.Service):  # type: ignore[misc]
    """Serves the connection for grammars."""

    def __init__(self, compile_grammar: CompileGrammar) -> None:
        self._compile_grammar = compile_grammar

    def exposed_compile_grammar(self, command: bytes) -> None:
        self._compile_grammar(*_decode_grammar(command))


class LoraRpc(rpyc.Service):  # type: ignore[misc]
    """Serves the connection for adapters, if there is one."""

    def __init__(self, load_lora: LoadLora) -> None:
        self._load_lora = load_lora

    def exposed_load_lora(self, command: bytes) -> bytes:
        return encode(self._load_lora(_decode_lora(command)))


class KvLoadRpc(rpyc.Service):  # type: ignore[misc]
    """Serves the connection for loads of KV, if there is one."""

    def __init__(self, wait_for_load: WaitForLoad) -> None:
        self._wait_for_load = wait_for_load

    def exposed_wait_for_load(self, load_id: bytes) -> bytes:
        return encode(self._wait_for_load(_decode_load_id(load_id)))


class LowerTierRpc(rpyc.Service):  # type: ignore[misc]
    """Serves a connection for the KV tiers below host memory. There is one for each method, so that none waits."""

    def __init__(self, tiers: LowerTierCalls) -> None:
        self._tiers = tiers

    def exposed_lookup(self, command: bytes) -> bytes:
        return encode(self._tiers.lookup(_decode_lookup(command)))

    def exposed_fetch(self, command: bytes) -> bytes:
        return encode(self._tiers.fetch(_decode_fetch(command)))

    def exposed_flush(self, command: bytes) -> bytes:
        return encode(self._tiers.flush(_decode_flush(command)))


class KvInboxRpc(rpyc.Service):  # type: ignore[misc]
    """Serves a connection for KV that other engines send. There is one for each method, so that none waits."""

    def __init__(self, inbox: KvInboxCalls) -> None:
        self._inbox = inbox

    def exposed_next_received(self, _: bytes) -> bytes:
        return encode(self._inbox.next_received())

    def exposed_cancel(self, ticket: bytes) -> bytes:
        self._inbox.cancel(_decode_ticket(ticket))
        return b""


class ProfileRpc(rpyc.Service):  # type: ignore[misc]
    """Serves the connection for profiles, if there is one."""

    def __init__(self, run_profile: RunProfile, rpc: ModelRpc) -> None:
        self._run_profile = run_profile
        self._rpc = rpc

    def exposed_profile(self, command: bytes) -> bytes:
        return encode(self._run_profile(self._rpc, _decode_profile(command)))


def ignore_grammar(grammar: GrammarSpec, eos_ids: tuple[int, ...]) -> None:
    """For workers without grammars."""


class StepServer:
    """Listens on a unix socket for the only router.

    Its first connection is for steps, its second for grammars. The next ones are for adapters, for ``others`` of
    ``serve`` (KV tiers and KV of other engines) and for profiles, if the server has them.
    """

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(16)  # more than the router has connections

    def serve(
        self,
        launch: Launch,
        depth: int = 1,
        compile_grammar: CompileGrammar = ignore_grammar,
        run_profile: RunProfile | None = None,
        load_lora: LoadLora | None = None,
        others: Sequence[rpyc.Service] = (),
    ) -> None:
        """Run the router's steps, up to ``depth`` in flight, until it closes the connection or a step fails.

        ``others`` have a connection and a thread each, in this order, between those for adapters and for profiles.
        """
        connected, _ = self._listener.accept()
        rpc = ModelRpc(launch)
        rpc._connect(Channel(SocketStream(connected), compress=False), RPYC_CONFIG)
        threads = [threading.Thread(target=rpc.serve, daemon=True) for _ in range(depth - 1)]
        services: list[rpyc.Service] = [GrammarRpc(compile_grammar)]
        if load_lora is not None:
            services.append(LoraRpc(load_lora))
        services += others
        if run_profile is not None:
            services.append(ProfileRpc(run_profile, rpc))
        accepting = threading.Thread(target=self._serve_others, args=(services,), daemon=True)
        for thread in (*threads, accepting):
            thread.start()
        rpc.serve()
        for thread in threads:
            thread.join()
        with suppress(OSError):  # not every system can shut a listener down
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread may still wait for a connection
        if rpc.failure is not None:
            raise rpc.failure

    def serve_grammars(self, compile_grammar: CompileGrammar) -> None:
        self._serve_others([GrammarRpc(compile_grammar)])

    def _serve_others(self, services: list[rpyc.Service]) -> None:
        """Each in a thread of its own: a step never waits behind a compilation or a profile."""
        for service in services:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # shut down
                return
            connection = service._connect(Channel(SocketStream(connected), compress=False), RPYC_CONFIG)
            threading.Thread(target=connection.serve_all, daemon=True).start()
