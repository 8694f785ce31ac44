"""One rank of a model: builds it, runs the steps it is told to run, samples. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightserve.common.basemodel import CheckpointTensor, ModelArgs, ModelConfig
from lightserve.common.checkpoint import open_checkpoint, total_bytes
from lightserve.common.device import DeviceKind, pick_device
from lightserve.common.mem_manager import kv_bytes_per_token
from lightserve.common.tp import TpGroup
from lightserve.config import WorkerConfig
from lightserve.errors import ModelFilesError
from lightserve.io_struct import Step, TokenOut
from lightserve.model_files.source import ModelSource
from lightserve.models.registry import get_model_class
from lightserve.router.model_infer.infer_batch import InferBatch
from lightserve.router.model_infer.sampler import logprobs_of, sample
from lightserve.utils.progress import Progress


class ModelWorker:
    def __init__(self, config: WorkerConfig, source: ModelSource, tp: TpGroup) -> None:
        kind = pick_device(config.device)
        device = kind.device(tp.rank)
        kind.bind(device)
        self.model_config = ModelConfig.from_hf(source.hf_config())
        self.max_req_total_len = _max_req_total_len(config, self.model_config)
        dtype = _dtype(config, self.model_config, kind)
        checkpoint = _with_progress(source) if config.load_format == "auto" else None

        def max_total_token_num() -> int:
            wanted = config.max_total_token_num
            if wanted is None:
                budget = kind.kv_budget(device, config.mem_fraction)
                wanted = budget // kv_bytes_per_token(self.model_config, tp.size, dtype)
            wanted = min(tp.min_of_ranks(wanted, device), config.running_max_req_size * self.max_req_total_len)
            if wanted < self.max_req_total_len and config.max_total_token_num is None:
                raise ModelFilesError(
                    f"memory holds {wanted} tokens of KV, fewer than one request of {self.max_req_total_len}; "
                    f"lower max_req_total_len to {wanted} or less"
                )
            return wanted

        self.model = get_model_class(self.model_config.model_type)(
            ModelArgs(
                config=self.model_config,
                dtype=dtype,
                device=device,
                tp=tp,
                checkpoint=checkpoint,
                max_total_token_num=max_total_token_num,
                max_reqs=config.running_max_req_size,
                max_req_total_len=self.max_req_total_len,
            )
        )
        self._batch = InferBatch(self.model.req_manager, device)

    @property
    def max_total_token_num(self) -> int:
        return self.model.mem_manager.size

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
        tokens = sample(logits, reqs)
        logprobs = logprobs_of(tokens, logits, reqs)
        outs = []
        for req, token, logprob in zip(reqs, tokens.tolist(), logprobs, strict=True):
            if req.cache_len == len(req.token_ids):
                req.append(token)
                outs.append(TokenOut(req.req_id, token, logprob))
        return outs


def _max_req_total_len(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = config.max_req_total_len or model.max_position
    if wanted > model.max_position:
        raise ModelFilesError(
            f"max_req_total_len={wanted}, but the model was trained on {model.max_position} tokens; lower it"
        )
    return wanted


def _dtype(config: WorkerConfig, model: ModelConfig, kind: DeviceKind) -> torch.dtype:
    name = config.data_type
    if name == "auto":
        if kind.name == "cpu":
            return kind.dtypes[0]
        name = model.hf.get("dtype") or model.hf.get("torch_dtype") or "bfloat16"
        if name not in ("float16", "bfloat16"):
            return kind.dtypes[0]
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _with_progress(source: ModelSource) -> Iterator[CheckpointTensor]:
    with Progress("weights", total_bytes(source)) as progress:
        for tensor in open_checkpoint(source):
            yield tensor
            progress.advance(tensor.tensor.nbytes)
