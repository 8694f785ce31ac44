"""Weight updates that fail, and workers that die after one: no text is made with weights of which some are old.

The server has the weights "first" of a tiny model, and may load "first" and "second" below --weights_dir. A draft head
has the weights "head-first", and may load those and "head-second".
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightserve.utils.drivers import may_have_gpu
from test.faults.case import Case
from test.faults.cases.processes import send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE, responds
from test.ports import free_port

DRAFTED_IDS = [5, 17, 40, 99]  # by the draft head
BODY = {"prompt": [501, 502, 503], "max_tokens": 8, "temperature": 0}
NORM = "model.norm.weight"
KV_METHOD = "kv_unmapped" if may_have_gpu("cuda") else "kv_freed"
FREED_AGAIN = "new workers have freed the memory that a trainer has asked for"
FROM_DISK, FROM_TRAINER = "/update_weights_from_disk", "/update_weights_from_distributed"


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write the weights below ``base``; returns the flags of a server with the first ones."""
    from test.rl_checkpoints import save_checkpoints  # torch takes seconds

    first = save_checkpoints(base, ("first", "second"))["first"]
    model = ("--model_dir", str(first), "--weights_dir", str(base), "--enable_rl", "--deterministic")
    drafts = {"method": "eagle3", "model": _save_heads(base, first), "num_speculative_tokens": 2}
    sizes = ("--max_total_token_num", "4096", "--max_req_total_len", "2048")
    return (*model, "--speculative_config", json.dumps(drafts), *sizes)


def _save_heads(base: Path, model: Path) -> str:
    from test.worker.heads import save_head

    config = json.loads((model / "config.json").read_text())
    heads = [
        save_head(base / name, config["vocab_size"], config["hidden_size"], DRAFTED_IDS)
        for name in ("head-first", "head-second")
    ]
    return heads[0]


def _folder(context: FaultContext, name: str) -> str:
    flags = context.running.flags
    return str(Path(flags[flags.index("--weights_dir") + 1]) / name)


def _load(context: FaultContext, name: str, selector: str = "all") -> None:
    status, reply = context.client.post(FROM_DISK, {"model_path": name, "selector": selector})
    assert status == 200, reply


def _run_trainer(context: FaultContext, kind: str, exit_code: int = 0, folder: str = "second") -> None:
    arguments = [context.server.url, "", str(free_port()), kind, "2", _folder(context, folder)]
    done = subprocess.run([sys.executable, "-m", "test.rl_trainer", *arguments], timeout=300, check=False)
    assert done.returncode == exit_code
    context.exits.callback(context.client.post, "/destroy_weights_update_group", {"group_name": "trainer"})


def _refused(context: FaultContext, reason: str) -> None:
    """All requests until an update succeeds."""
    context.wait_until(lambda: context.health() == 503)
    status, reply = context.complete(BODY)
    assert reason in str(reply), reply
    context.statuses.append(status)
    _load(context, "first")
    context.wait_until(lambda: context.health() == 200)


def kill_after_folder(context: FaultContext) -> None:
    """The new worker has the weights of the folder."""
    context.exits.callback(_load, context, "first")
    _load(context, "second")
    expected = context.complete_text(BODY)
    send_signal("ls-worker", signal.SIGKILL)(context)
    context.wait_until(lambda: "loaded the weights of" in context.server.log)
    assert context.complete_text(BODY) == expected
    context.wait_until(lambda: context.health() == 200)
    context.statuses.append(context.complete(BODY)[0])


def kill_after_broadcast(context: FaultContext) -> None:
    _run_trainer(context, "sglang")
    assert context.complete(BODY)[0] == 200
    send_signal("ls-worker", signal.SIGKILL)(context)
    _refused(context, "weights_lost")


