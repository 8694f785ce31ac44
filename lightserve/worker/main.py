"""A model worker process: one rank of the model. Torch begins here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any

from lightserve.common.compile.cache import use_writable_cache
from lightserve.common.compile.client import compilers_for
from lightserve.ipc.arena import ArenaReader
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.links.kv_secret import read_kv_certificate, read_kv_secret
from lightserve.messages.control import StartupPhase, StartupProgress
from lightserve.model_files.source import resolve
from lightserve.utils.logger import init_logger
from lightserve.utils.progress import REDRAW_S, ProgressState, use_output
from lightserve.worker.call_handlers import call_handlers
from lightserve.worker.rpc import Launch, StepServer

if TYPE_CHECKING:
    from lightserve.common.device import Device
    from lightserve.common.parallel import Parallel
    from lightserve.worker.profiler import WorkerProfiler

logger = init_logger(__name__)

STORE_GRACE_S = 60.0  # after --node_timeout the launcher says which node is missing; ranks wait longer


def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config.worker
    use_output(_ProgressToLauncher(launcher))
    use_writable_cache(child_config.path("triton"))
    compilers_path = child_config.engine_path(f"compiler-{child_config.index}-{child_config.generation}")
    with compilers_for(config.device, compilers_path):
        with _phase(launcher, "import torch"):
            from lightserve.common.device import check_driver, pick_device, unusable_packages
            from lightserve.worker.engine_info import engine_info
            from lightserve.worker.select import worker_class
        server = StepServer(child_config.worker_path(child_config.index, child_config.generation))
        platform = pick_device(config.device)
        if config.device is None and platform.name == "cpu" and child_config.index == 0:
            for name, reason in unusable_packages().items():
                logger.warning("device %s is installed and not used: %s; serving on the CPU", name, reason)
        check_driver(platform, platform.torch_device(child_config.device))
        platform.num_parts = child_config.config.num_cpu_parts
        if child_config.encoder_fd is not None:
            platform.wait_for_others = partial(_wait_closed, child_config.encoder_fd)
        with _phase(launcher, "load and compile"):
            needs_weights = config.load_format == "auto"
            source = resolve(config.model_dir, needs_weights=needs_weights, trusts_code=config.trust_remote_code)
            parallel = _connect(child_config, platform)
            has_trainer = child_config.config.http.enable_rl
            worker = worker_class(config, source)(config, source, parallel, child_config.device, has_trainer)
            worker.add_cpu_offload(config, child_config.config.cluster.dp)
            if has_trainer:
                worker.add_trainer_calls(config)
            if child_config.role != "normal":
                worker.add_kv_transfer(_transfer_args(child_config, parallel))
        if child_config.arena_fd is not None:
            worker.enable_images(mmap(child_config.arena_fd, os.fstat(child_config.arena_fd).st_size))
        elif child_config.arena_path is not None:
            worker.enable_images(ArenaReader(child_config.arena_path))
        link = worker.model.hidden_state_link
        profiler = _profiler(child_config, platform, worker.launch, lambda: link.received_s)
        with _phase(launcher, "warm up"):
            worker.warm_up()
    launcher.send(engine_info(worker, config, source))
    launch = worker.launch if profiler is None else profiler.launch
    server.serve(launch, worker.pipeline_depth, call_handlers(worker, profiler))


def _wait_closed(pipe_fd: int) -> None:
    """Nothing is written to the pipe."""
    while os.read(pipe_fd, 1):
        pass


def _connect(child_config: ChildConfig, platform: Device) -> Parallel:
    from lightserve.common.parallel import ParallelSizes, connect_ranks, tcp_store

    config = child_config.config.worker
    store: Any = f"file://{child_config.rendezvous_path}"
    timeout_s = child_config.config.cluster.node_timeout + STORE_GRACE_S
    if child_config.store_port is not None:
        store = tcp_store(child_config.store_port, child_config.listen_fd, timeout_s)
    sizes = ParallelSizes(tp=config.attention_tp, pp=config.pp, dp=config.num_groups, ep=config.ep)
    gpu = _gpu_for_peers(child_config, platform)
    parallel = connect_ranks(child_config.index, sizes, store, platform.comm_backend, timeout_s, gpu)
    return parallel.with_ordered_sums() if config.deterministic else parallel


def _gpu_for_peers(child_config: ChildConfig, platform: Any) -> Any:
    """The device whose memory other ranks may read, or None. Ranks that meet at a port are on several nodes."""
    if child_config.config.worker.disable_custom_allreduce or child_config.store_port is not None:
        return None
    device = platform.torch_device(child_config.device)
    return device if platform.traits(device).reads_peers else None


def _transfer_args(child_config: ChildConfig, parallel: Parallel) -> Any:
    from lightserve.worker.kv.transfer.transfer import KvTransferArgs

    cluster = child_config.config.cluster
    address, keys = child_config.kv_address(child_config.index, child_config.generation), cluster.cluster_keys
    secret = b"" if keys is None else read_kv_secret(keys)
    tls = read_kv_certificate(keys) if keys is not None and cluster.cluster_tls else None
    return KvTransferArgs(child_config.role, address, secret, parallel.rank_in_group, tls, cluster.kv_transport)


def _profiler(
    child_config: ChildConfig, platform: Any, launch: Launch, last_wait: Callable[[], tuple[float, float] | None]
) -> WorkerProfiler | None:
    """None without --profile_dir: then nothing of the profiler is imported."""
    if child_config.config.launch.profile_dir is None:
        return None
    from lightserve.worker.profiler import WorkerProfiler
    from lightserve.worker.torch_trace import TorchTrace

    trace = TorchTrace(platform)
    trace.prepare()
    return WorkerProfiler(child_config.index, launch, trace, last_wait, child_config.parts_folder)


class _ProgressToLauncher:
    """The launcher shows the progress of all processes, so that they do not write over one another."""

    def __init__(self, launcher: LauncherConnection) -> None:
        self._launcher = launcher
        self._sent_s = 0.0

    def show(self, state: ProgressState) -> None:
        now = time.monotonic()
        if state.status != "running" or now - self._sent_s >= REDRAW_S:
            self._sent_s = now
            self._launcher.send(StartupProgress(**asdict(state)))


@contextmanager
def _phase(launcher: LauncherConnection, name: str) -> Iterator[None]:
    begin = time.monotonic()
    launcher.send(StartupProgress(name))
    yield
    launcher.send(StartupPhase(name, time.monotonic() - begin))


if __name__ == "__main__":
    run_child("model worker", main)
