"""The dispatcher process of --dp and --engines."""

from __future__ import annotations

import asyncio

from lightserve.cluster.dispatcher import Dispatcher
from lightserve.cluster.link import IpcLink
from lightserve.cluster.placement import Placement
from lightserve.cluster.remote_engines import RemoteEngines
from lightserve.cluster.routing import make_policy
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.links.digest import model_digest
from lightserve.links.engines_file import EnginesFile
from lightserve.links.keys import read_gateway_keys
from lightserve.messages.control import EngineJoined, EngineLost, HttpProcessLost, Ready
from lightserve.messages.output import ToDetokenization
from lightserve.messages.request import ToRouter
from lightserve.model_files.source import resolve
from lightserve.utils.collector import collect_rarely


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config
    inbox: Receiver[ToRouter] = Receiver(child_config.address("router"), ToRouter)
    to_detokenization: Sender[ToDetokenization] = Sender(child_config.address("detokenization"))
    placement = Placement(make_policy(config.cluster.cluster_policy), config.cluster.min_remote_prefill_tokens)
    dispatcher = Dispatcher(placement, inbox, to_detokenization, config.router, config.cluster.num_engines)
    dispatcher.training.is_enabled = config.http.enable_rl
    remote = _remote_engines(child_config, dispatcher, launcher) if config.cluster.is_gateway else None
    if remote is None:
        launcher.send(Ready())  # else the first engine that joins says what the server can do
    collect_rarely()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        await asyncio.sleep(0)  # engines join a dispatcher that runs
        tasks.create_task(_handle_launcher(child_config, launcher, dispatcher))
        if remote is not None:
            tasks.create_task(remote.run())


def _remote_engines(child_config: ChildConfig, dispatcher: Dispatcher, launcher: LauncherConnection) -> RemoteEngines:
    worker, cluster = child_config.config.worker, child_config.config.cluster
    source = resolve(worker.model_dir, needs_weights=False, trusts_code=worker.trust_remote_code)
    keys = read_gateway_keys(cluster.cluster_keys or "")
    addresses = list(cluster.engine_addresses) if cluster.engines_file is None else EnginesFile(cluster.engines_file)
    digest = model_digest(source, child_config.config.http.max_image_tokens)
    return RemoteEngines(dispatcher, addresses, keys, digest, launcher.send)


async def _handle_launcher(child_config: ChildConfig, launcher: LauncherConnection, dispatcher: Dispatcher) -> None:
    while True:
        message = await launcher.recv()
        if isinstance(message, EngineJoined):
            engine_epoch = message.engine, message.epoch
            link = IpcLink(child_config.to_engine(*engine_epoch), child_config.from_engine(*engine_epoch))
            dispatcher.join(message.engine, link, child_config.config.cluster.role_of(message.engine))
        elif isinstance(message, EngineLost):
            dispatcher.leave(message.engine)
        elif isinstance(message, HttpProcessLost):
            dispatcher.abort_http_process(message)


if __name__ == "__main__":
    run_child("dispatcher", main)
