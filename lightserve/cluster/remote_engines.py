"""Keeps a gateway connected to the engines of --engines: those that start later, and those that come back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from lightserve.cluster.dispatcher import Dispatcher
from lightserve.cluster.tcp.curve import SeldomLog
from lightserve.cluster.tcp.gateway_link import GatewayLink, LinkLostError
from lightserve.cluster.tcp.keys import GatewayKeys
from lightserve.io_struct import LINK_PROTOCOL, EngineHello, EngineReady, GatewayHello
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

RETRY_S = 0.5  # between two tries to connect


class RemoteEngines:
    def __init__(
        self,
        dispatcher: Dispatcher,
        addresses: Sequence[str],
        keys: GatewayKeys,
        model_digest: str,
        on_ready: Callable[[EngineReady], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._addresses = addresses
        self._keys = keys
        self._hello = GatewayHello(LINK_PROTOCOL, secrets.token_hex(4), model_digest)
        self._on_ready = on_ready
        self._first: EngineHello | None = None  # all others must compute the same
        self._connected: dict[int, EngineHello] = {}
        self._last_epochs: dict[str, int] = {}  # by engine id

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._addresses)):
                tasks.create_task(self._keep_connected(number))

    async def _keep_connected(self, number: int) -> None:
        address, log = self._addresses[number], SeldomLog(logger)
        while True:
            try:
                await self._connect(number)
            except LinkLostError as error:
                if number in self._connected:
                    del self._connected[number]
                    self._dispatcher.leave(number)
                    logger.warning("engine %d (%s) is lost: %s", number, address, error)
                else:
                    log.warning(f"engine {number} ({address}) cannot be used: {error}")
            await asyncio.sleep(RETRY_S)

    async def _connect(self, number: int) -> None:
        """Returns never: LinkLostError says why the engine cannot be used, or not any more."""
        link = GatewayLink(self._addresses[number], self._keys)
        try:
            hello = await link.open(self._hello)
            self._check(hello)
            self._last_epochs[hello.engine_id] = hello.epoch
            self._connected[number] = hello
            self._dispatcher.join(number, link)
            logger.info("engine %d (%s) joined", number, self._addresses[number])
            if self._first is None:
                self._first = hello
                self._on_ready(hello.ready)
            await link.run()
        finally:
            link.close()

    def _check(self, hello: EngineHello) -> None:
        if hello.protocol != LINK_PROTOCOL or hello.model_digest != self._hello.model_digest:
            raise LinkLostError("it accepted a gateway with another protocol or model")
        for number, one in self._connected.items():
            if one.engine_id == hello.engine_id:
                raise LinkLostError(f"it is the same engine as {self._addresses[number]}")
        if hello.epoch < self._last_epochs.get(hello.engine_id, 0):
            raise LinkLostError(
                f"its epoch {hello.epoch} is over; the last one was {self._last_epochs[hello.engine_id]}"
            )
        if self._first is not None and (found := difference(self._first, hello)):
            raise LinkLostError(f"{found}; start it as the first engine that joined")


def difference(first: EngineHello, other: EngineHello) -> str | None:
    """Why one gateway cannot use both engines: clients rely on what the first one can do."""
    if other.weights_digest != first.weights_digest:
        found = f"it has other weights ({other.weights_digest}) than the engine before ({first.weights_digest})"
        return f"{found}, or other values of --data_type, --kv_dtype, --quantization or --merge_lora"
    if other.ready.max_req_total_len < first.ready.max_req_total_len:
        lengths = other.ready.max_req_total_len, first.ready.max_req_total_len
        return "its longest request has {:,} tokens, that of the engine before {:,} (--max_req_total_len)".format(
            *lengths
        )
    for name in ("vocab_size", "eos_token_ids", "pooling", "lora_slots"):
        if getattr(other.ready, name) != getattr(first.ready, name):
            return f"its {name} is {getattr(other.ready, name)}, that of the engine before {getattr(first.ready, name)}"
    return None
