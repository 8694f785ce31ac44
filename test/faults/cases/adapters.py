"""LoRA adapters whose files vanish or change, that are unloaded or pushed out while they are used, and lost loads.

The server has a tiny model, room for two adapters, and the adapters a0 to a3 below --lora_dir.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark.make_adapters import target_sizes, write_adapter
from benchmark.models import TINY, save_model
from lightserve.model_files.lora.adapter import WEIGHTS_FILE
from test.api.test_faults import COMPLETE, Client
from test.faults.case import Case
from test.faults.cases.processes import send_signal
from test.faults.harness import STREAMING, FaultContext, Stream
from test.faults.reactions import STREAMS_CONTINUE, responds
from test.held_adapter import held_load, write_held

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PLACES = 2
PROMPT = [501, 502, 503]
CHANGED = "the files have changed since the adapter"


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model and adapters below ``base``; returns the flags of a server with them."""
    model, adapters = base / "model", base / "adapters"
    model.mkdir()
    save_model(model, None, TINY)
    for number in range(4):
        _write(adapters, f"a{number}", seed=number)
    places = ("--max_loras", str(PLACES), "--max_cpu_loras", str(PLACES))
    return (
        "--model_dir",
        str(model),
        "--load_format",
        "dummy",
        "--deterministic",
        "--lora_dir",
        str(adapters),
        *places,
    )


def _write(adapters: Path, name: str, seed: int) -> Path:
    write_adapter(adapters / name, target_sizes(str(adapters.parent / "model")), rank=4, seed=seed)
    return adapters / name


def _adapters(context: FaultContext) -> Path:
    flags = context.running.flags
    return Path(flags[flags.index("--lora_dir") + 1])


def _text(context: FaultContext, name: str) -> str:
    return context.complete_text({"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0})


def _push_out(context: FaultContext) -> None:
    """Fill all places in host memory with other adapters."""
    for number in range(PLACES):
        _text(context, f"a{number}")


def _post(context: FaultContext, path: str, **body: Any) -> None:
    status, response = context.client.post(path, body)
    assert status == 200, response


def _long_stream(context: FaultContext, name: str) -> Stream:
    stream = context.stream(model=name, prompt=PROMPT, max_tokens=context.running.engine.tokens(200))
    stream.read_events(1)
    context.streams.append(stream)
    return stream


def damage(change: Callable[[Path], None]) -> Callable[[FaultContext], None]:
    """Change the file of an adapter while it is in host memory, and use it there and after it was pushed out."""

    def fault(context: FaultContext) -> None:
        folder = _write(_adapters(context), "damaged", seed=7)
        context.exits.callback(_remove, context, folder)
        before = _text(context, "damaged")
        change(folder / WEIGHTS_FILE)
        assert _text(context, "damaged") == before
        _push_out(context)
        status, response = context.client.post(COMPLETE, {"model": "damaged", "prompt": "a", "max_tokens": 1})
        assert CHANGED in str(response)
        context.statuses.append(status)

    return fault


def _remove(context: FaultContext, folder: Path) -> None:
    context.client.post(UNLOAD, {"lora_name": folder.name})
    shutil.rmtree(folder)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def replace_on_disk(context: FaultContext) -> None:
    """Streams keep the weights that they began with. The new ones are used after an unload."""
    folder = _write(_adapters(context), "replaced", seed=0)
    context.exits.callback(_remove, context, folder)
    stream = _long_stream(context, "replaced")
    _write(_adapters(context), "replaced", seed=1)
    stream.read_all()
    assert stream.is_complete
    again = context.stream(**stream.body | {"model": "a0"})
    again.read_all()
    assert stream.text == again.text
    context.streams.clear()  # the same request would get other text now
    _post(context, UNLOAD, lora_name="replaced")
    assert _text(context, "replaced") == _text(context, "a1")


def unload_in_use(context: FaultContext) -> None:
    _post(context, LOAD, lora_name="own", lora_path="a0")
    stream = _long_stream(context, "own")
    _post(context, UNLOAD, lora_name="own")
    assert context.client.post(COMPLETE, {"model": "own", "prompt": "a"})[0] == 404
    stream.read_all()
    assert stream.is_complete
    stream.body["model"] = "a0"  # for the reaction: the same weights under another name


def fill_host_memory(context: FaultContext) -> None:
    """A request for one more adapter than there is room for waits until another one is not needed."""
    for number in range(PLACES + 1):
        context.streams.append(
            context.stream(model=f"a{number}", prompt=PROMPT, max_tokens=context.running.engine.tokens(100))
        )


def kill_during_load(context: FaultContext) -> None:
    """Streams go on, the request that waits for the load fails with it, and one behind it in the queue is served."""
    expected = _text(context, "a3")
    _push_out(context)
    pipe = write_held(_adapters(context) / "held")
    context.exits.callback(shutil.rmtree, pipe.parent)
    threads = context.exits.enter_context(ThreadPoolExecutor(2))
    body = context.fit_to_model({"model": "held", "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    body["ignore_eos"] = True
    held = threads.submit(Client(context.server).post, COMPLETE, body)
    with held_load(pipe):
        queued = threads.submit(Client(context.server).post, COMPLETE, body | {"model": "a3"})
        send_signal("ls-worker", signal.SIGKILL)(context)
        context.wait_until(lambda: "a new model worker is ready" in context.server.log)
    with held_load(pipe):  # the new worker loads it again
        pass
    assert held.result(context.deadline_s)[0] == 400
    status, response = queued.result(context.deadline_s)
    assert (status, response["choices"][0]["text"]) == (200, expected)


CASES = [
    Case("an adapter's file is removed", damage(Path.unlink), responds(400), STREAMING, flags=()),
    Case("an adapter's file is truncated", damage(truncate), responds(400), STREAMING, flags=(), is_long=True),
    Case("an adapter is replaced on disk", replace_on_disk, STREAMS_CONTINUE, flags=(), is_long=True),
    Case("an adapter is unloaded in use", unload_in_use, STREAMS_CONTINUE, flags=(), is_long=True),
    Case("more adapters in use than fit", fill_host_memory, STREAMS_CONTINUE, flags=(), is_long=True),
    Case("kill -9 ls-worker, loading an adapter", kill_during_load, STREAMS_CONTINUE, STREAMING, flags=(), restarts=1),
]
