"""Keeps a gateway connected to its engines: those that start later, those that come back, those that are added."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightserve.cluster.disaggregation import KvExchange
from lightserve.cluster.dispatcher import Dispatcher
from lightserve.links.curve import RateLimitedLog
from lightserve.links.engines_file import EnginesFile
from lightserve.links.gateway_link import GatewayLink, LinkLostError
from lightserve.links.keys import GatewayKeys
from lightserve.messages.cluster import LINK_PROTOCOL, EngineHello, GatewayHello
from lightserve.messages.control import EngineInfo
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

RETRY_S = 0.5  # between two tries to connect
READ_S = 0.25  # between two looks at --engines_file


@dataclass(slots=True, eq=False)
class _RemoteEngine:
    number: int
    address: str
    connecting: asyncio.Task[None]
    is_removed: bool = False  # from --engines_file: it ends with its last request


class RemoteEngines:
    def __init__(
        self,
        dispatcher: Dispatcher,
        addresses: Sequence[str] | EnginesFile,
        keys: GatewayKeys,
        model_digest: str,
        on_ready: Callable[[EngineInfo], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._addresses = addresses
        self._keys = keys
        self._hello = GatewayHello(LINK_PROTOCOL, secrets.token_hex(4), model_digest)
        self._on_ready = on_ready
        self._engines: dict[str, _RemoteEngine] = {}  # by address
        self._first: EngineHello | None = None  # all others must compute the same
        self._connected: dict[int, EngineHello] = {}
        self._last_epochs: dict[str, int] = {}  # by engine id

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._update(tasks)
                await asyncio.sleep(READ_S)

    def _update(self, tasks: asyncio.TaskGroup) -> None:
        """Connect to engines that were added, and disconnect from removed ones that have no requests left."""
        wanted = self._addresses.read() if isinstance(self._addresses, EnginesFile) else self._addresses
        for address in wanted:
            if address not in self._engines:
                self._add(address, tasks)
        for engine in list(self._engines.values()):
            if engine.address not in wanted and not engine.is_removed:
                engine.is_removed = True  # if it is added again, it joins again after its last request
                self._dispatcher.drain(engine.number)
                logger.info("engine %d (%s) was removed from the file", engine.number, engine.address)
            if engine.is_removed and not self._dispatcher.num_requests(engine.number):
                self._remove(engine)

    def _add(self, address: str, tasks: asyncio.TaskGroup) -> None:
        used = {engine.number for engine in self._engines.values()}
        number = next(number for number in itertools.count() if number not in used)
        self._dispatcher.addresses[number] = address
        connecting = tasks.create_task(self._keep_connected(number, address))
        self._engines[address] = _RemoteEngine(number, address, connecting)

    def _remove(self, engine: _RemoteEngine) -> None:
        engine.connecting.cancel()
        del self._engines[engine.address]
        self._connected.pop(engine.number, None)
        self._dispatcher.leave(engine.number)
        del self._dispatcher.addresses[engine.number]

    async def _keep_connected(self, number: int, address: str) -> None:
        log = RateLimitedLog(logger)
        while True:
            try:
                await self._connect(number, address)
            except LinkLostError as error:
                if number in self._connected:
                    del self._connected[number]
                    self._dispatcher.leave(number)
                    logger.warning("engine %d (%s) is lost: %s", number, address, error)
                else:
                    log.warning(f"engine {number} ({address}) cannot be used: {error}")
            await asyncio.sleep(RETRY_S)

    async def _connect(self, number: int, address: str) -> None:
        """Returns never: LinkLostError says why the engine cannot be used, or not any more."""
        link = GatewayLink(address, self._keys)
        try:
            hello = await link.open(self._hello)
            self._check(hello)
            self._last_epochs[hello.engine_id] = hello.epoch
            self._connected[number] = hello
            kv_exchange = KvExchange(hello.ready.kv_identity, hello.kv_transport)
            self._dispatcher.join(number, link, hello.role, kv_exchange)
            logger.info("engine %d (%s) joined", number, address)
            if self._first is None:
                self._first = hello
                self._on_ready(hello.ready)
            await link.run()
        finally:
            link.close()

    def _check(self, hello: EngineHello) -> None:
        if hello.protocol != LINK_PROTOCOL or hello.model_digest != self._hello.model_digest:
            raise LinkLostError("it accepted a gateway with another protocol or model")
        for number, connected in self._connected.items():
            if connected.engine_id == hello.engine_id:
                raise LinkLostError(f"it is the same engine as {self._dispatcher.addresses[number]}")
        if hello.epoch < self._last_epochs.get(hello.engine_id, 0):
            raise LinkLostError(
                f"its epoch {hello.epoch} is over; the last one was {self._last_epochs[hello.engine_id]}"
            )
        if self._first is not None and (reason := difference(self._first, hello)):
            raise LinkLostError(f"{reason}; start it with the flags of the first engine that joined")


def difference(first: EngineHello, second: EngineHello) -> str | None:
    """Why one gateway cannot use both engines: clients rely on what the first one can do."""
    if second.weights_digest != first.weights_digest:
        reason = f"it has other weights ({second.weights_digest}) than the engine before ({first.weights_digest})"
        return f"{reason}, or other values of --data_type, --kv_dtype, --quantization or --merge_lora"
    kv, first_kv = second.ready.kv_identity, first.ready.kv_identity
    if kv is not None and first_kv is not None and kv.model != first_kv.model:
        return "its positions have other angles than those of the engine before (--max_req_total_len)"
    if second.ready.max_req_total_len < first.ready.max_req_total_len:
        lengths = second.ready.max_req_total_len, first.ready.max_req_total_len
        return "its longest request has {:,} tokens, that of the engine before {:,} (--max_req_total_len)".format(
            *lengths
        )
    for name in ("vocab_size", "eos_token_ids", "pooling", "lora_slots"):
        if getattr(second.ready, name) != getattr(first.ready, name):
            return (
                f"its {name} is {getattr(second.ready, name)}, that of the engine before {getattr(first.ready, name)}"
            )
    return None
