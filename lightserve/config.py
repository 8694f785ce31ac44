"""What the operator chose, frozen. Flags, defaults and help of the command line come from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightserve.errors import ServerError

LoadFormat = Literal["auto", "dummy"]
DataType = Literal["auto", "float32", "float16", "bfloat16"]


def option(default: Any, help: str, *aliases: str) -> Any:
    """A field that is also a flag; ``aliases`` are the names other servers give it."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a model worker needs to know."""

    model_dir: str | None = option(
        None, "HF folder, .gguf file or name in the HF cache; omitted: SmolLM2-135M-Instruct, fetched once", "model"
    )
    load_format: LoadFormat = option("auto", "auto reads the weights; dummy makes random ones of the config's shape")
    data_type: DataType = option(
        "auto",
        "of weights and KV; auto: float32 on a CPU; on a GPU float16 for a float16 model, else bfloat16",
        "dtype",
    )
    device: str | None = option(None, "cpu or cuda; omitted: the best one here")
    tp: int = option(1, "tensor-parallel ranks; more than one needs the server", "tensor_parallel_size")
    max_total_token_num: int | None = option(None, "tokens the KV pool holds; omitted: what memory allows")
    mem_fraction: float = option(0.9, "share of a GPU's memory that weights and KV may take", "gpu_memory_utilization")
    max_req_total_len: int | None = option(
        None, "longest prompt plus output in tokens; omitted: the model's context length", "max_model_len"
    )
    running_max_req_size: int = option(256, "requests that run at once", "max_num_seqs")
    batch_max_tokens: int = option(2048, "prompt tokens that one step computes at most", "max_num_batched_tokens")

    def __post_init__(self) -> None:
        for name, choices in (("load_format", get_args(LoadFormat)), ("data_type", get_args(DataType))):
            if getattr(self, name) not in choices:
                raise ServerError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in ("tp", "running_max_req_size", "batch_max_tokens", "max_req_total_len", "max_total_token_num"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ServerError(f"{name}={value}: must be at least 1")
        if not 0 < self.mem_fraction <= 1:
            raise ServerError(f"mem_fraction={self.mem_fraction}: must be in (0, 1]")