def kill_after_draft_folder(context: FaultContext) -> None:
    """The new worker drafts with the weights of the folder."""
    _load(context, "head-second", "draft")
    expected = context.complete_text(BODY)
    send_signal("ls-worker", signal.SIGKILL)(context)
    assert context.complete_text(BODY) == expected
    weights = _weights(context)
    assert weights["draft_source"] == _folder(context, "head-second")
    assert weights["draft_problem"] is None
    _end_with_first_head(context)


def kill_after_draft_broadcast(context: FaultContext) -> None:
    """The new worker drafts with the weights of its files, and says so."""
    _run_trainer(context, "sglang:draft", folder="head-second")
    expected = context.complete_text(BODY)
    send_signal("ls-worker", signal.SIGKILL)(context)
    assert context.complete_text(BODY) == expected
    assert "came from a trainer" in _weights(context)["draft_problem"]
    _end_with_first_head(context)


def _weights(context: FaultContext) -> Any:
    return json.loads(context.client.send("GET", "/get_weight_version")[1])


def _end_with_first_head(context: FaultContext) -> None:
    context.wait_until(lambda: context.health() == 200)
    context.statuses.append(context.complete(BODY)[0])
    _load(context, "head-first", "draft")


def trainer_dies(context: FaultContext) -> None:
    _run_trainer(context, "dies", exit_code=9)
    _refused(context, "the weight update has failed")


def wrong_tensor(**fields: Any) -> Callable[[FaultContext], None]:
    """It is refused before anything changes."""

    def fault(context: FaultContext) -> None:
        expected = context.complete_text(BODY)
        _run_trainer(context, "joins")
        announced = {"names": [NORM], "dtypes": ["bfloat16"], "shapes": [[64]], "group_name": "trainer"}
        status, _ = context.client.post(FROM_TRAINER, announced | fields)
        context.statuses.append(status)
        assert context.complete_text(BODY) == expected

    return fault


def kill_without_kv_memory(context: FaultContext) -> None:
    """The new worker has freed the memory of its KV cache too, until the trainer gives it back."""
    assert context.client.post("/release_kv_cache_memory?mode=keep", {})[0] == 200
    frees = context.server.log.count(FREED_AGAIN)
    send_signal("ls-worker", signal.SIGKILL)(context)
    context.wait_until(lambda: context.server.log.count(FREED_AGAIN) > frees)
    status, woken = context.client.post("/wake_up", {})
    assert (status, woken["method"]) == (200, KV_METHOD)


CASES = [
    Case(
        "kill -9 ls-worker, its KV memory released",
        kill_without_kv_memory,
        STREAMS_CONTINUE,
        during=STREAMING,
        flags=(),
        restarts=1,
    ),
    Case("kill -9 ls-worker, weights of a folder", kill_after_folder, responds(200), flags=(), restarts=1),
    Case(
        "kill -9 ls-worker, weights of a trainer",
        kill_after_broadcast,
        responds(503),
        flags=(),
        within_s=60.0,
        restarts=1,
    ),
    Case(
        "kill -9 ls-worker, draft head of a folder",
        kill_after_draft_folder,
        responds(200),
        flags=(),
        restarts=1,
        is_long=True,
    ),
    Case(
        "kill -9 ls-worker, draft head of a trainer",
        kill_after_draft_broadcast,
        responds(200),
        flags=(),
        within_s=60.0,
        restarts=1,
    ),
    Case(
        "a draft head of a wrong shape",
        wrong_tensor(names=["fc.weight"], shapes=[[3, 3]], selector="draft"),
        responds(400),
        flags=(),
        within_s=60.0,
    ),
    Case("a trainer dies in a broadcast", trainer_dies, responds(503), flags=(), within_s=60.0),
    Case("weights of a wrong name", wrong_tensor(names=["x"]), responds(400), flags=(), within_s=60.0),
    Case("weights of a wrong shape", wrong_tensor(shapes=[[63]]), responds(400), flags=(), is_long=True, within_s=60.0),
    Case(
        "weights of a wrong dtype", wrong_tensor(dtypes=["int8"]), responds(400), flags=(), is_long=True, within_s=60.0
    ),
]
