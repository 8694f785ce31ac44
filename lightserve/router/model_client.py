"""The model workers as the router sees them: one step goes to all ranks, one list of tokens comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from lightserve.errors import WorkerDiedError
from lightserve.io_struct import (
    KV_INBOX_METHODS,
    LOWER_TIER_METHODS,
    GrammarSpec,
    HostKvSize,
    KvLoaded,
    LoraLoad,
    LoraLoaded,
    Step,
    StepResult,
    joined_results,
)
from lightserve.router.connection import RankConnections, close_all, connect_ranks
from lightserve.router.grammar_client import GrammarClient
from lightserve.router.kv_inbox_client import KvInboxClient
from lightserve.router.kv_load_client import KvLoadClient
from lightserve.router.kv_tiers.lower import LowerTierClient
from lightserve.router.lora_client import LoraClient
from lightserve.router.lower_tier_client import RpycLowerTierClient
from lightserve.utils.codec import encode, make_decode

RUN, COMPILE, LOAD_LORA, WAIT_FOR_LOAD = "run", "compile_grammar", "load_lora", "wait_for_load"  # methods of workers

decode_result = make_decode(StepResult)


class ModelClient(Protocol):
    """Runs steps in the order in which they are given; several may be in flight."""

    @property
    def is_lost(self) -> bool:
        """A worker died. The steps in flight fail with WorkerDiedError."""

    def compile_grammar(self, grammar: GrammarSpec, eos_ids: tuple[int, ...]) -> asyncio.Future[None]:
        """Have all ranks compile a grammar. The future resolves in any case, also if the grammar is wrong."""

    def run(self, step: Step) -> asyncio.Future[StepResult]: ...

    def wait_for_load(self, load_id: int) -> asyncio.Future[KvLoaded | None]:
        """Resolves when all ranks have ended a load that a step has started; None: the workers are lost."""

    @property
    def lower_tiers(self) -> LowerTierClient | None:
        """None: there are no KV tiers below host memory."""

    @property
    def kv_inbox(self) -> KvInboxClient | None:
        """None: the workers receive no KV of other engines."""

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        """Close the connections and have the workers replaced: they are lost, or a step does not end.

        ``caused_by_request``: a request caused it.
        """

    def close(self) -> None: ...


class RpycModelClient:
    """All ranks of one model behind rpyc: every rank runs every step, and some of them return the tokens.

    Steps and tokens cross as bytes: rpyc would send an object as a proxy, with one round trip per field. The event
    loop reads a reply when the socket has it, so a step in flight blocks nothing. ``on_restart`` gets the arguments of
    ``request_restart``.
    """

    def __init__(
        self,
        connections: RankConnections,
        on_restart: Callable[[str, bool], None],
        answering_ranks: Sequence[int] = (0,),
        kv_addresses: Sequence[str] = (),
    ) -> None:
        self.is_lost = False
        self._answering_ranks = answering_ranks
        self._on_restart = on_restart
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[asyncio.Future[StepResult], dict[int, StepResult]] = {}  # what is back, by rank
        self._ranks = connections[RUN]
        for rank, (_, fileno, _) in enumerate(self._ranks):
            self._loop.add_reader(fileno, self._read, rank)
        self._grammars = GrammarClient(connections[COMPILE])
        self._loras = LoraClient(connections[LOAD_LORA]) if LOAD_LORA in connections else None
        self._kv_loads = KvLoadClient(connections[WAIT_FOR_LOAD]) if WAIT_FOR_LOAD in connections else None
        self.lower_tiers = RpycLowerTierClient(connections) if LOWER_TIER_METHODS[0] in connections else None
        self.kv_inbox = KvInboxClient(connections, list(kv_addresses)) if kv_addresses else None

    @classmethod
    async def connect(
        cls,
        socket_paths: Sequence[str],
        on_restart: Callable[[str, bool], None],
        has_adapters: bool = False,
        host_kv: HostKvSize | None = None,
        answering_ranks: Sequence[int] = (0,),
        kv_addresses: Sequence[str] = (),
    ) -> RpycModelClient:
        """Raises OSError or EOFError if a worker is lost, or does not answer in time."""
        methods = [RUN, COMPILE]
        methods += [LOAD_LORA] if has_adapters else []
        methods += [WAIT_FOR_LOAD] if host_kv is not None else []
        methods += LOWER_TIER_METHODS if host_kv is not None and host_kv.lower_tiers else ()
        methods += KV_INBOX_METHODS if kv_addresses else ()
        return cls(await connect_ranks(socket_paths, methods), on_restart, answering_ranks, kv_addresses)

    def compile_grammar(self, grammar: GrammarSpec, eos_ids: tuple[int, ...]) -> asyncio.Future[None]:
        """Have all ranks compile a grammar, so that the first step of a request with it does not wait.

        The future resolves in any case, also if the grammar is wrong or a worker is lost: see GrammarClient.
        """
        return self._grammars.compile_grammar(grammar, eos_ids)

    def load_lora(self, command: LoraLoad) -> asyncio.Future[LoraLoaded | None]:
        """Have all ranks read an adapter into host memory. The future resolves to None if the workers are lost."""
        if self._loras is None:
            raise TypeError("these workers take no adapters")
        return self._loras.load(command)

    def wait_for_load(self, load_id: int) -> asyncio.Future[KvLoaded | None]:
        if self._kv_loads is None:
            raise TypeError("these workers keep no KV in host memory")
        return self._kv_loads.wait(load_id)

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._in_flight[future] = {}
        command = encode(step)
        for rank, (_, fileno, call) in enumerate(self._ranks):
            try:
                reply = call(command)
            except EOFError:  # rpyc has closed the socket: another one may get its number soon
                self._loop.remove_reader(fileno)
                self._mark_lost(f"model worker {rank} closed its connection")
                break
            if rank in self._answering_ranks:
                reply.add_callback(partial(self._on_reply, future, rank))
        return future

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        self._mark_lost(reason)
        self.close()
        self._on_restart(reason, caused_by_request)

    def close(self) -> None:
        close_all(self._loop, self._ranks)
        self._grammars.close()
        if self._loras is not None:
            self._loras.close()
        if self._kv_loads is not None:
            self._kv_loads.close()
        if self.lower_tiers is not None:
            self.lower_tiers.close()
        if self.kv_inbox is not None:
            self.kv_inbox.close()

    def _read(self, rank: int) -> None:
        connection, fileno, _ = self._ranks[rank]
        try:
            while connection.poll(0):
                pass
        except EOFError:
            self._loop.remove_reader(fileno)
            self._mark_lost(f"model worker {rank} closed its connection")

    def _on_reply(self, future: asyncio.Future[StepResult], rank: int, reply: Any) -> None:
        """An answering rank finished a step. Replies may overtake each other."""
        results = self._in_flight[future]
        if not future.done():
            results[rank] = decode_result(reply.value)
        if len(results) == len(self._answering_ranks):
            del self._in_flight[future]
            future.set_result(joined_results([results[rank] for rank in self._answering_ranks]))

    def _mark_lost(self, reason: str) -> None:
        """A worker that fails closes its connection. It reports the error to the launcher, not to the router."""
        self.is_lost = True
        for future in self._in_flight:
            if not future.done():
                future.set_exception(WorkerDiedError(reason))
                future.exception()  # marks it as retrieved: not every future is awaited
