"""verl's own HTTP adapter of SGLang against a server, with the calls of its rollout workers.

    python -m test.rl_clients.verl URL PORT FOLDER

Its source has to be importable. SGLang, and what other modules of verl import, may be absent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import requests
from safetensors.torch import load_file, save_file

from test.rl_clients.absent import stand_in_for
from test.rl_clients.calls import log_calls

PROMPT = [5, 17, 3, 99, 42]
ADAPTER = "workers/rollout/sglang_rollout/http_server_engine.py"


def adapter_module() -> Any:
    """The module alone: the packages around it import Ray and engines."""
    package = find_spec("verl")
    file = Path((package.submodule_search_locations or [""])[0] if package else "") / ADAPTER
    spec = spec_from_file_location("http_server_engine", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise SystemExit("verl is absent: put the unpacked wheel of verl on PYTHONPATH")
    stand_in_for("sglang")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_of(module: Any, url: str) -> Any:
    engine = module.AsyncHttpServerAdapter(launch_server=False, timeout=600.0)
    address = urlparse(url)
    engine.server_args = SimpleNamespace(host=address.hostname, port=address.port, is_embedding=False)
    engine.node_rank = 0
    return engine


async def calls(engine: Any, url: str, folder: Path) -> dict[str, Any]:
    """Of a step: release, train, resume, new weights, resume, rollouts. Its own way of sending weights is refused."""
    await engine.release_memory_occupation(tags=["kv_cache", "weights"])
    await engine.resume_memory_occupation(tags=["weights"])
    written = folder.parent / "from-verl"
    written.mkdir(exist_ok=True)
    (written / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(load_file(folder / "model.safetensors"), written / "model.safetensors")
    update = partial(requests.post, f"{url}/update_weights_from_disk", json={"model_path": str(written)}, timeout=600)
    updated = (await asyncio.to_thread(update)).json()
    pickled = await refusal_of(engine)
    await engine.resume_memory_occupation(tags=["kv_cache"])
    await engine.flush_cache()
    models = await engine.available_models()
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "ignore_eos": True}
    output = await engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    aborted = await engine.abort_request(abort_all=True)
    generated = {"ids": output["output_ids"], "logprobs": output["meta_info"]["output_token_logprobs"]}
    return {"updated": updated, "pickled": pickled, "models": models, "aborted": aborted, **generated}


async def refusal_of(engine: Any) -> str:
    try:
        await engine.update_weights_from_tensor(
            SimpleNamespace(serialized_named_tensors=[b"pickle"], load_format=None, flush_cache=False)
        )
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    url, _, folder = sys.argv[1:]
    log_calls()
    engine = engine_of(adapter_module(), url)
    print(json.dumps(asyncio.run(calls(engine, url, Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
