"""What the operator chose, frozen. Flags, defaults and help of the command line come from these fields."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightserve.errors import ServerError

Switch = Literal["on", "off"]
LoadFormat = Literal["auto", "dummy"]
DataType = Literal["auto", "float32", "float16", "bfloat16"]

# One HTTP process writes an event in about 25 us: 256 streams take it longer than a step takes a GPU. The worker, the
# router, the detokenizer and whoever calls want cores too, and four of them were enough for 37,000 tokens a second.
CORES_PER_HTTP_PROCESS = 4
MAX_HTTP_PROCESSES = 4


def option(default: Any, help: str, *aliases: str) -> Any:
    """A field that is also a flag; ``aliases`` are the names other servers give it."""
    metadata = {"help": help, "aliases": aliases}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


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
    tp: int = option(1, "tensor-parallel ranks, one process and one device each", "tensor_parallel_size")
    max_total_token_num: int | None = option(None, "tokens the KV pool holds; omitted: what memory allows")
    mem_fraction: float = option(0.9, "share of a GPU's memory that weights and KV may take", "gpu_memory_utilization")
    max_req_total_len: int | None = option(
        None, "longest prompt plus output in tokens; omitted: the model's context length", "max_model_len"
    )
    running_max_req_size: int = option(256, "requests that run at once", "max_num_seqs")
    batch_max_tokens: int | None = option(
        None, "tokens that one step computes at most; omitted: what suits the device", "max_num_batched_tokens"
    )
    step_timeout: float | None = option(
        None, "seconds after which a step hangs, and its worker is replaced; 0: never; omitted: CPU 600, GPU 60"
    )

    deterministic: bool = option(
        False, "bit-identical results whatever else is in the batch, cached or cut into chunks; slower"
    )

    def __post_init__(self) -> None:
        for name, choices in (("load_format", get_args(LoadFormat)), ("data_type", get_args(DataType))):
            if getattr(self, name) not in choices:
                raise ServerError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        _at_least(self, 1, "tp", "running_max_req_size", "batch_max_tokens", "max_req_total_len", "max_total_token_num")
        _at_least(self, 0, "step_timeout")
        if not 0 < self.mem_fraction <= 1:
            raise ServerError(f"mem_fraction={self.mem_fraction}: must be in (0, 1]")
        if self.deterministic and self.tp > 2:  # a sum of two is the same either way round
            raise ServerError("deterministic needs tp 1 or 2: the sum over more ranks has no fixed order")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What the router needs to know besides."""

    router_policy: str = option("priority", "who is admitted next: fifo, priority or cache_aware", "scheduling_policy")
    router_token_ratio: float = option(
        0.85, "share of the KV pool up to which output lengths are guessed; 0: reserve all that requests may make"
    )
    chunked_prefill_size: int | None = option(
        None,
        "prompt tokens of a step in which others decode, and more the more of those there are and the more wait; "
        "omitted: what suits the device",
        "long_prefill_token_threshold",
    )
    disable_chunked_prefill: bool = option(False, "compute every prompt in one step")
    disable_dynamic_prompt_cache: bool = option(False, "share no prefixes between requests", "no_enable_prefix_caching")
    request_timeout: float = option(0.0, "seconds after which any request ends with an error; 0: never")
    max_queue_size: int = option(2048, "requests that may wait; one more is answered 429", "max_queued_requests")
    eos_id: list[int] = option([], "token ids that end an answer; omitted: those of the model's files")
    log_stats_interval: float = option(10.0, "seconds between throughput lines while there is work; 0: none")

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_queue_size", "chunked_prefill_size")
        _at_least(self, 0, "log_stats_interval", "request_timeout", "router_token_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """What an HTTP process needs to know besides."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 for every one of this machine")
    port: int = option(8000, "port to listen at; 0 picks a free one")
    httpserver_workers: int | None = option(
        None,
        "HTTP processes behind the port; omitted: one for every 4 cores, at least 1 and at most 4",
        "api_server_count",
    )
    model_name: str | None = option(
        None, "what clients call the model; omitted: its folder's name", "served_model_name"
    )
    api_key: list[str] = option([], "keys that clients may send; omitted: no key is needed")
    api_key_file: str | None = option(None, "file of such keys, one a line; unlike --api_key, ps does not show them")
    admin_key: list[str] = option(
        [], "keys for what changes the server, such as /abort_request; omitted: what opens the other routes"
    )
    admin_key_file: str | None = option(None, "file of such keys, one a line")
    ssl_keyfile: str | None = option(None, "private key for HTTPS, in PEM; omitted: it is in ssl_certfile")
    ssl_certfile: str | None = option(None, "certificate chain for HTTPS, in PEM; omitted: HTTP")
    ssl_ca_certs: str | None = option(
        None, "certificates of authorities, in PEM, one of which must have signed the certificate of every client"
    )
    tool_call_parser: str = option(
        "auto", "format of the model's tool calls, such as hermes or llama3_json; auto: what its chat template shows"
    )
    reasoning_parser: str = option(
        "auto", "how the model marks reasoning: qwen3, deepseek_r1, two tags as BEGIN,END; auto: by its chat template"
    )
    use_tgi_api: bool = option(False, "read a body on /generate that could be LightLLM's or TGI's as TGI's")
    allowed_origins: list[str] = option([], "origins whose pages may call the server (CORS); * for all")
    max_body_bytes: int = option(16 * 2**20, "largest request body; a larger one is answered 413")
    max_choices: int = option(128, "answers that one request may ask for: prompts times n")
    metrics_compat: str = option("", "also export metrics under the names of vllm and/or lightllm, comma-separated")
    disable_log_requests: bool = option(False, "write no line a request", "disable_uvicorn_access_log")

    def __post_init__(self) -> None:
        _at_least(self, 1, "httpserver_workers", "max_body_bytes", "max_choices")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ServerError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
        if not 0 <= self.port < 65536:
            raise ServerError(f"port={self.port}: must be in 0..65535")
        unknown = set(self.compat_names) - {"vllm", "lightllm"}
        if unknown:
            raise ServerError(f"metrics_compat={self.metrics_compat!r}: choose from vllm, lightllm")

    @property
    def num_processes(self) -> int:
        """As many for every process of this machine that asks."""
        return self.httpserver_workers or min(max(cores() // CORES_PER_HTTP_PROCESS, 1), MAX_HTTP_PROCESSES)

    @property
    def compat_names(self) -> list[str]:
        return [name.strip() for name in self.metrics_compat.split(",") if name.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What only the launcher needs to know."""

    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    restart_worker: Switch = option("on", "replace a model worker that dies; off: the server ends with it")
    process_timeout: float = option(
        60.0, "seconds after which a process that does not answer is killed, a worker after half of them; 0: never"
    )
    null_worker: bool = option(False, "no model: a worker that makes up tokens, to measure the rest of the server")
    null_step_ms: float = option(0.0, "how long a step of the null worker takes")

    def __post_init__(self) -> None:
        _at_least(self, 0, "drain_timeout", "process_timeout", "null_step_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    worker: WorkerConfig
    router: RouterConfig
    http: HttpConfig
    launch: LaunchConfig


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < float("inf"):
            raise ServerError(f"{name}={value}: must be at least {least}")
