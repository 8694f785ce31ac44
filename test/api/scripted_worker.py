"""A worker without a model that writes given texts: router, prefix cache, detokenizer and HTTP processes are real."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.messages.control import EngineInfo
from lightserve.messages.step import Step, StepResult, Token, TokenOut
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lightserve.worker.rpc import GetResult, StepServer

FOLDER = "LIGHTSERVE_TEST_SCRIPT"  # environment variable: the folder of the script, one JSON object a line
UNSCRIPTED = "The script has no text for this prompt."
CONTEXT_LEN = 65536


class ScriptedWorker:
    """The n-th request gets the n-th line of the script; a line with ``when`` waits for a prompt that matches it.

    A line with ``step_s`` makes every step of its request take that long, for tests that stop an answer.
    """

    def __init__(self, tokenizer: Tokenizer, script: Path) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._used: set[int] = set()  # lines of the script
        self._missing: dict[int, int] = {}  # tokens of a request that are not computed yet
        self._step_s: dict[int, float] = {}
        self._outputs: dict[int, list[int]] = {}  # tokens of a request that are not sampled yet, the last one first

    def launch(self, step: Step) -> GetResult:
        return lambda: self._run(step)

    def _run(self, step: Step) -> StepResult:
        for req_id in step.free:
            self._missing.pop(req_id, None)
            self._outputs.pop(req_id, None)
            self._step_s.pop(req_id, None)
        for new in step.new:
            self._missing[new.req_id] = len(new.token_ids) - len(new.cached_slots)
            line = self._next_line(self._tokenizer.decode(new.token_ids, skip_special_tokens=False))
            self._outputs[new.req_id] = self._tokenizer.encode(str(line["text"]), add_special_tokens=False)[::-1]
            self._step_s[new.req_id] = float(line.get("step_s", 0))
        time.sleep(max((self._step_s[row.req_id] for row in step.rows), default=0))
        outs = []
        for row in step.rows:
            self._missing[row.req_id] -= len(row.slots)
            if self._missing[row.req_id] == 0:
                self._missing[row.req_id] = 1
                outs.append(TokenOut(row.req_id, Token(self._next_id(row.req_id))))
        return StepResult(outs)

    def _next_id(self, req_id: int) -> int:
        ids = self._outputs[req_id]
        return ids.pop() if ids else end_id(self._tokenizer)

    def _next_line(self, prompt: str) -> dict[str, Any]:
        lines: list[dict[str, Any]] = [json.loads(line) for line in self._script.read_text().splitlines()]
        for index, line in enumerate(lines):
            if index not in self._used and re.search(line.get("when", ""), prompt):
                self._used.add(index)
                return line
        return {"text": UNSCRIPTED}


def end_id(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_id is not None
    return tokenizer.eos_id


def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config.worker
    server = StepServer(child_config.worker_path(child_config.index, child_config.generation))
    tokenizer = load_tokenizer(resolve(config.model_dir, needs_weights=False))
    context_len = config.max_req_total_len or CONTEXT_LEN
    pool_len = config.max_total_token_num or 8 * context_len
    launcher.send(
        EngineInfo(
            max_total_token_num=pool_len,
            max_req_total_len=min(context_len, pool_len),
            vocab_size=tokenizer.num_ids,
            pipeline_depth=1,
            eos_token_ids=(end_id(tokenizer),),
        )
    )
    server.serve(ScriptedWorker(tokenizer, Path(os.environ[FOLDER], "script")).launch)


if __name__ == "__main__":
    run_child("scripted worker", main)
