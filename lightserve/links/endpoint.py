"""All that a router of ``lightserve engine`` needs to listen for gateways."""

from __future__ import annotations

import asyncio
import os

from lightserve.ipc.process import ChildConfig
from lightserve.links.curve import AllowedKeys, RateLimitedLog, engine_socket, log_failed_handshakes
from lightserve.links.digest import model_digest, weights_digest
from lightserve.links.engine_server import EngineServer
from lightserve.links.keys import read_engine_keys
from lightserve.messages.cluster import LINK_PROTOCOL, EngineHello
from lightserve.messages.control import EngineInfo
from lightserve.model_files.source import resolve
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


class EngineEndpoint:
    def __init__(self, child_config: ChildConfig, ready: EngineInfo) -> None:
        config = child_config.config
        source = resolve(config.worker.model_dir, needs_weights=False, trusts_code=config.worker.trust_remote_code)
        hello = EngineHello(
            LINK_PROTOCOL,
            os.path.basename(child_config.run_dir),  # it has a random part
            child_config.epoch,
            model_digest(source, config.http.max_image_tokens),
            weights_digest(source, config),
            ready,
            config.cluster.role_of(0),
            f"{config.cluster.kv_transport} {'with' if config.cluster.cluster_tls else 'without'} TLS",
        )
        keys = read_engine_keys(config.cluster.cluster_keys or "")
        self._log = RateLimitedLog(logger)
        self._allowed_keys = AllowedKeys(keys.gateways, self._log)
        self._socket = engine_socket(config.cluster.listen or "", keys)
        self.link = EngineServer(self._socket, hello)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._allowed_keys.run())
            tasks.create_task(log_failed_handshakes(self._socket, self._log))
            tasks.create_task(self.link.run())
