"""The router process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from lightserve.config import ServerConfig
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.ipc.worker_calls import WorkerCaller
from lightserve.links.endpoint import EngineEndpoint
from lightserve.messages.cluster import ToEngine
from lightserve.messages.control import (
    Drain,
    Drained,
    EngineInfo,
    HttpProcessLost,
    NewWorkers,
    Ready,
    WorkersLost,
    WorkersStopped,
)
from lightserve.messages.media import FromEncoder, ToEncoder
from lightserve.messages.request import RouterInbox
from lightserve.router.images.encoders import Send
from lightserve.router.images.image_waits import ImageWaits
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.identity import kv_identity
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.remote_prefill import RemoteKvSource
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.manager import RouterManager
from lightserve.router.observability.stats import ThroughputLog
from lightserve.router.pinned_prefixes import check_room
from lightserve.router.policy import Policy, make_policy
from lightserve.router.read_pinned_prefixes import load_pinned_prefixes
from lightserve.router.scheduler import GroupScheduler, LoraSlots, Scheduler, SchedulerLimits, make_limits
from lightserve.router.workers.client import RpycModelClient
from lightserve.utils.collector import collect_rarely
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config
    has_dispatcher = config.cluster.dp > 1 or config.cluster.listen is not None
    policy = make_policy(config.router.router_policy)  # a wrong name fails the start before the weights are loaded
    engine = await launcher.recv()
    if not isinstance(engine, EngineInfo):
        raise TypeError(f"the first message must be EngineInfo, not {engine!r}")
    server = None if config.cluster.listen is None else EngineEndpoint(child_config, engine)
    inbox: Any
    outbox: Any
    inbox, outbox = _channels(child_config, has_dispatcher) if server is None else (server.link, server.link)
    limits = make_limits(config.worker, config.router, engine.step_limits, engine.pooling)
    groups = [_new_group(engine, limits, policy) for _ in range(config.worker.num_groups)]
    _enable_images(child_config, groups)
    identity = await asyncio.to_thread(kv_identity, config, engine)
    for group in groups:
        if child_config.role == "decode":
            group.add_source(RemoteKvSource(group.pool, outbox.send))
        if engine.cpu_kv is not None:
            group.add_source(KvTiers(group.pool, engine.cpu_kv, identity))
    scheduler = Scheduler(*groups)

    async def connect(generation: int) -> RpycModelClient:
        paths = [child_config.worker_path(rank, generation) for rank in range(config.worker.num_ranks)]

        def report_lost(reason: str, caused_by_request: bool) -> None:
            launcher.send(WorkersLost(generation, reason, caused_by_request))

        return await RpycModelClient.connect(paths, report_lost, config.worker.answering_ranks)

    workers = await connect(child_config.generation)
    manager = RouterManager(scheduler, workers, engine, inbox, outbox, config.router)
    if has_dispatcher:
        blocks = manager.report_cached_blocks(outbox.send)
        if server is not None:
            server.link.on_join = blocks.all_blocks
    _enable_features(child_config, manager, engine, workers)
    manager.rl.sleep.connect(launcher.send)
    launcher.send(Ready())
    collect_rarely()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(manager.run(ThroughputLog(manager.metrics, config.router.log_stats_interval)))
        tasks.create_task(_handle_launcher(launcher, manager, connect, child_config, server))
        if server is not None:
            tasks.create_task(server.run())
            tasks.create_task(_receive_from_encoders(child_config, server))


async def _receive_from_encoders(child_config: ChildConfig, server: EngineEndpoint) -> None:
    """All other messages come from gateways."""
    encoders: Receiver[FromEncoder] = Receiver(child_config.router_address, FromEncoder)
    while True:
        server.link.put(await encoders.recv())


def _enable_features(
    child_config: ChildConfig, manager: RouterManager, engine: EngineInfo, workers: RpycModelClient
) -> None:
    """Those that flags turn on."""
    config = child_config.config
    if engine.lora_slots:
        manager.adapters.enable(config.worker, workers)
    if config.http.enable_rl:
        manager.weights.enable(manager.rl, config.http.weights_dir, config.worker.num_ranks)
        manager.rl.num_ranks = config.worker.num_ranks
    _pin_prefixes(manager, config, engine)
    _enable_profiles(child_config, manager, workers)


def _new_group(engine: EngineInfo, limits: SchedulerLimits, policy: Policy) -> GroupScheduler:
    tokens = engine.max_total_token_num
    pool = KvPool(tokens, make_group_pools(engine.kv_groups, tokens), limits.kv_lookahead)
    return GroupScheduler(pool, limits, policy, loras=LoraSlots(engine.lora_slots))


def _enable_images(child_config: ChildConfig, groups: Sequence[GroupScheduler]) -> None:
    """If requests may have some. All groups share the encoders, and the embeddings."""

    def connect(encoder: int, generation: int) -> Send:
        sender: Sender[ToEncoder] = Sender(child_config.encoder_address(encoder, generation))
        return sender.send

    if child_config.config.http.reads_media:
        images = ImageWaits(connect)
        for group in groups:
            group.enable_images(images)


def _pin_prefixes(manager: RouterManager, config: ServerConfig, engine: EngineInfo) -> None:
    prompts = load_pinned_prefixes(config)
    check_room(prompts, engine)
    if prompts:
        manager.pin(prompts)


def _channels(child_config: ChildConfig, has_dispatcher: bool) -> tuple[Any, Any]:
    """To this router, and from it to the detokenizer, or to the dispatcher if there are several engines."""
    address = child_config.router_address
    if not has_dispatcher:
        return Receiver(address, RouterInbox), Sender(child_config.address("detokenization"))
    inbox: Receiver[Any] = Receiver(address, ToEngine | FromEncoder)
    return inbox, Sender(child_config.from_engine(child_config.engine, child_config.epoch))


def _enable_profiles(child_config: ChildConfig, manager: RouterManager, workers: WorkerCaller) -> None:
    """Of these workers, if --profile_dir is set."""
    folder = child_config.config.launch.profile_dir
    if folder is None:
        return
    if child_config.config.cluster.dp > 1:  # every engine writes a profile of its own
        folder = f"{folder}/engine-{child_config.engine}"
    manager.profiles.enable(folder, workers, partial(child_config.config.node_of, engine=child_config.engine))


async def _handle_launcher(
    launcher: LauncherConnection,
    manager: RouterManager,
    connect: Callable[[int], Awaitable[RpycModelClient]],
    child_config: ChildConfig,
    server: EngineEndpoint | None,
) -> None:
    """Connect whenever the launcher has replaced lost workers, and end with all requests when it drains the engine."""
    draining: list[asyncio.Task[None]] = []
    while True:
        message = await launcher.recv()
        if isinstance(message, Drain) and server is not None:
            draining.append(asyncio.create_task(_drain(server, launcher)))
        elif isinstance(message, HttpProcessLost):
            manager.abort_http_process(message)
        elif isinstance(message, WorkersStopped):
            manager.rl.sleep.on_workers_stopped()
        elif isinstance(message, NewWorkers):
            try:
                workers = await connect(message.generation)
                await manager.weights.restore(workers)
                manager.use_workers(workers)
                manager.reload_adapters(workers)
                _enable_profiles(child_config, manager, workers)
                manager.rl.on_new_workers()
            except (EOFError, OSError) as error:
                logger.warning("cannot connect to the new workers of generation %d: %s", message.generation, error)
                launcher.send(WorkersLost(message.generation, str(error), caused_by_request=False))


async def _drain(server: EngineEndpoint, launcher: LauncherConnection) -> None:
    await server.link.drain()
    launcher.send(Drained())


if __name__ == "__main__":
    run_child("router", main)
