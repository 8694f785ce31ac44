"""A worker without a model, for measurements of the rest of the server."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.ipc.worker_calls import PROFILE, READ_PROFILE
from lightserve.messages.control import DEFAULT_RUNNING, EngineInfo, PoolingLimits
from lightserve.messages.step import Embedding, Step, StepResult, Token, TokenColumns, TokenOut
from lightserve.model_files.source import ModelSource, pooling_of, resolve
from lightserve.worker.profiler import WorkerProfiler
from lightserve.worker.rpc import GetResult, StepServer, handler

CONTEXT_LEN = 8192
VOCAB_SIZE = 32_000  # of a model whose files do not say it
# Ids below are special tokens and single bytes in most vocabularies: their text would be held back or left out.
FIRST_TEXT_ID = 1000


class NullWorker:
    """The next token of a request is its last token plus one. A request ends by its length only."""

    def __init__(self, step_s: float, vocab_size: int = VOCAB_SIZE) -> None:
        self._step_s = step_s
        self._vocab_size = vocab_size
        self._first_id = min(FIRST_TEXT_ID, vocab_size // 2)
        self._missing: dict[int, int] = {}  # tokens of a request that are not computed yet
        self._last: dict[int, int] = {}  # token of a request
        self._num_top: dict[int, int] = {}  # logprobs that a request wants, if it wants any
        self.token_s = 0.0  # that each token adds to a step
        self.pooling: PoolingLimits | None = None  # a result has the request's last token in every place

    def launch(self, step: Step) -> GetResult:
        return partial(self._run, step)

    def _run(self, step: Step) -> StepResult:
        for req_id in step.free:
            self._missing.pop(req_id, None)
            self._last.pop(req_id, None)
            self._num_top.pop(req_id, None)
        for new in step.new:
            if new.sampling.logprobs is not None:
                self._num_top[new.req_id] = new.sampling.logprobs
            self._missing[new.req_id] = new.num_uncomputed
            self._last[new.req_id] = int(new.token_ids[-1])
        req_ids, token_ids, embeddings, detailed = [], [], [], []
        if step.num_tokens:  # others only free requests
            time.sleep(self._step_s + self.token_s * step.num_tokens)
        for row in step.rows:
            self._missing[row.req_id] -= len(row.slots)
            if self._missing[row.req_id] == 0 and self.pooling is not None:
                count = self.pooling.size * (len(row.slots) if self.pooling.is_per_token else 1)
                values = np.full(count, self._last[row.req_id], dtype=np.float32)
                embeddings.append(Embedding(row.req_id, values.tobytes()))
            elif self._missing[row.req_id] == 0:
                self._missing[row.req_id] = 1
                self._last[row.req_id] = self._after(self._last[row.req_id])
                if row.req_id in self._num_top:
                    detailed.append(TokenOut(row.req_id, self._with_logprobs(row.req_id)))
                    continue
                req_ids.append(row.req_id)
                token_ids.append(self._last[row.req_id])
        return StepResult(
            detailed,
            embeddings=embeddings,
            plain=TokenColumns(np.array(req_ids, dtype=np.int64), np.array(token_ids, dtype=np.int32)),
        )

    def _with_logprobs(self, req_id: int) -> Token:
        """The tokens after it are less and less likely."""
        top = [self._last[req_id]]
        count = min(self._num_top[req_id], self._vocab_size - self._first_id)
        while len(top) < count:
            top.append(self._after(top[-1]))
        return Token(top[0], -1.0, [(token_id, -1.0 - index) for index, token_id in enumerate(top[:count])])

    def _after(self, token_id: int) -> int:
        return token_id + 1 if self._first_id <= token_id + 1 < self._vocab_size else self._first_id


def model_vocab_size(source: ModelSource) -> int:
    """The model's own, so that every text that its tokenizer encodes is a valid prompt."""
    size = source.hf_config().get("vocab_size")
    return size if isinstance(size, int) and size > 0 else VOCAB_SIZE


def main(child_config: ChildConfig, launcher: LauncherConnection, worker_class: type[NullWorker] = NullWorker) -> None:
    config = child_config.config.worker
    server = StepServer(child_config.worker_path(child_config.index, child_config.generation))
    context_len = config.max_req_total_len or CONTEXT_LEN
    source = resolve(config.model_dir, needs_weights=False)
    vocab_size = model_vocab_size(source)
    pooling = pooling_of(source, config.model_type, config.task, config.pooling, config.score_template)
    pooling_limits = None
    if pooling is not None:
        pooling_limits = PoolingLimits(
            pooling.size, pooling.needs_whole_prompt, pooling.is_causal, str(pooling), pooling.late is not None
        )
    pool_len = config.max_total_token_num or (config.running_max_req_size or DEFAULT_RUNNING) * context_len
    launcher.send(
        EngineInfo(
            max_total_token_num=pool_len,
            max_req_total_len=min(context_len, pool_len),
            vocab_size=vocab_size,
            pipeline_depth=1,
            step_timeout_s=config.step_timeout or 0.0,
            pooling=pooling_limits,
        )
    )
    launch_config = child_config.config.launch
    worker = worker_class(launch_config.null_step_ms / 1e3, vocab_size)
    worker.token_s = launch_config.null_token_us / 1e6
    worker.pooling = pooling_limits
    if launch_config.profile_dir is None:
        server.serve(worker.launch)
    else:
        profiler = WorkerProfiler(child_config.index, worker.launch, folder=child_config.parts_folder)
        handlers = [handler(PROFILE, profiler.run), handler(READ_PROFILE, lambda _: [profiler.read()])]
        server.serve(profiler.launch, handlers=handlers)


if __name__ == "__main__":
    run_child("null worker", main)
