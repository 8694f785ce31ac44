"""All cases, ordered so that those that share a server are adjacent, and the core cases.

The core takes two and a half minutes if a server takes ten seconds to start, as with a model on a GPU: every process
dies or hangs once, under every workload, with as few servers as possible.
"""

from __future__ import annotations

from dataclasses import replace

from test.faults.case import SERVER, Case
from test.faults.cases import (
    adapters,
    batches,
    beams,
    clocks,
    connections,
    disaggregation,
    draft_heads,
    drafts,
    engines,
    grammars,
    groups,
    hostile,
    hosts,
    images,
    kv_tiers,
    mcp,
    nodes,
    observability,
    ollama,
    pinned_prefixes,
    pooling,
    processes,
    quantization,
    rl,
    roles,
    scheduling,
    sounds,
    stages,
    states,
    stream_log,
    weights,
)
from test.faults.cases.processes import FAILING_SERVER, STEP
from test.faults.harness import PREFILL_FLAGS
from test.faults.start_case import StartCase

CASES: list[Case] = sorted(
    [
        *beams.CASES,
        *clocks.CASES,
        *connections.CASES,
        *scheduling.CASES,
        *processes.CASES,
        *engines.CASES,
        *grammars.CASES,
        *ollama.CASES,
        *observability.CASES,
        *stream_log.CASES,
        *hostile.CASES,
        *mcp.CASES,
        *pooling.CASES,
        *pinned_prefixes.CASES,
        *rl.CASES,
    ],
    key=lambda case: (case.program, case.flags, case.reaction.ends_server),
)
ADAPTER_CASES: list[Case] = adapters.CASES  # on a server with adapters.worker_flags
TIER_CASES: list[Case] = kv_tiers.CASES  # on a server with kv_tiers.worker_flags
DISAGGREGATION_CASES: list[Case] = disaggregation.CASES  # on a server with disaggregation.worker_flags
GROUP_CASES: list[Case] = groups.CASES  # on a server with groups.worker_flags
STAGE_CASES: list[Case] = stages.CASES  # on a server with stages.worker_flags
DRAFT_CASES: list[Case] = drafts.CASES  # on a server with drafts.worker_flags
WEIGHT_CASES: list[Case] = weights.CASES  # on a server with weights.worker_flags
STATE_CASES: list[Case] = states.CASES  # on a server with states.worker_flags
START_CASES: list[StartCase] = [
    *hosts.CASES,
    *batches.START_CASES,
    *hostile.START_CASES,
    *observability.START_CASES,
    *quantization.START_CASES,
    *draft_heads.START_CASES,
    *pinned_prefixes.START_CASES,
    *nodes.CASES,
    *roles.CASES,
    *stream_log.START_CASES,
    *images.START_CASES,
    *sounds.START_CASES,
]


def on_one_server(program: str, flags: tuple[str, ...], *names: str) -> list[Case]:
    """Cases on the same server. Only the last one may end it."""
    named = {case.name: case for case in CASES}
    return [replace(named[name], program=program, flags=flags) for name in names]


CORE: list[Case] = [
    *on_one_server(
        SERVER,
        STEP,
        "clients leave in the middle",
        "ls-router is stopped, streaming",
        "kill -9 ls-worker, streaming",
        "kill -9 ls-router, streaming",
    ),
    *on_one_server(
        SERVER,
        (*STEP, "--step_timeout", "4"),
        "ls-worker is stopped, streaming",
        "kill -9 the launcher, streaming",
    ),
    *on_one_server(
        FAILING_SERVER,
        STEP,
        "logits that are no numbers, streaming",
        "a request that workers die of, streaming",
        "kill -9 ls-detokenizer, idle",
    ),
    *on_one_server(
        SERVER, PREFILL_FLAGS, "kill -9 ls-worker, prefill", "kill -9 ls-httpserver, prefill", "SIGTERM, streaming"
    ),
    *on_one_server(SERVER, STEP, "SIGTERM twice, streaming"),
]
CORE_STARTS = [
    case for case in START_CASES if case.name in ("a signal during the start", "the worker is killed during the start")
]
