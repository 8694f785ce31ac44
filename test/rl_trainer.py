"""A trainer in a process of its own: torch and HTTP, nothing of LightServe.

    python -m test.rl_trainer URL KEY PORT API WORLD_SIZE FOLDER...

It joins the server by gloo, sends the weights of each folder in turn, and prints the replies of every update as JSON.
API is sglang, bucket (SGLang's flattened buckets), vllm or packed (vLLM's packed buffers); joins: it sends nothing;
dies: it exits after the first tensor. Behind one of these and a colon, draft means that the weights are of drafts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper, _world

TIMEOUT = timedelta(seconds=120)
PACKED_BYTES = 100_000  # several chunks for a tiny model
GROUP = {"sglang": "trainer", "bucket": "trainer", "vllm": "weight_transfer", "packed": "weight_transfer"}


class Trainer:
    def __init__(self, url: str, key: str, port: int, api: str, world_size: int = 2, selector: str = "all") -> None:
        self._url, self._key, self._port, self.api, self._world_size = url, key, port, api, world_size
        self._selector = selector
        self._group: Any = None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}

    def beside(self, path: str, body: dict[str, Any], work: Callable[[], None]) -> dict[str, Any]:
        """The reply to a call, which comes after ``work``."""
        replies: list[dict[str, Any]] = []
        call = threading.Thread(target=lambda: replies.append(self.post(path, body)))
        call.start()
        work()
        call.join()
        return replies[0]

    def join(self) -> dict[str, Any]:
        where = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": self._world_size, "backend": "gloo"}
        if self.api in ("sglang", "bucket"):
            body = {**where, "master_port": str(self._port), "group_name": GROUP[self.api]}
            return self.beside("/init_weights_update_group", body, self.open_group)
        packed = {"packed": self.api == "packed", "packed_buffer_size_bytes": PACKED_BYTES}
        info = {**where, "master_port": self._port, **packed}
        return self.beside("/init_weight_transfer_engine", {"init_info": info}, self.open_group)

    def open_group(self) -> None:
        """As trainers do beside their own default group."""
        name = GROUP[self.api]
        store = TCPStore("127.0.0.1", self._port, self._world_size, is_master=True, timeout=TIMEOUT)
        self._group, _ = _new_process_group_helper(
            self._world_size, 0, [], "gloo", PrefixStore(name, store), group_name=GroupName(name), timeout=TIMEOUT
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._world_size)}

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def send(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor.contiguous(), 0).wait()

    def update(self, tensors: dict[str, Tensor], version: str) -> list[dict[str, Any]]:
        if self.api in ("sglang", "bucket"):
            return [self._update_half(part, version) for part in _halves(tensors)]
        path = "/start_draft_weight_update" if self._selector == "draft" else "/start_weight_update"
        started = self.post(path, {})
        info = {
            "names": list(tensors),
            "dtype_names": [dtype_of(tensor) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        send = (lambda: self._send_packed(tensors)) if self.api == "packed" else (lambda: self.send_each(tensors))
        updated = self.beside("/update_weights", {"update_info": info}, send)
        return [started, updated, self.post("/finish_weight_update", {"weight_version": version})]

    def die_in_broadcast(self, tensors: dict[str, Tensor]) -> None:
        def die() -> None:
            self.send(next(iter(tensors.values())))
            os._exit(9)

        self.beside("/update_weights_from_distributed", self.announced(tensors), die)

    def _update_half(self, part: dict[str, Tensor], version: str) -> dict[str, Any]:
        body = self.announced(part) | {"weight_version": version}
        if self.api == "bucket":
            bytes_of_all = torch.cat([tensor.flatten().view(torch.uint8) for tensor in part.values()])
            send = lambda: self.send(bytes_of_all)  # noqa: E731
            return self.beside("/update_weights_from_distributed", body | {"load_format": "flattened_bucket"}, send)
        return self.beside("/update_weights_from_distributed", body, lambda: self.send_each(part))

    def announced(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "names": list(tensors),
            "dtypes": [dtype_of(tensor) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": GROUP[self.api],
            "selector": self._selector,
        }

    def send_each(self, tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            self.send(tensor)

    def _send_packed(self, tensors: dict[str, Tensor]) -> None:
        parts: list[Tensor] = []
        for tensor in tensors.values():
            parts.append(tensor.contiguous().flatten().view(torch.uint8))
            if sum(map(len, parts)) > PACKED_BYTES:
                self.send(torch.cat(parts))
                parts = []
        if parts:
            self.send(torch.cat(parts))


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _halves(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    items = list(tensors.items())
    middle = len(items) // 2
    return [dict(items[:middle]), dict(items[middle:])]


def main() -> None:
    url, key, port, kind, world_size, *folders = sys.argv[1:]
    api, _, selector = kind.partition(":")
    trainer = Trainer(url, key, int(port), api if api in GROUP else "sglang", int(world_size), selector or "all")
    print(json.dumps([trainer.join()]), flush=True)
    if api == "dies":
        trainer.die_in_broadcast(load_file(Path(folders[0]) / "model.safetensors"))
    for folder in folders if api in GROUP else ():
        replies = trainer.update(load_file(Path(folder) / "model.safetensors"), version=Path(folder).name)
        print(json.dumps(replies), flush=True)
    trainer.close()
    os._exit(0)  # threads of gloo may still wait for workers, which would end this process with an error


if __name__ == "__main__":
    main()
