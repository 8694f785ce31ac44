"""The router process."""

from __future__ import annotations

import gc

import msgspec

from lightserve.io_struct import EngineReady, Ready, ToDetokenization, ToRouter
from lightserve.router.kv_pool import KvPool
from lightserve.router.manager import RouterManager
from lightserve.router.model_client import RpycModelClient
from lightserve.router.policy import make_policy
from lightserve.router.scheduler import Scheduler, limits_of
from lightserve.router.stats import ThroughputLog
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.process import Boot, Parent, run_child


async def main(boot: Boot, parent: Parent) -> None:
    config = boot.config
    inbox: Receiver[ToRouter] = Receiver(boot.address("router"), ToRouter)
    to_detokenization: Sender[ToDetokenization] = Sender(boot.address("detokenization"))
    policy = make_policy(config.router.router_policy)  # while the workers load: a wrong name ends them early
    engine = await parent.recv()
    if not isinstance(engine, EngineReady):
        raise TypeError(f"the first message must be EngineReady, not {engine!r}")
    if config.router.eos_id:
        engine = msgspec.structs.replace(engine, eos_token_ids=tuple(config.router.eos_id))
    model = RpycModelClient([boot.path(f"worker-{rank}") for rank in range(config.worker.tp)])
    limits = limits_of(config.worker, config.router, engine.step_limits)
    scheduler = Scheduler(KvPool(engine.max_total_token_num), limits, policy)
    manager = RouterManager(scheduler, model, engine, inbox, to_detokenization, config.router)
    parent.send(Ready())
    gc.freeze()  # what is alive now lives for ever: no collection need look at it
    await manager.run(ThroughputLog(manager.metrics, config.router.log_stats_interval))


if __name__ == "__main__":
    run_child("router", main)
