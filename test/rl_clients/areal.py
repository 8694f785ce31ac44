"""AReaL's own SGLangBackend against a server: the requests that it builds are sent, and it parses the responses.

    python -m test.rl_clients.areal URL PORT FOLDER

Its source has to be importable. What it imports beside may be absent.
"""

from __future__ import annotations

import json
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
from safetensors.torch import load_file

from test.rl_clients.absent import stand_in_for
from test.rl_clients.calls import log_calls
from test.rl_trainer import Trainer, dtype_of

ABSENT = (
    *("torchdata", "pybase64", "ray", "sglang", "hydra", "omegaconf", "uvloop", "datasets", "aiofiles", "colorlog"),
    *("wandb", "swanlab", "trackio", "tensorboardX", "httpx", "tenacity", "aiohttp", "flask", "werkzeug", "lark"),
    *("numba", "einops", "areal.infra"),
)
PROMPT = [5, 17, 3, 99, 42]


class Server:
    def __init__(self, url: str) -> None:
        self._url = url

    def send(self, request: Any) -> Any:
        """As its engine sends them: with a JSON body, also a GET."""
        response = requests.request(request.method, self._url + request.endpoint, json=request.payload, timeout=600)
        response.raise_for_status()
        return response.json()

    def send_beside(self, request: Any, work: Any) -> Any:
        replies: list[Any] = []
        thread = threading.Thread(target=lambda: replies.append(self.send(request)))
        thread.start()
        work()
        thread.join()
        return replies[0]


def main() -> None:
    url, port, folder = sys.argv[1:]
    log_calls()
    if find_spec("areal") is None:
        raise SystemExit("AReaL is absent: put a checkout of inclusionAI/AReaL on PYTHONPATH")
    stand_in_for(*ABSENT)
    from areal.engine.sglang_remote import SGLangBackend, current_platform

    current_platform.communication_backend = "gloo"
    backend, server = SGLangBackend(), Server(url)
    parallel = SimpleNamespace(tp_size=1, pp_size=1, world_size=1)
    meta = SimpleNamespace(
        gen_allocation=SimpleNamespace(parallel=parallel), nccl_group_name="trainer", nccl_master_address="127.0.0.1",
        nccl_master_port=int(port), use_lora=False, path=folder,
    )  # fmt: skip
    server.send(backend.get_health_check_request())
    trainer = Trainer(url, "", int(port), "sglang")
    joined = server.send_beside(backend.build_init_weights_group_request(url, 0, meta), trainer.open_group)
    server.send(backend.get_pause_request())
    tensors = load_file(Path(folder) / "model.safetensors")
    specs = [SimpleNamespace(name=name, dtype=dtype_of(t), shape=list(t.shape)) for name, t in tensors.items()]
    [update] = backend.build_distributed_weight_update_requests(meta, specs).requests
    updated = server.send_beside(update, lambda: trainer.send_each(tensors))
    server.send(backend.get_resume_request())
    config = SimpleNamespace(
        stop_token_ids=[0], stop=None, use_beam_search=False, top_p=1.0, top_k=100000000, max_new_tokens=6, greedy=True,
        temperature=1.0, ignore_eos=True, skip_special_tokens=False, frequency_penalty=0.0,
    )  # fmt: skip
    request = SimpleNamespace(gconfig=config, input_ids=PROMPT, image_data=None, metadata={})
    generated = backend.parse_generation_response(server.send(backend.build_generation_request(request, False, 1)))
    [from_disk] = backend.build_disk_weight_update_requests(meta).requests
    results = {"joined": joined, "updated": updated, "from_disk": server.send(from_disk)}
    results |= {"ids": generated.output_tokens, "logprobs": generated.output_logprobs, "why": generated.stop_reason}
    server.send(backend.get_offload_request())
    server.send(backend.get_onload_request(["weights"]))
    server.send(backend.get_onload_request(["kv_cache"]))
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
