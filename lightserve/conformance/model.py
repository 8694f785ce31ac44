"""A tiny model on the device beside the CPU's definitions, and the answers of a server on the device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import Device
from lightserve.conformance.finding import Check, CheckError, expect
from lightserve.offline.llm import LLM
from lightserve.parity.ours import greedy_ids, logits_of

TOKENS, DECODED = 150, 6  # of the text whose logits are compared: a prompt in two chunks, then decode steps
LIMITS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
PROMPTS = ["The server", "0123456789" * 7, "x"]
NEW_TOKENS = 12
START_S = 300.0
ANSWER_S = 60.0
POOL: dict[str, Any] = {"max_total_token_num": 16384, "max_req_total_len": 512}


class Model:
    def __init__(self, platform: Device, folder: Path, ops_backends: Sequence[str] = ()) -> None:
        self._platform, self._folder, self._ops_backends = platform, folder, list(ops_backends)
        self._greedy: list[list[int]] = []  # of the device

    def checks(self) -> dict[str, Check]:
        return {"logits of a tiny model": self.logits, "its greedy text": self.text, "a server's answers": self.answers}

    def _on_device(self) -> LLM:
        return LLM(str(self._folder), device=self._platform.name, ops_backend=self._ops_backends, **POOL)

    def _prompts(self) -> list[list[int]]:
        return [list(prompt.encode()) for prompt in PROMPTS]

    def logits(self) -> str:
        """With cached tokens of earlier chunks and decode steps."""
        ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        wanted = self._logits_on_cpu(ids)
        with self._on_device() as llm:
            self._greedy = _greedy_alone(llm, self._prompts())
            dtype = str(llm.worker.model.args.dtype).removeprefix("torch.")
            actual = logits_of(llm.worker.model, ids, DECODED)
        error = float((actual - wanted).norm() / wanted.norm())
        expect(error <= LIMITS[dtype], f"{error:.1e} from the CPU in float32; the limit in {dtype} is {LIMITS[dtype]}")
        return f"{error:.1e} from the definitions in float32, computed in {dtype}"

    def _logits_on_cpu(self, ids: list[int]) -> Tensor:
        with LLM(str(self._folder), device="cpu", **POOL) as llm:
            ops.use_backend(ops.REFERENCE)
            return logits_of(llm.worker.model, ids, DECODED)

    def text(self) -> str:
        expect(bool(self._greedy), "the model does not run")
        expect(all(len(ids) == NEW_TOKENS for ids in self._greedy), "a text has the wrong length")
        with self._on_device() as llm:
            again = _greedy_alone(llm, self._prompts())
            together = greedy_ids(llm, self._prompts(), NEW_TOKENS)
        expect(again == self._greedy, "the same prompts get another text the second time")
        first_tokens = [ids[0] for ids in together]
        expect(first_tokens == [ids[0] for ids in again], f"in one step, prompts begin with {first_tokens}")
        return f"of {len(PROMPTS)} prompts, twice the same"

    def answers(self) -> str:
        with self._server() as url:
            before = time.monotonic()
            for prompt, ids in zip(self._prompts(), self._greedy, strict=True):
                answer = _complete(url, {"prompt": prompt, "return_token_ids": True})
                expect(answer["usage"]["completion_tokens"] == NEW_TOKENS, f"an answer is {answer}")
                got = answer["choices"][0]["token_ids"]
                expect(got == ids, f"a server answers {got} and the model {ids}")
            took_s = time.monotonic() - before
        return f"{len(PROMPTS)} texts over HTTP, those of the model, in {took_s:.1f} s"

    @contextmanager
    def _server(self) -> Iterator[str]:
        log = self._folder / "server.log"
        command = [sys.executable, "-m", "lightserve.server.api_server", "--model_dir", str(self._folder)]
        command += ["--device", self._platform.name, "--port", "0", "--model_name", "tiny"]
        command += [f"--{name}={value}" for name, value in POOL.items()]
        command += ["--ops_backend", *self._ops_backends] if self._ops_backends else []
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            process.wait(ANSWER_S)


def _greedy_alone(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """One after the other: in 16 bits the sums of a step of several prompts may round to other tokens."""
    return [greedy_ids(llm, [prompt], NEW_TOKENS)[0] for prompt in prompts]


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"ready at (https?://\S+)", log.read_text()):
            return match[1]
        time.sleep(0.1)
    raise CheckError(f"the server does not start: {log.read_text().strip()[-250:]}")


def _complete(url: str, fields: dict[str, Any]) -> Any:
    body = {"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return json.load(response)
