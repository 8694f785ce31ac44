"""A trainer in a process of its own, which sends tensors of files to tests in one process group of gloo.

    python -m test.tensor_sender PORT

Each line of its input is a file, and the names of the tensors of each broadcast. It needs torch and nothing of
LightServe.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from test.ports import free_port
from test.rl_trainer import Trainer

ROOT = Path(__file__).parents[1]


class TensorSender:
    """The process, for the one that it sends to. It ends with that."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "test.tensor_sender", str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=ROOT)

    def send(self, tensors: dict[str, Tensor], broadcasts: Sequence[Sequence[str]]) -> None:
        """Begin to send. Several tensors of one broadcast come as their bytes."""
        assert self._process.stdin is not None
        folder = TemporaryDirectory()
        file = f"{folder.name}/tensors.safetensors"
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)
        self._process.stdin.write(json.dumps({"file": file, "broadcasts": broadcasts}) + "\n")
        self._process.stdin.flush()
        self._folder = folder  # until the next one


def _sendable(tensor: Tensor) -> Tensor:
    """Gloo knows no floats of 8 bits."""
    is_unknown = tensor.dtype.is_floating_point and tensor.itemsize == 1
    return tensor.contiguous().view(torch.uint8) if is_unknown else tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def main() -> None:
    torch.set_num_threads(1)
    trainer = Trainer("", "", int(sys.argv[1]), "sglang")
    trainer.open_group()
    for line in sys.stdin:
        order = json.loads(line)
        tensors = load_file(order["file"])
        for names in order["broadcasts"]:
            sent = [tensors[name] for name in names]
            trainer.send(_sendable(sent[0]) if len(sent) == 1 else torch.cat([_bytes_of(tensor) for tensor in sent]))


if __name__ == "__main__":
    main()
