"""slime's own SGLangEngine against a server, in the order in which slime's trainer calls it.

    python -m test.rl_clients.slime URL PORT FOLDER

Its source has to be importable. Ray, SGLang and httpx, which the methods called here do not use, may be absent.
"""

from __future__ import annotations

import json
import sys
import threading
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from safetensors.torch import load_file

from test.rl_clients.absent import stand_in_for
from test.rl_clients.calls import log_calls
from test.rl_trainer import Trainer

GROUP = "trainer"


def engine_of(url: str) -> Any:
    stand_in_for("ray", "sglang", "httpx")
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(Namespace(rollout_external=True), rank=0)
    address = urlparse(url)
    # as its init() sets them from its arguments
    engine.node_rank, engine.server_host, engine.server_port = 0, address.hostname, address.port
    return engine


def beside(call: Any, work: Any) -> Any:
    """The reply to a call, as Ray would run it while the trainer goes on."""
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(call()))
    thread.start()
    work()
    thread.join()
    return replies[0]


def main() -> None:
    url, port, folder = sys.argv[1:]
    log_calls()
    if find_spec("slime") is None or not (Path(find_spec("slime").origin or "").parent / "backends").is_dir():  # type: ignore[union-attr]
        raise SystemExit("slime is absent: put a checkout of THUDM/slime on PYTHONPATH")
    engine = engine_of(url)
    from slime.backends.sglang_utils.external import discover_external_engines

    [found] = discover_external_engines([url])
    trainer = Trainer(url, "", int(port), "sglang")
    joined = beside(
        lambda: engine.init_weights_update_group("127.0.0.1", int(port), 1, 2, GROUP, "gloo"), trainer.open_group
    )
    engine.pause_generation()
    engine.flush_cache()
    updates = []
    items = list(load_file(Path(folder) / "model.safetensors").items())
    for part in (dict(items[:9]), dict(items[9:])):
        announced = [list(part), [tensor.dtype for tensor in part.values()], [list(t.shape) for t in part.values()]]
        call = lambda args=announced: engine.update_weights_from_distributed(*args, GROUP, weight_version="7")  # noqa: E731
        updates.append(beside(call, lambda tensors=part: trainer.send_each(tensors)))
    engine.continue_generation()
    version = engine.get_weight_version()
    engine.destroy_weights_update_group(GROUP)
    trainer.close()
    from_disk = engine.update_weights_from_disk(folder, weight_version="8")
    engine.release_memory_occupation()
    engine.resume_memory_occupation(tags=["weights"])
    engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
    results = {"joined": joined, "updates": updates, "version": version, "from_disk": from_disk}
    results |= {"parallel": found.parallel_config, "type": found.worker_type, "healthy": engine.health_generate(60.0)}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
