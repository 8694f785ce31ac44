"""The dispatcher process of --dp."""

from __future__ import annotations

import asyncio
import gc

from lightserve.cluster.dispatcher import Dispatcher
from lightserve.cluster.link import IpcLink
from lightserve.cluster.placement import Placement
from lightserve.cluster.routing import make_policy
from lightserve.io_struct import EngineJoined, EngineLost, Ready, ToDetokenization, ToRouter
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.process import ChildConfig, LauncherConnection, run_child


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config
    inbox: Receiver[ToRouter] = Receiver(child_config.address("router"), ToRouter)
    to_detokenization: Sender[ToDetokenization] = Sender(child_config.address("detokenization"))
    placement = Placement(make_policy(config.cluster.cluster_policy))
    dispatcher = Dispatcher(placement, inbox, to_detokenization, config.router, config.cluster.dp)
    launcher.send(Ready())
    gc.freeze()  # what exists now is never freed, so no collection has to visit it
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        tasks.create_task(_handle_launcher(child_config, launcher, dispatcher))


async def _handle_launcher(child_config: ChildConfig, launcher: LauncherConnection, dispatcher: Dispatcher) -> None:
    while True:
        message = await launcher.recv()
        if isinstance(message, EngineJoined):
            place = message.engine, message.epoch
            dispatcher.join(message.engine, IpcLink(child_config.to_engine(*place), child_config.from_engine(*place)))
        elif isinstance(message, EngineLost):
            dispatcher.leave(message.engine)


if __name__ == "__main__":
    run_child("dispatcher", main)
