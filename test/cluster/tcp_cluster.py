"""A gateway's dispatcher and engines' routers in one process, linked by real sockets with CURVE. Workers are fakes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lightserve.cluster.remote_engines import RemoteEngines
from lightserve.config import RouterConfig
from lightserve.links.curve import AllowedKeys, RateLimitedLog, engine_socket, log_failed_handshakes
from lightserve.links.engine_server import EngineServer
from lightserve.links.engines_file import EnginesFile
from lightserve.links.keys import EngineKeys, GatewayKeys, generate, read_engine_keys, read_gateway_keys
from lightserve.messages.cluster import LINK_PROTOCOL, EngineHello
from lightserve.messages.control import EngineInfo, KvIdentity
from lightserve.router.observability.stats import ThroughputLog
from lightserve.utils.logger import init_logger
from test.cluster.local_cluster import POOL, LocalCluster, LocalEngine, SeededModel
from test.ports import free_port

DIGEST = "a model"
logger = init_logger("lightserve.test")


def takes_connections(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def ready_of(**kv: Any) -> EngineInfo:
    identity = KvIdentity(tp=1, pp=1, version="1", model="a model", computed="in float32", layout="a layout")
    return EngineInfo(POOL, POOL, 32_000, 1, kv_identity=msgspec.structs.replace(identity, **kv))


def hello_of(name: str, epoch: int, **changes: Any) -> EngineHello:
    values = {"protocol": LINK_PROTOCOL, "model_digest": DIGEST, "weights_digest": "weights"}
    ready = ready_of()
    return EngineHello(**{"engine_id": name, "epoch": epoch, "ready": ready} | values | changes)  # type: ignore[arg-type]


class TcpEngine(LocalEngine):
    """An engine that gateways reach over TCP."""

    def __init__(self, address: str, keys: EngineKeys, hello: EngineHello, config: RouterConfig) -> None:
        super().__init__(config, SeededModel(), POOL)
        self.task.cancel()
        self.socket = engine_socket(address, keys)
        self.link = EngineServer(self.socket, hello)
        self.manager._inbox = self.link  # type: ignore[assignment]
        self.manager._to_detokenization = self.link  # type: ignore[assignment]
        self.manager._output_processor._to_detokenization = self.link  # type: ignore[assignment]
        self.link.on_join = self.manager.report_cached_blocks(self.link.send).all_blocks
        self.tasks = [
            asyncio.create_task(self.manager.run(ThroughputLog(self.manager.metrics, 0.0))),
            asyncio.create_task(self.link.run()),
        ]

    def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.link.close()


class TcpCluster:
    def __init__(self, folder: Path, config: RouterConfig) -> None:
        generate(folder)
        self.engine_keys: EngineKeys = read_engine_keys(str(folder))
        self.gateway_keys: GatewayKeys = read_gateway_keys(str(folder))
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.config = config
        self.engines: dict[int, TcpEngine] = {}
        self.epochs = [0, 0]
        self.tasks: list[asyncio.Task[None]] = []
        self.ready: list[EngineInfo] = []
        self.allowed = AllowedKeys(self.engine_keys.gateways, RateLimitedLog(logger))

    def start(self, number: int, **changes: Any) -> TcpEngine:
        hello = hello_of(f"engine-{number}", self.epochs[number], **changes)
        engine = self.engines[number] = TcpEngine(self.addresses[number], self.engine_keys, hello, self.config)
        self.epochs[number] += 1
        self.tasks.append(asyncio.create_task(log_failed_handshakes(engine.socket, RateLimitedLog(logger))))
        return engine

    def kill(self, number: int) -> None:
        self.engines.pop(number).kill()

    async def gateway(self, digest: str = DIGEST, addresses: list[str] | EnginesFile | None = None) -> LocalCluster:
        """One more dispatcher with its clients."""
        gateway = LocalCluster("prefix", self.config, 2, POOL)
        self.tasks.append(asyncio.create_task(gateway.dispatcher.run()))
        await asyncio.sleep(0)
        remote = RemoteEngines(
            gateway.dispatcher, addresses or self.addresses, self.gateway_keys, digest, self.ready.append
        )
        self.tasks.append(asyncio.create_task(remote.run()))
        return gateway


@asynccontextmanager
async def tcp_cluster(folder: Path, config: RouterConfig | None = None) -> AsyncIterator[TcpCluster]:
    cluster = TcpCluster(folder, config or RouterConfig())
    cluster.tasks.append(asyncio.create_task(cluster.allowed.run()))
    try:
        yield cluster
    finally:
        for engine in cluster.engines.values():
            engine.kill()
        for task in cluster.tasks:
            task.cancel()
        results = await asyncio.gather(*cluster.tasks, return_exceptions=True)
        cluster.allowed.close()
    for result in results:
        assert isinstance(result, asyncio.CancelledError), result
