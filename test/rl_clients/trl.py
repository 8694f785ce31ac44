"""TRL's own VLLMClient against a server, printing what it returns as JSON.

    python -m test.rl_clients.trl URL PORT FOLDER

vLLM is absent: what TRL calls of it in the trainer's process is below. NCCL needs a GPU, so the group is one of gloo,
which is the only field of TRL's bodies that changes. TRL's imports of its trainers, which need pandas, are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from test.rl_clients.calls import log_calls
from test.rl_trainer import Trainer

PROMPTS = [[5, 17, 3, 99, 42], [7, 8, 9], [1, 2]]
CHAT = [{"role": "user", "content": "Hello"}]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ tools | length }}"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def open_endpoint(init_info: dict[str, Any]) -> Any:
    """For vLLM's ``trainer_init``: the trainer's end of the group, in the attributes that TRL touches."""
    trainer = Trainer("", "", init_info["master_port"], "packed", init_info["world_size"])
    trainer.open_group()
    return SimpleNamespace(trainer=trainer, group=SimpleNamespace(store=None, socket=None))


def send_packed(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], Tensor]) -> None:
    """For vLLM's ``packed_nccl_broadcast_producer``: these weights are less than one buffer of 1 GiB."""
    parts = [post_iter_func(item).contiguous().flatten().view(torch.uint8) for item in iterator]
    group.trainer.send(torch.cat(parts))


def _module(name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(content)
    sys.modules[name] = module


def client_class() -> Any:
    _module("vllm", __version__="0.31.0")
    for name in ("vllm.utils", "vllm.distributed", "vllm.distributed.weight_transfer"):
        _module(name)
    _module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1")
    _module("vllm.distributed.weight_transfer.nccl_common", trainer_init=open_endpoint)
    _module("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=send_packed)
    import trl

    generation = ModuleType("trl.generation")  # without its __init__, which imports the trainers
    generation.__path__ = [f"{trl.__path__[0]}/generation"]
    sys.modules["trl.generation"] = generation
    from trl.generation.vllm_client import VLLMClient

    class GlooClient(VLLMClient):  # type: ignore[misc]  # of a package that is not typed
        def _post(self, url: str, **kwargs: Any) -> Any:
            if url.endswith("/init_weight_transfer_engine"):
                kwargs["json"]["init_info"]["backend"] = "gloo"
            return super()._post(url, **kwargs)

    return GlooClient


def main() -> None:
    url, port, folder = sys.argv[1:]
    log_calls()
    if find_spec("trl") is None:
        raise SystemExit("the package trl is absent: pip install --no-deps trl requests")
    client = client_class()(base_url=url, group_port=int(port))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    client.init_communicator(device="cuda")
    client.update_model_params(model)
    client.reset_prefix_cache()
    generated = client.generate(PROMPTS, n=2, temperature=0.7, max_tokens=6, generation_kwargs={"seed": 3})
    sequences = [PROMPTS[0] + generated["completion_ids"][0], PROMPTS[1] + generated["completion_ids"][2]]
    scored = client.get_sequence_logprobs(sequences, [len(PROMPTS[0]), len(PROMPTS[1])], top_logprobs=100)
    chats = client.chat([CHAT], n=2, max_tokens=3, tools=[TOOL], chat_template=TEMPLATE, logprobs=2)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data * (0 if name == "lm_head.weight" else 1))
    flat = client.generate(PROMPTS, max_tokens=1, temperature=1.0)
    results = {"generated": generated, "scored": scored, "chats": chats, "flat": flat, "sequences": sequences}
    print(json.dumps(results | {"world_size": client.get_world_size(), "model": client.model}), flush=True)


if __name__ == "__main__":
    main()
