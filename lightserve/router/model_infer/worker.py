"""One rank of a model: builds it, runs the steps it is told to run, samples. Decides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig
from lightserve.common.checkpoint import open_checkpoint, total_bytes
from lightserve.common.device import DeviceKind, pick_device
from lightserve.common.mem_manager import kv_bytes_per_token
from lightserve.common.tp import TpGroup
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.io_struct import NewReq, SamplingParams, Step, StepRow, TokenOut
from lightserve.model_files.source import ModelSource
from lightserve.models.registry import get_model_class
from lightserve.router.model_infer.infer_batch import InferBatch
from lightserve.router.model_infer.sampler import Sampler
from lightserve.utils.progress import Progress

WARM_UP_LENGTHS = (16, 7, 100, 1)  # Triton compiles apart for 1, for multiples of 16 and for other lengths
WARM_UP_DECODES = 2
WARM_UP_SAMPLING = (
    SamplingParams(max_new_tokens=8, temperature=0.0),
    SamplingParams(max_new_tokens=8, top_k=10, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1),
)


class ModelWorker:
    def __init__(self, config: WorkerConfig, source: ModelSource, tp: TpGroup) -> None:
        kind = pick_device(config.device)
        device = kind.device(tp.rank)
        kind.bind(device)
        self.model_config = ModelConfig.from_hf(source.hf_config())
        self.max_req_total_len = self.model_config.request_len(config.max_req_total_len)
        dtype = _dtype(config, self.model_config, kind)
        args = ModelArgs(
            config=self.model_config,
            dtype=dtype,
            device=device,
            tp=tp,
            checkpoint=_with_progress(source) if config.load_format == "auto" else None,
            max_total_token_num=_KvPool(config, self.model_config, self.max_req_total_len, dtype, device, tp),
            max_reqs=config.running_max_req_size,
            max_req_total_len=self.max_req_total_len,
        )
        self.model = get_model_class(self.model_config.model_type)(args)
        ranks = f", {tp.size} ranks" if tp.size > 1 else ""
        self.computed_in = f"in {str(dtype).removeprefix('torch.')} on {kind.name}{ranks}"
        self._batch = InferBatch(self.model.req_manager, device)
        self._sampler = Sampler()

    @property
    def max_total_token_num(self) -> int:
        return self.model.mem_manager.size

    @property
    def longest_request(self) -> int:
        """Prompt plus output in tokens, of one that has the pool for itself."""
        return min(self.max_req_total_len, self.max_total_token_num)

    def warm_up(self) -> None:
        """Run every kind of step once before anyone waits: what compiles or packs at first use does it here."""
        longest = min(self.max_req_total_len, self.max_total_token_num // len(WARM_UP_LENGTHS)) - WARM_UP_DECODES
        reqs = [
            NewReq(-1 - i, [0] * length, WARM_UP_SAMPLING[i % 2], seed=0)
            for i, length in enumerate(WARM_UP_LENGTHS)
            if length <= longest
        ]
        reqs = reqs[: self.model.req_manager.max_reqs]
        for batch in ([req] for req in reqs[:2]):
            self._run_once(batch)
        self._run_once(reqs)

    def _run_once(self, new: list[NewReq]) -> None:
        """Prefill and decode; the slots are free, since nobody else runs."""
        if not new:
            return
        ids = [req.req_id for req in new]
        lengths = [len(req.prompt_ids) for req in new]
        ends = list(itertools.accumulate(lengths))
        prompts = [StepRow(i, list(range(end - n, end))) for i, n, end in zip(ids, lengths, ends, strict=True)]
        self.run(Step(prompts, new))
        for step in range(WARM_UP_DECODES):
            first = ends[-1] + step * len(ids)
            self.run(Step([StepRow(req_id, [first + i]) for i, req_id in enumerate(ids)]))
        self.run(Step([], free=ids))

    def run(self, step: Step) -> list[TokenOut]:
        """Run a step; a token comes back for every row that reaches the end of its request's known tokens."""
        for req_id in step.free:
            self._batch.remove(req_id)
        for new in step.new:
            self._batch.add(new)
        if not step.rows:
            return []
        model_input, reqs = self._batch.prepare(step.rows)
        logits = self.model.forward(model_input)
        tokens = self._sampler.sample(logits, reqs)
        logprobs = self._sampler.logprobs(tokens, logits, reqs)
        outs = []
        for req, token, (logprob, top) in zip(reqs, tokens.tolist(), logprobs, strict=True):
            if req.cache_len == len(req.token_ids):
                req.append(token)
                outs.append(TokenOut(req.req_id, token, logprob, top))
        return outs


@dataclass(frozen=True, slots=True)
class _KvPool:
    """How many tokens the KV pool holds; called once the weights have taken their memory."""

    config: WorkerConfig
    model: ModelConfig
    max_req_total_len: int
    dtype: torch.dtype
    device: torch.device
    tp: TpGroup

    def __call__(self) -> int:
        most = self.config.running_max_req_size * self.max_req_total_len  # more could never be used
        if self.config.max_total_token_num is not None:
            return min(self.config.max_total_token_num, most)
        budget = pick_device(self.device.type).kv_budget(self.device, self.config.mem_fraction)
        fits = budget // kv_bytes_per_token(self.model, self.tp.size, self.dtype)
        fits = min(self.tp.min_of_ranks(fits, self.device), most)
        if fits < self.max_req_total_len:
            remedy = f"set max_req_total_len to {fits} or less" if fits else "use a smaller model or more ranks"
            raise ServerError(
                f"after the weights, memory holds {fits} tokens of KV, fewer than one request of "
                f"{self.max_req_total_len}; {remedy}"
            )
        return fits


def _dtype(config: WorkerConfig, model: ModelConfig, kind: DeviceKind) -> torch.dtype:
    if config.data_type == "auto":
        return kind.dtype_for(model.hf.get("dtype") or model.hf.get("torch_dtype"))
    dtype: torch.dtype = getattr(torch, config.data_type)
    return dtype


def _with_progress(source: ModelSource) -> Iterator[CheckpointTensor]:
    with Progress("weights", total_bytes(source)) as progress:
        for tensor in open_checkpoint(source):
            yield tensor
            progress.advance(tensor.tensor.nbytes)
