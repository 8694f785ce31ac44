"""Prefill and decode engines that die or hang. The server has a tiny model in one prefill and two decode engines."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from benchmark.models import TINY, save_model
from test.faults.case import Case
from test.faults.cases.engines import GO_ON, _continue_elsewhere, kill_router
from test.faults.cases.processes import Fault, send_signal
from test.faults.harness import STREAMING, FaultContext, Workload

PROMPTS = Workload("prefill", streams=4, prompt_len=2000, tokens=40, is_decoding=False)
STEP_TIMEOUT = ("--step_timeout", "4")


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it."""
    save_model(base, None, {**TINY, "num_hidden_layers": 2})
    model = ("--model_dir", str(base), "--load_format", "dummy", "--deterministic", "--device", "cpu")
    pool = ("--max_total_token_num", "32768", "--batch_max_tokens", "64")
    return (*model, *pool, "--dp", "3", "--roles", "prefill,decode,decode", "--min_remote_prefill_tokens", "64")


def kill_worker(name: str) -> Fault:
    """Kill a worker, and wait until a new one is there."""

    def fault(context: FaultContext) -> None:
        before = context.server.log.count("a new model worker is ready")
        send_signal(name, signal.SIGKILL)(context)
        context.wait_until(lambda: context.server.log.count("a new model worker is ready") > before)

    return fault


def case(name: str, fault: Fault, during: Workload = PROMPTS, restarts: int = 1) -> Case:
    return Case(name, fault, GO_ON, during, STEP_TIMEOUT, 60.0, is_long=True, restarts=restarts)


CASES = [
    case("kill -9 the prefill worker, prefill", kill_worker("ls-worker")),
    case("kill -9 the prefill router, prefill", kill_router(0)),
    case("kill -9 a decode worker, prefill", kill_worker("ls-worker-1")),
    case("kill -9 a decode router, prefill", kill_router(1)),
    case("kill -9 a decode worker, streaming", kill_worker("ls-worker-2"), STREAMING),
    replace(
        case("the prefill router is stopped, prefill", send_signal("ls-router", signal.SIGSTOP), restarts=0),
        reaction=replace(GO_ON, wait=_continue_elsewhere),
    ),
]
