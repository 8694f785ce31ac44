"""The server's configuration, frozen. The command line takes its flags, defaults and help from these fields."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from lightserve.errors import OptionError
from lightserve.utils.cpu import available_cores
from lightserve.utils.logger import LogFormat
from lightserve.utils.net import parse_redis, parse_tcp

Switch = Literal["on", "off"]
LoadFormat = Literal["auto", "dummy"]
DataType = Literal["auto", "float32", "float16", "bfloat16"]
KvDtype = Literal["auto", "none", "fp8", "int8"]
Task = Literal["generate", "embed", "classify", "score", "reward"]
PoolingKind = Literal["cls", "mean", "last", "max"]
Quantization = Literal["fp8", "int8", "w4", "gguf", "none"]
Role = Literal["normal", "prefill", "decode", "both"]
KvTransport = Literal["sockets", "nixl"]
ROLES = get_args(Role)

# One HTTP process writes an event in about 25 us: 256 streams take it longer than a GPU needs for a step. The worker,
# the router, the detokenizer and the clients need cores too, and four HTTP processes were enough for 37,000 tokens/s.
CORES_PER_HTTP_PROCESS = 4
MAX_HTTP_PROCESSES = 4  # by default
MAX_HTTPSERVER_WORKERS = 64  # ids name one of 256 processes, so each can be replaced three times before one comes again
DEFAULT_LORAS, MAX_LORAS, MAX_LORA_RANK = 8, 256, 256
CPU_LORAS_A_SLOT = 4
MAX_DEBUG_REQUESTS = 100_000  # some 100 MB
MAX_ENGINES = 64  # of one machine


def option(default: Any, help: str, *aliases: str) -> Any:
    """A field that is also a flag. ``aliases`` are its names in other servers."""
    metadata = {"help": help, "aliases": aliases}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of the model workers."""

    model_dir: str | None = option(
        None,
        "Hugging Face folder, .gguf file, or name on the hub, downloaded once: org/model[@revision] or "
        "org/model:file.gguf; default: SmolLM2-135M-Instruct",
        "model",
    )
    model_type: str | None = option(
        None, "serve the model as this model_type instead of that of its config.json; it must have the same tensors"
    )
    task: Task | None = option(
        None,
        "what the model is for: generate text, embed, classify, score pairs of texts, or reward; "
        "default: what its files say",
    )
    pooling: PoolingKind | None = option(
        None,
        "how the vectors of a text's tokens become one: cls (the first), mean, last or max; default: what its files "
        "say",
    )
    trust_remote_code: bool = option(
        False, "run the tokenizer class in the model folder's own Python code, if no file of it can be read directly"
    )
    load_format: LoadFormat = option("auto", "auto: load the weights; dummy: random weights of the config's shape")
    data_type: DataType = option(
        "auto",
        "data type of weights and KV; auto: float32 on a CPU; on a GPU float16 for a float16 model, else bfloat16",
        "dtype",
    )
    kv_dtype: KvDtype = option(
        "auto",
        "how the KV cache is stored: fp8 (e4m3) or int8 halve its size; none: as --data_type; auto: fp8 if the "
        "checkpoint was quantised for it, else none",
        "kv_cache_dtype",
    )
    quantization: Quantization | None = option(
        None,
        "quantise float weights while they are loaded: fp8, int8, or w4 (4 bits, groups of 32); "
        "gguf: keep the weights of a GGUF file packed; none: expand them; default: packed on a GPU, and on a CPU with "
        "one rank and the C library",
    )
    quantization_config: str | None = option(
        None,
        'JSON file that chooses by module: {"default": "w4", "modules": {"re:.*down_proj": "int8", "lm_head": "fp8"}}, '
        "where none leaves a module as it is; the first name that matches counts",
    )
    packed_input_bits: int | None = option(
        None,
        "bits to which a CPU rounds the inputs of products with packed weights: 8 is faster, 15 is as good as expanded "
        "weights; default: 15 for models with a hidden size up to 1,024, else 8",
    )
    device: str | None = option(None, "cpu or cuda; default: cuda if there is a GPU, else cpu")
    tp: int = option(1, "number of tensor-parallel ranks; each is one process with one device", "tensor_parallel_size")
    pp: int = option(
        1,
        "number of pipeline stages, each with a part of the layers on --tp devices of its own",
        "pipeline_parallel_size",
        "pp_size",
    )
    ep: int = option(
        1,
        "number of ranks over which the experts of a model are divided, each with some experts as a whole: 1 or --tp; "
        "1: every rank has a part of each expert",
        "expert_parallel_size",
        "ep_size",
    )
    enable_dp_attention: bool = option(
        False,
        "with --ep: every rank computes the attention of requests of its own, with a KV pool of its own, and all ranks "
        "share the experts",
    )
    attention_dp: int | None = option(
        None,
        "the same with groups of ranks: so many groups, each with --tp / N ranks that divide the attention by heads; "
        "default: one group, or one for each rank with --enable_dp_attention",
    )
    max_total_token_num: int | None = option(None, "size of the KV pool in tokens; default: what fits into memory")
    max_windowed_token_num: int | None = option(
        None,
        "size in tokens of the second KV pool, of layers with a sliding window; 0: one pool for all layers; "
        "default: a share of the KV pool, if that saves memory",
    )
    kv_ram_gb: float = option(
        0.0,
        "GiB of host memory for prefixes that the prefix cache evicts; a prompt that has one loads it, if that is "
        "faster than computing it; 0: none",
    )
    kv_disk_gb: float = option(
        0.0, "GiB of --kv_disk_dir for prefixes, below --kv_ram_gb; they survive a restart; 0: none"
    )
    kv_disk_dir: str | None = option(None, "folder of --kv_disk_gb, which the server fills and clears")
    kv_remote: str | None = option(
        None,
        "Redis or Valkey server that several servers share for prefixes, below --kv_ram_gb and --kv_disk_gb, such as "
        "redis://10.0.0.5:6379/0",
    )
    mem_fraction: float = option(
        0.9, "share of a GPU's memory for weights and KV, above 0 and at most 1", "gpu_memory_utilization"
    )
    max_req_total_len: int | None = option(
        None, "maximum tokens of a request, prompt plus output; default: the model's context length", "max_model_len"
    )
    running_max_req_size: int = option(256, "maximum requests that run at once", "max_num_seqs")
    batch_max_tokens: int | None = option(
        None, "maximum tokens of one step; default: depends on the device", "max_num_batched_tokens"
    )
    step_timeout: float | None = option(
        None,
        "seconds after which a step counts as hanging and the worker is restarted; 0: never; default: CPU 600, GPU 60",
    )

    lora_modules: list[str] = option([], "LoRA adapters that clients can name as the model: name=folder ...")
    lora_dir: str | None = option(
        None,
        "folder from whose subfolders adapters are loaded while the server runs: by the first request that names one, "
        "or by POST /v1/load_lora_adapter; default: only --lora_modules",
    )
    max_loras: int | None = option(
        None,
        "maximum adapters on the device at once, and in one step; others wait in host memory; default: 8 with "
        "--lora_modules or --lora_dir, else 0",
    )
    max_lora_rank: int = option(16, "maximum rank of an adapter; every slot on the device has room for it")
    max_cpu_loras: int | None = option(
        None, "maximum adapters in host memory, from where they are copied to the device; default: 4 times --max_loras"
    )
    merge_lora: str | None = option(
        None, "folder of an adapter that is added to the weights while they are loaded; requests always use it"
    )
    disable_custom_allreduce: bool = option(
        False,
        "sums over --tp ranks always go through NCCL; else GPUs of one node read few rows from each other's memory",
        "disable_custom_all_reduce",
    )
    deterministic: bool = option(
        False,
        "bit-identical results, independent of batch, prefix cache and prefill chunks; slower on a GPU; a CPU with the "
        "C library has them for most models without this flag",
    )

    def __post_init__(self) -> None:
        choices_of = {
            "load_format": get_args(LoadFormat),
            "data_type": get_args(DataType),
            "kv_dtype": get_args(KvDtype),
        }
        for name, kind in (("quantization", Quantization), ("task", Task), ("pooling", PoolingKind)):
            if getattr(self, name) is not None:
                choices_of[name] = get_args(kind)
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise OptionError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if self.quantization is not None and self.quantization_config is not None:
            raise OptionError("quantization and quantization_config exclude each other; put the first into the file")
        if self.packed_input_bits not in (None, 8, 15):
            raise OptionError(f"packed_input_bits={self.packed_input_bits}: must be 8 or 15")
        _at_least(self, 1, "tp", "pp", "ep", "attention_dp", "running_max_req_size", "batch_max_tokens")
        _at_least(self, 1, "max_req_total_len", "max_total_token_num")
        _at_least(self, 0, "step_timeout", "max_windowed_token_num", "max_loras", "kv_ram_gb", "kv_disk_gb")
        self._check_lora()
        self._check_tiers()
        if not 0 < self.mem_fraction <= 1:
            raise OptionError(f"mem_fraction={self.mem_fraction}: must be above 0 and at most 1")
        if self.ep not in (1, self.tp):
            raise OptionError(f"ep={self.ep}: the tensor-parallel ranks divide the experts; set --tp {self.ep} too")
        self._check_groups()
        if self.deterministic and self.tp > 2:  # the sum of two values does not depend on their order
            raise OptionError(
                f"deterministic needs tp 1 or 2, not {self.tp}: the sum over more ranks has no fixed order"
            )

    def _check_groups(self) -> None:
        name = "enable_dp_attention" if self.attention_dp is None else f"attention_dp={self.attention_dp}"
        if self.enable_dp_attention and self.tp == 1:
            raise OptionError(f"{name}: there is one rank; set --tp and --ep to the number of devices")
        if self.tp % self.num_groups:
            raise OptionError(f"{name}: it does not divide the {self.tp} ranks of --tp")
        if self.num_groups > 1 and self.ep == 1:
            raise OptionError(f"{name}: all ranks share the experts of the model; set --ep {self.tp} too")

    def _check_tiers(self) -> None:
        if bool(self.kv_disk_gb) != (self.kv_disk_dir is not None):
            raise OptionError("kv_disk_gb and kv_disk_dir need each other: a size and a folder")
        if self.kv_remote is not None:
            _check_redis("kv_remote", self.kv_remote)
        if self.lower_tiers and not self.kv_ram_gb:
            raise OptionError(f"the KV tier {self.lower_tiers[0]} needs --kv_ram_gb: its KV passes through host memory")

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """KV tiers below host memory, the first one first."""
        return (*(["disk"] if self.kv_disk_gb else []), *(["remote"] if self.kv_remote is not None else []))

    def _check_lora(self) -> None:
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise OptionError(f"max_lora_rank={self.max_lora_rank}: must be from 1 to {MAX_LORA_RANK}")
        if self.num_loras > MAX_LORAS:
            raise OptionError(f"max_loras={self.max_loras}: must be at most {MAX_LORAS}")
        if not self.num_loras and (self.lora_modules or self.lora_dir):
            raise OptionError("max_loras=0: --lora_modules and --lora_dir need at least 1")
        if self.num_cpu_loras < self.num_loras:
            raise OptionError(f"max_cpu_loras={self.max_cpu_loras}: must be at least max_loras ({self.num_loras})")
        names = [text.partition("=")[0] for text in self.lora_modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise OptionError(f"lora_modules: {twice!r} is there twice")

    @property
    def num_ranks(self) -> int:
        """Processes of one engine that compute the model. Their order: see ParallelSizes."""
        return self.tp * self.pp

    @property
    def num_groups(self) -> int:
        """Attention groups: each computes requests of its own."""
        return self.attention_dp or (self.tp if self.enable_dp_attention else 1)

    @property
    def attention_tp(self) -> int:
        """Ranks of one stage that compute the same requests."""
        return self.tp // self.num_groups

    @property
    def answering_ranks(self) -> list[int]:
        """The ranks that return the tokens of a step: the first one of the last stage, in each attention group."""
        return [(self.pp - 1) * self.tp + group * self.attention_tp for group in range(self.num_groups)]

    @property
    def num_loras(self) -> int:
        """Slots for adapters on the device."""
        if self.max_loras is not None:
            return self.max_loras
        return DEFAULT_LORAS if self.lora_modules or self.lora_dir else 0

    @property
    def num_cpu_loras(self) -> int:
        return CPU_LORAS_A_SLOT * self.num_loras if self.max_cpu_loras is None else self.max_cpu_loras


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router."""

    router_policy: str = option("priority", "order in which waiting requests are admitted", "scheduling_policy")
    router_token_ratio: float = option(
        0.85,
        "share of the KV pool that may be filled by estimated output lengths; 0: reserve the maximum of every request",
    )
    chunked_prefill_size: int | None = option(
        None,
        "prompt tokens in a step that also decodes; grows with the number of decoding and waiting requests; "
        "default: depends on the device",
        "long_prefill_token_threshold",
    )
    itl_target_ms: float | None = option(
        None,
        "longest time between two tokens of a stream while prompts are computed; prompts have their first token sooner "
        "if it is long; default: depends on the device and the number of streams",
    )
    disable_chunked_prefill: bool = option(False, "compute every prompt in a single step")
    disable_dynamic_prompt_cache: bool = option(
        False, "disable the prefix cache: requests share no prefixes", "no_enable_prefix_caching"
    )
    static_prompts: str | None = option(
        None, "JSON or YAML file of prompts by name; each stays in the prefix cache, and a request's task_id names one"
    )
    request_timeout: float = option(0.0, "seconds after which a request ends with an error; 0: never")
    max_queue_size: int = option(
        2048, "maximum number of waiting requests; further ones get status 429", "max_queued_requests"
    )
    max_queue_tokens: int = option(
        256 * 1024 * 1024, "maximum prompt tokens of all waiting requests; further requests get status 429"
    )
    eos_id: list[int] = option([], "token ids that end a response; default: from the model's files")
    debug_requests: int = option(
        256, "number of requests whose timeline GET /debug/requests shows, the latest ones; 0: none"
    )
    log_stats_interval: float = option(10.0, "seconds between throughput log lines while requests run; 0: none")

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_queue_size", "max_queue_tokens", "chunked_prefill_size")
        _at_least(self, 0, "debug_requests", "log_stats_interval", "request_timeout", "router_token_ratio")
        _at_least(self, 1, "itl_target_ms")
        if self.debug_requests > MAX_DEBUG_REQUESTS:
            raise OptionError(f"debug_requests={self.debug_requests}: must be at most {MAX_DEBUG_REQUESTS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Options of the HTTP processes."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = option(8000, "port to listen on; 0: any free port")
    httpserver_workers: int | None = option(
        None,
        "number of HTTP processes; default: one for every 4 cores, at least 1 and at most 4",
        "api_server_count",
    )
    model_name: list[str] = option(
        [],
        "names of the model for clients; responses show the first; default: the name of its folder",
        "served_model_name",
    )
    api_key: list[str] = option([], "keys that clients may use; default: no key is needed")
    api_key_file: str | None = option(None, "file with API keys, one per line; unlike --api_key, ps does not show them")
    admin_key: list[str] = option(
        [], "keys for routes that change the server, such as /abort_request; default: the API keys"
    )
    admin_key_file: str | None = option(None, "file with admin keys, one per line")
    ssl_keyfile: str | None = option(None, "private key for HTTPS, PEM; default: contained in --ssl_certfile")
    ssl_certfile: str | None = option(None, "certificate chain for HTTPS, PEM; default: plain HTTP")
    ssl_ca_certs: str | None = option(
        None, "CA certificates, PEM; every client must then present a certificate signed by one of them"
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: auto: of the model's generation_config.json; none: the API's own; "
        "or a folder or file with another one; a request's own values win",
    )
    default_max_tokens: int | None = option(
        None, "maximum new tokens of a request that names no maximum; default: the rest of the context"
    )
    chat_template: str | None = option(
        None, "Jinja file, or the template itself, that replaces the model's chat templates; default: the model's own"
    )
    default_chat_template_kwargs: str = option(
        "", "JSON object with variables for the chat template; a request's own values win"
    )
    tool_call_parser: str = option(
        "auto", "format of the model's tool calls, such as hermes or llama3_json; auto: detect from its chat template"
    )
    reasoning_parser: str = option(
        "auto", "format of reasoning: qwen3, deepseek_r1, or two tags as BEGIN,END; auto: detect from the chat template"
    )
    strict_fields: bool = option(
        False,
        "refuse a request that has an unknown field near a known one, such as max_token; "
        "default: serve it, with a header Warning",
    )
    use_tgi_api: bool = option(False, "treat an ambiguous body on /generate as TGI's, not as LightLLM's")
    root_path: str = option("", "path of the server behind a reverse proxy, such as /llm; the proxy may remove it")
    no_web: bool = option(False, "serve no chat page: GET / is text for browsers too")
    allowed_origins: list[str] = option([], "web origins that may call the server (CORS); *: all")
    allowed_hosts: list[str] = option(
        [],
        "names of this server, such as llm.example.com or *.example.com, that a request may have as Host; *: all; "
        "default: all, but only local names if --host is a loopback address",
    )
    max_body_bytes: int = option(16 * 2**20, "maximum bytes of a request body; a larger one gets status 413")
    max_choices: int = option(128, "maximum choices of one request: prompts times n")
    response_store_size: int = option(
        1000, "maximum responses of /v1/responses that are stored, oldest removed first; 0: none is stored"
    )
    response_store_bytes: int = option(128 * 2**20, "maximum bytes of all stored responses, on the disk")
    journal: str | None = option(
        None,
        "Redis or Valkey server that keeps streams, such as redis://10.0.0.5:6379/1; a client that lost its connection "
        "resumes its stream with Last-Event-ID, at any HTTP process or gateway with the same one; a client that "
        "disconnects does not stop its request at once: see --journal_ttl",
    )
    journal_ttl: float = option(
        60.0,
        "seconds for which a client can come back for a stream of --journal; a request whose client has disconnected "
        "runs on for so long",
    )
    metrics_compat: str = option("", "also export metrics with the names of vllm and/or lightllm, comma-separated")
    otlp_endpoint: str | None = option(
        None, "collector for OpenTelemetry traces, such as http://localhost:4318; needs opentelemetry-proto"
    )
    disable_log_requests: bool = option(False, "do not log a line per request", "disable_uvicorn_access_log")

    def __post_init__(self) -> None:
        _at_least(self, 1, "httpserver_workers", "max_body_bytes", "max_choices", "default_max_tokens")
        if (self.httpserver_workers or 0) > MAX_HTTPSERVER_WORKERS:
            found = f"httpserver_workers={self.httpserver_workers}: must be at most {MAX_HTTPSERVER_WORKERS}"
            raise OptionError(found)
        _at_least(self, 0, "response_store_size", "response_store_bytes")
        if "" in self.model_name:
            raise OptionError("model_name: a name must not be empty")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise OptionError("--ssl_keyfile and --ssl_ca_certs need --ssl_certfile")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise OptionError(f"root_path={self.root_path!r}: must begin with / and must not end with it, as /llm")
        if not 0 <= self.port < 65536:
            raise OptionError(f"port={self.port}: must be between 0 and 65535")
        if self.otlp_endpoint is not None and not _is_http_url(self.otlp_endpoint):
            raise OptionError(f"otlp_endpoint={self.otlp_endpoint!r}: must be an address as http://localhost:4318")
        _at_least(self, 1, "journal_ttl")
        if self.journal is not None:
            _check_redis("journal", self.journal)
        _ = self.template_variables
        unknown = set(self.compat_names) - {"vllm", "lightllm"}
        if unknown:
            raise OptionError(
                f"metrics_compat={self.metrics_compat!r}: must be vllm, lightllm or both, comma-separated"
            )

    @property
    def num_processes(self) -> int:
        """The number of HTTP processes; the same in every process of this server."""
        return self.httpserver_workers or min(max(available_cores() // CORES_PER_HTTP_PROCESS, 1), MAX_HTTP_PROCESSES)

    def first_model_name(self, default: str) -> str:
        """The name that responses show; ``default`` if --model_name is not set."""
        return self.model_name[0] if self.model_name else default

    @property
    def template_variables(self) -> dict[str, Any]:
        """The object of --default_chat_template_kwargs."""
        return _json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)

    @property
    def compat_names(self) -> list[str]:
        return [name.strip() for name in self.metrics_compat.split(",") if name.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Options of the launcher."""

    drain_timeout: float = option(30.0, "seconds for running requests to finish after SIGTERM")
    restart_worker: Switch = option(
        "on", "replace model workers and HTTP processes that die; off: the server ends instead"
    )
    process_timeout: float = option(
        60.0, "seconds without a heartbeat after which a process is killed, a worker after half of that; 0: never"
    )
    profile_dir: str | None = option(
        None, "folder for the profiles of POST /start_profile; default: no profile can be taken"
    )
    log_format: LogFormat | None = option(
        None, "text: lines for people; json: an object per line, for programs; default: $LIGHTSERVE_LOG_FORMAT or text"
    )
    null_worker: bool = option(
        False, "run without a model: the worker returns made-up tokens, to measure the rest of the server"
    )
    null_step_ms: float = option(0.0, "milliseconds that a step of the null worker takes")
    null_token_us: float = option(0.0, "microseconds that each token adds to a step of the null worker")

    def __post_init__(self) -> None:
        _at_least(self, 0, "drain_timeout", "process_timeout", "null_step_ms", "null_token_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Options of several engines behind one port."""

    dp: int = option(
        1,
        "number of engines, each with the whole model on devices of its own",
        "data_parallel_size",
        "dp_size",
    )
    cluster_policy: str = option("prefix", "which engine gets a request, with --dp or --engines", "dp_policy")
    engines: list[str] = option(
        [],
        "addresses of engines on other machines that compute for this server, tcp://HOST:PORT, separated by commas; "
        "needs --cluster_keys, but no device and no weights",
    )
    engines_file: str | None = option(
        None,
        "instead of --engines: file with one address per line, which is read again when it changes; an engine whose "
        "line is removed finishes its requests and gets no new ones",
    )
    listen: str | None = option(
        None,
        "be an engine without HTTP: the address where servers with --engines connect, such as tcp://10.0.0.2:9000; "
        "needs --cluster_keys",
    )
    cluster_keys: str | None = option(
        None, "folder with the keys of engines, gateways and nodes; `lightserve cluster keygen DIR` makes them"
    )
    roles: list[str] = option(
        [],
        "with --dp: what each engine is for, such as prefill,decode,decode; a prefill engine computes prompts and "
        "sends their KV to decode engines, which generate; both does that and generates too",
    )
    role: Role = option(
        "normal",
        "with --listen: what this engine is for, as in --roles; normal: it neither sends nor receives KV",
        "run_mode",
    )
    kv_listen: str | None = option(
        None,
        "with --role decode: the address where prefill engines send KV, tcp://HOST:PORT or unix:///PATH; further "
        "ranks listen on the ports after it; default: the port after that of --listen",
    )
    cluster_tls: bool = option(
        False,
        "with --role: encrypt the KV that engines send each other; all of them need the same kv.pem in --cluster_keys",
    )
    kv_transport: KvTransport = option(
        "sockets",
        "how KV gets from engine to engine: through sockets, or read by NIXL (package nixl), with RDMA where there is "
        "some; the same on all engines",
        "disaggregation_transfer_backend",
    )
    min_split_tokens: int = option(
        256, "a decode engine computes a prompt itself if fewer of its tokens are missing there"
    )
    nnodes: int = option(
        1,
        "number of machines that share the ranks of --tp and --pp; start the server on each of them with the same "
        "flags and its own --node_rank; needs --master_addr and --cluster_keys",
    )
    node_rank: int = option(0, "which of --nnodes this machine is; 0 has HTTP and the router, the others only ranks")
    master_addr: str | None = option(
        None, "address of node 0, which the other nodes connect to; the ranks use its network", "nccl_host"
    )
    master_port: int = option(28765, "port of node 0 for the other nodes", "nccl_port")
    node_timeout: float = option(600.0, "seconds that nodes wait for each other, at the start and after a fault")

    def __post_init__(self) -> None:
        _at_least(self, 1, "dp", "min_split_tokens", "nnodes", "node_timeout")
        if self.dp > MAX_ENGINES:
            raise OptionError(f"dp={self.dp}: must be at most {MAX_ENGINES}")
        self._check_nodes()
        self._check_remote()
        self._check_roles()

    def _check_roles(self) -> None:
        roles = self.engine_roles
        if self.kv_listen is not None:
            if self.role != "decode":
                raise OptionError(f"kv_listen={self.kv_listen}: only an engine with --role decode receives KV")
            _check_kv_address(self.kv_listen)
        if not roles:
            return
        if unknown := next((role for role in roles if role not in ROLES), None):
            raise OptionError(f"roles: {unknown!r} is none; a role is one of {', '.join(ROLES)}")
        if len(roles) != self.dp:
            raise OptionError(f"roles={','.join(roles)}: {len(roles)} roles for the {self.dp} engines of --dp")
        if missing := missing_role(roles):
            raise OptionError(
                f"roles={','.join(roles)}: no engine is {missing}, so no KV would be sent; leave out --roles"
            )

    @property
    def engine_roles(self) -> list[str]:
        """Of the engines of --dp; empty: normal."""
        return [one.strip() for text in self.roles for one in text.split(",") if one.strip()]

    @property
    def is_split(self) -> bool:
        """Whether engines of this server have roles."""
        return bool(self.roles) or self.role != "normal"

    def role_of(self, engine: int) -> str:
        """Of an engine of this server, by its number."""
        return self.engine_roles[engine] if self.roles else self.role

    def _check_remote(self) -> None:
        flags = [f"--{name}" for name in ("engines", "engines_file", "listen") if getattr(self, name)]
        if flags == ["--engines", "--engines_file"]:
            raise OptionError("engines and engines_file exclude each other: write all addresses into the file")
        if len(flags) > 1:
            name = flags[0].lstrip("-")
            raise OptionError(f"{name} and listen exclude each other: a process is a gateway or an engine")
        if self.cluster_keys is not None and not flags and self.nnodes == 1:
            raise OptionError(
                "cluster_keys: there is no link to another machine; set --engines, --listen or --nnodes too"
            )
        for flag in flags:
            if self.dp > 1:
                raise OptionError(f"dp={self.dp}: not with {flag}; start one engine for each of {self.dp} ports")
            if self.cluster_keys is None:
                raise OptionError(f"{flag} needs --cluster_keys DIR; `lightserve cluster keygen DIR` makes the keys")
        self._check_addresses()

    def _check_addresses(self) -> None:
        addresses = self.engine_addresses
        if self.engines and not addresses:
            raise OptionError("engines: name at least one address, such as tcp://10.0.0.2:9000")
        if self.listen:
            _check_address("listen=", self.listen)
        check_addresses("engines", addresses)

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise OptionError(f"node_rank={self.node_rank}: must be between 0 and {self.nnodes - 1} (--nnodes)")
        if self.nnodes == 1:
            return
        for name in ("engines", "engines_file"):
            if getattr(self, name):
                raise OptionError(f"nnodes={self.nnodes}: not with --{name}, a gateway has no ranks")
        if self.dp > 1:
            raise OptionError(f"nnodes={self.nnodes}: not with --dp; start engines with --listen and use --engines")
        if self.is_split:
            raise OptionError(f"nnodes={self.nnodes}: ranks on several nodes cannot send or receive KV yet (--role)")
        if self.master_addr is None:
            raise OptionError(f"nnodes={self.nnodes} needs --master_addr, the address of node 0")
        if self.cluster_keys is None:
            raise OptionError(
                f"nnodes={self.nnodes} needs --cluster_keys DIR; `lightserve cluster keygen DIR` makes the keys"
            )
        if not 0 < self.master_port < 65536:
            raise OptionError(f"master_port={self.master_port}: must be between 1 and 65535")

    @property
    def engine_addresses(self) -> list[str]:
        return [one.strip() for text in self.engines for one in text.split(",") if one.strip()]

    @property
    def num_engines(self) -> int:
        """Engines behind the dispatcher from the start; 1: there is no dispatcher, unless the engine is remote."""
        return 0 if self.engines_file is not None else len(self.engine_addresses) or self.dp

    @property
    def is_gateway(self) -> bool:
        """Whether the engines are on other machines."""
        return bool(self.engines) or self.engines_file is not None

    @property
    def has_dispatcher(self) -> bool:
        return self.dp > 1 or self.is_gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    worker: WorkerConfig
    router: RouterConfig
    http: HttpConfig
    launch: LaunchConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if self.worker.kv_ram_gb and self.router.disable_dynamic_prompt_cache:
            raise OptionError(
                "kv_ram_gb keeps prefixes that the prefix cache evicts: not with disable_dynamic_prompt_cache"
            )
        if self.cluster.is_split:
            self.check_split()
        self._check_nodes()

    def check_split(self) -> None:
        """Refuse what does not go with engines that have roles."""
        if self.router.disable_dynamic_prompt_cache:
            raise OptionError("roles: KV that is sent enters the prefix cache: not with disable_dynamic_prompt_cache")
        if self.launch.null_worker:
            raise OptionError("roles: the null worker has no KV to send; leave out one of the flags")

    def _check_nodes(self) -> None:
        nodes, ranks = self.cluster.nnodes, self.worker.num_ranks
        if ranks % nodes:
            raise OptionError(
                f"nnodes={nodes}: it does not divide the {ranks} ranks of --tp {self.worker.tp} --pp {self.worker.pp}"
            )
        if nodes > 1 and self.launch.profile_dir is not None:
            raise OptionError("profile_dir: profiles of ranks on several nodes cannot be taken yet; leave it out")

    @property
    def num_cpu_parts(self) -> int:
        """Engines, attention groups and stages that compute at the same time, and share a CPU's cores and RAM."""
        return self.cluster.dp * self.worker.num_groups * -(-self.worker.pp // self.cluster.nnodes)

    @property
    def ranks_per_node(self) -> int:
        """A node has consecutive ranks, so the ranks of a pipeline stage are on one node if they fit."""
        return self.worker.num_ranks // self.cluster.nnodes

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def is_other_node(self) -> bool:
        """Whether this machine has only ranks of a server on another one."""
        return self.cluster.node_rank > 0


@functools.lru_cache(maxsize=4)
def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"{name}={text!r}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise OptionError(f"{name}={text!r}: must be a JSON object")
    return value


def check_addresses(source: str, addresses: list[str]) -> None:
    """Raise an OptionError if these are no engines of one gateway. ``source``: the flag or the file."""
    for text in addresses:
        _check_address(f"{source}=", text)
    if twice := next((one for one in addresses if addresses.count(one) > 1), None):
        raise OptionError(f"{source}: {twice} is there twice")
    if len(addresses) > MAX_ENGINES:
        raise OptionError(f"{source}: {len(addresses)} addresses; there may be {MAX_ENGINES}")


def _check_address(source: str, text: str) -> None:
    try:
        parse_tcp(text)
    except ValueError as error:
        raise OptionError(f"{source}{text!r}: {error}; an address is tcp://HOST:PORT") from error


def missing_role(roles: Collection[str]) -> str | None:
    """What engines with these roles lack to send each other KV."""
    if "decode" not in roles:
        return "decode"
    return None if {"prefill", "both"} & set(roles) else "prefill or both"


def _check_kv_address(text: str) -> None:
    if text.startswith("unix:///"):
        return
    try:
        parse_tcp(text)
    except ValueError as error:
        raise OptionError(f"kv_listen={text!r}: {error}; an address is tcp://HOST:PORT or unix:///PATH") from error


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        return False


def _check_redis(flag: str, url: str) -> None:
    try:
        parse_redis(url)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from error  # without the address: it may have a password


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < float("inf"):
            raise OptionError(f"{name}={value}: must be at least {least}")
