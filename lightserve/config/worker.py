"""Options of the model workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightserve.config.addresses import check_redis
from lightserve.config.option import FlagGroup, check_options, option
from lightserve.config.speculation import SpeculativeConfig, parse_speculative_config
from lightserve.errors import OptionError

LoadFormat = Literal["auto", "dummy"]
DataType = Literal["auto", "float32", "float16", "bfloat16"]
KvDtype = Literal["auto", "none", "fp8", "int8"]
StateDtype = Literal["float32", "bfloat16"]
ModelImpl = Literal["auto", "lightserve", "transformers"]
Task = Literal["generate", "embed", "token_embed", "classify", "score", "reward"]
PoolingKind = Literal["cls", "mean", "last", "max"]
Quantization = Literal["fp8", "int8", "w4", "gguf", "none"]

DEFAULT_LORAS, MAX_LORAS, MAX_LORA_RANK = 8, 256, 256
CPU_LORAS_A_SLOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of the model workers."""

    model_dir: str | None = option(
        None,
        "Hugging Face folder, .gguf file, or name on the hub, downloaded once: org/model[@revision] or "
        "org/model:file.gguf; default: SmolLM2-135M-Instruct",
        "model",
        group=FlagGroup.COMMON,
    )
    model_type: str | None = option(
        None,
        "serve the model as this model_type instead of that of its config.json; it must have the same tensors",
        group=FlagGroup.MODEL_FILES,
    )
    model_impl: ModelImpl = option(
        "auto",
        "whose code computes the model: lightserve, or transformers, which is slow and needs its package; auto: "
        "transformers if the model_type has no class here",
        group=FlagGroup.MODEL_FILES,
    )
    task: Task | None = option(
        None,
        "what the model is for: generate text, embed, token_embed (a vector for each token), classify, score pairs of "
        "texts, or reward; "
        "default: what its files say",
        group=FlagGroup.MODEL_FILES,
    )
    pooling: PoolingKind | None = option(
        None,
        "how the vectors of a text's tokens become one: cls (the first), mean, last or max; default: what its files "
        "say",
        group=FlagGroup.MODEL_FILES,
    )
    score_template: str | None = option(
        None,
        "how a reranker reads a query and a document: qwen3-reranker, mxbai-rerank-v2, bge-reranker-v2-gemma, zerank, "
        "nemotron-rerank, a Jinja file, or its text; a model that generates text scores with it",
        group=FlagGroup.MODEL_FILES,
    )
    trust_remote_code: bool = option(
        False,
        "run Python code in the model's folder: its tokenizer class, if no file of it can be read directly, and its "
        "model class, if only that can compute the model",
        group=FlagGroup.MODEL_FILES,
    )
    load_format: LoadFormat = option(
        "auto", "auto: load the weights; dummy: random weights of the config's shape", group=FlagGroup.MODEL_FILES
    )
    data_type: DataType = option(
        "auto",
        "data type of weights and KV; a CPU keeps KV in float32 beside weights in bfloat16; "
        "auto: float32 on a CPU; on a GPU float16 for a float16 model, else bfloat16",
        "dtype",
        group=FlagGroup.COMMON,
    )
    kv_dtype: KvDtype = option(
        "auto",
        "how the KV cache is stored: fp8 (e4m3) or int8 halve its size; none: as --data_type; auto: fp8 if the "
        "checkpoint was quantised for it, else none",
        "kv_cache_dtype",
        group=FlagGroup.COMPUTATION,
    )
    state_dtype: StateDtype = option(
        "float32",
        "how the states of recurrent layers are stored: bfloat16 halves their memory and the time to read them, and "
        "rounds them after each step",
        "mamba_ssm_cache_dtype",
        "mamba_ssm_dtype",
        group=FlagGroup.COMPUTATION,
    )
    quantization: Quantization | None = option(
        None,
        "quantise float weights while they are loaded: fp8, int8, or w4 (4 bits, groups of 32); "
        "gguf: keep the weights of a GGUF file packed; none: expand them; default: packed on a GPU, and on a CPU with "
        "one rank and the C library",
        group=FlagGroup.COMMON,
    )
    quantization_config: str | None = option(
        None,
        'JSON file that chooses by module: {"default": "w4", "modules": {"re:.*down_proj": "int8", "lm_head": "fp8"}}, '
        "where none leaves a module as it is; the first name that matches counts",
        group=FlagGroup.MODEL_FILES,
    )
    packed_input_bits: int | None = option(
        None,
        "bits to which a CPU rounds the inputs of products with packed weights: 8 is faster, 15 is as good as expanded "
        "weights; default: 15 for models with a hidden size up to 1,024, else 8",
        group=FlagGroup.MODEL_FILES,
    )
    device: str | None = option(
        None,
        "cpu, cuda, rocm or a package's; default: a GPU, else cpu",
        group=FlagGroup.COMMON,
    )
    ops_backend: list[str] = option(
        [],
        "operators of installed packages that are preferred to those of the device: entry points lightserve.ops",
        group=FlagGroup.COMPUTATION,
    )
    tp: int = option(
        1,
        "number of tensor-parallel ranks; each is one process with one device",
        "tensor_parallel_size",
        group=FlagGroup.COMMON,
        at_least=1,
    )
    pp: int = option(
        1,
        "number of pipeline stages, each with a part of the layers on --tp devices of its own",
        "pipeline_parallel_size",
        "pp_size",
        group=FlagGroup.COMMON,
        at_least=1,
    )
    ep: int = option(
        1,
        "number of ranks over which the experts of a model are divided, each with some experts as a whole: 1 or --tp; "
        "1: every rank has a part of each expert",
        "expert_parallel_size",
        "ep_size",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )
    enable_dp_attention: bool = option(
        False,
        "with --ep: every rank computes the attention of requests of its own, with a KV pool of its own, and all ranks "
        "share the experts",
        group=FlagGroup.PARALLEL,
    )
    attention_dp: int | None = option(
        None,
        "the same with groups of ranks: so many groups, each with --tp / N ranks that divide the attention by heads; "
        "default: one group, or one for each rank with --enable_dp_attention",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )
    max_total_token_num: int | None = option(
        None, "size of the KV pool in tokens; default: what fits into memory", group=FlagGroup.COMPUTATION, at_least=1
    )
    max_windowed_token_num: int | None = option(
        None,
        "size in tokens of the second KV pool, of layers with a sliding window; 0: one pool for all layers; "
        "default: a share of the KV pool, if that saves memory",
        group=FlagGroup.COMPUTATION,
        at_least=0,
    )
    max_state_rows: int | None = option(
        None,
        "rows of memory for the states of recurrent layers: each running request needs one, and the prefix cache keeps "
        "others; default: two for each of --running_max_req_size or more, if they fit into half of the memory for KV",
        group=FlagGroup.COMPUTATION,
        at_least=2,
    )
    kv_ram_gb: float = option(
        0.0,
        "GiB of host memory for prefixes that the prefix cache evicts; a prompt that has one loads it, if that is "
        "faster than computing it; 0: none",
        group=FlagGroup.COMPUTATION,
        at_least=0,
    )
    visual_dp: int = option(
        1,
        "encoders of images, for each engine: processes on the devices of its ranks, one after the other",
        group=FlagGroup.COMPUTATION,
        at_least=1,
    )
    embed_cache_gb: float = option(
        2.0,
        "GiB of host memory for the embeddings of images, which later requests with the same images use",
        group=FlagGroup.COMPUTATION,
        at_least=0,
    )
    kv_disk_gb: float = option(
        0.0,
        "GiB of --kv_disk_dir for prefixes, below --kv_ram_gb; they survive a restart; 0: none",
        group=FlagGroup.COMPUTATION,
        at_least=0,
    )
    kv_disk_dir: str | None = option(
        None, "folder of --kv_disk_gb, which the server fills and clears", group=FlagGroup.COMPUTATION
    )
    kv_remote: str | None = option(
        None,
        "Redis or Valkey server that several servers share for prefixes, below --kv_ram_gb and --kv_disk_gb, such as "
        "redis://10.0.0.5:6379/0",
        group=FlagGroup.COMPUTATION,
    )
    mem_fraction: float = option(
        0.9,
        "share of a GPU's memory for weights and KV, above 0 and at most 1",
        "gpu_memory_utilization",
        group=FlagGroup.COMMON,
    )
    max_req_total_len: int | None = option(
        None,
        "maximum tokens of a request, prompt plus output; default: the model's context length",
        "max_model_len",
        group=FlagGroup.COMMON,
        at_least=1,
    )
    running_max_req_size: int | None = option(
        None,
        "maximum requests that run at once; default: 512 on a GPU with 64 GiB or more, 256 elsewhere and for models "
        "with recurrent layers",
        "max_num_seqs",
        group=FlagGroup.SCHEDULING,
        at_least=1,
    )
    batch_max_tokens: int | None = option(
        None,
        "maximum tokens of one step; default: depends on the device",
        "max_num_batched_tokens",
        group=FlagGroup.COMPUTATION,
        at_least=1,
    )
    step_timeout: float | None = option(
        None,
        "seconds after which a step counts as hanging and the worker is restarted; 0: never; default: CPU 600, GPU 60",
        group=FlagGroup.FAULTS,
        at_least=0,
    )

    lora_modules: list[str] = option(
        [], "LoRA adapters that clients can name as the model: name=folder ...", group=FlagGroup.LORA
    )
    lora_dir: str | None = option(
        None,
        "folder from whose subfolders adapters are loaded while the server runs: by the first request that names one, "
        "or by POST /v1/load_lora_adapter; default: only --lora_modules",
        group=FlagGroup.LORA,
    )
    max_loras: int | None = option(
        None,
        "maximum adapters on the device at once, and in one step; others wait in host memory; default: 8 with "
        "--lora_modules or --lora_dir, else 0",
        group=FlagGroup.LORA,
        at_least=0,
        at_most=MAX_LORAS,
    )
    max_lora_rank: int = option(
        16, "maximum rank of an adapter; every slot on the device has room for it", group=FlagGroup.LORA
    )
    max_cpu_loras: int | None = option(
        None,
        "maximum adapters in host memory, from where they are copied to the device; default: 4 times --max_loras",
        group=FlagGroup.LORA,
    )
    merge_lora: str | None = option(
        None,
        "folder of an adapter that is added to the weights while they are loaded; requests always use it",
        group=FlagGroup.LORA,
    )
    disable_custom_allreduce: bool = option(
        False,
        "sums over --tp ranks always go through NCCL; else GPUs of one node read few rows from each other's memory",
        "disable_custom_all_reduce",
        group=FlagGroup.PARALLEL,
    )
    deterministic: bool = option(
        False,
        "bit-identical results, independent of batch, prefix cache and prefill chunks; slower on a GPU; a CPU with the "
        "C library has them for most models without this flag",
        group=FlagGroup.COMPUTATION,
    )

    enable_return_routed_experts: bool = option(
        False,
        "keep which experts every token was routed to, for requests that want to know (return_routed_experts)",
        group=FlagGroup.RL,
    )

    speculative_config: str | None = option(
        None,
        "draft the next tokens and compute several in one step, which never changes a text; JSON such as "
        '{"method": "ngram", "num_speculative_tokens": 4}, or auto for what the checkpoint offers; default: no drafts',
        group=FlagGroup.COMPUTATION,
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_speculation()
        if self.packed_input_bits not in (None, 8, 15):
            raise OptionError(f"packed_input_bits={self.packed_input_bits}: must be 8 or 15")
        if self.model_impl == "transformers" and self.model_type is not None:
            raise OptionError(f"model_type={self.model_type!r}: transformers takes that of config.json; leave it out")
        self._check_lora()
        self._check_tiers()
        if not 0 < self.mem_fraction <= 1:
            raise OptionError(f"mem_fraction={self.mem_fraction}: must be above 0 and at most 1")
        if self.ep not in (1, self.tp):
            raise OptionError(f"ep={self.ep}: the tensor-parallel ranks divide the experts; set --tp {self.ep} too")
        self._check_groups()

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """None: there are no drafts."""
        return None if self.speculative_config is None else parse_speculative_config(self.speculative_config)

    def _check_speculation(self) -> None:
        config = self.speculation
        if config is None or self.batch_max_tokens is None:
            return
        drafts = config.num_speculative_tokens
        if drafts >= self.batch_max_tokens:
            problem = f"num_speculative_tokens is {drafts}, and a step has at most {self.batch_max_tokens} tokens"
            raise OptionError(f"speculative_config: {problem} (--batch_max_tokens); lower it")

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
            check_redis("kv_remote", self.kv_remote)
        if self.storage_tiers and not self.kv_ram_gb:
            raise OptionError(
                f"the KV tier {self.storage_tiers[0]} needs --kv_ram_gb: its KV passes through host memory"
            )

    @property
    def storage_tiers(self) -> tuple[str, ...]:
        """KV tiers below host memory, the first one first."""
        return (*(["disk"] if self.kv_disk_gb else []), *(["remote"] if self.kv_remote is not None else []))

    def _check_lora(self) -> None:
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise OptionError(f"max_lora_rank={self.max_lora_rank}: must be from 1 to {MAX_LORA_RANK}")
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
    def ranks_per_group(self) -> int:
        """Ranks that compute the same requests, and have a part of their KV each. Their numbers are consecutive."""
        return self.attention_tp * self.pp

    @property
    def answering_ranks(self) -> list[int]:
        """The ranks that return the tokens of a step: the first one of the last stage, in each attention group."""
        return [(group * self.pp + self.pp - 1) * self.attention_tp for group in range(self.num_groups)]

    @property
    def num_loras(self) -> int:
        """Slots for adapters on the device."""
        if self.max_loras is not None:
            return self.max_loras
        return DEFAULT_LORAS if self.lora_modules or self.lora_dir else 0

    @property
    def num_cpu_loras(self) -> int:
        return CPU_LORAS_A_SLOT * self.num_loras if self.max_cpu_loras is None else self.max_cpu_loras
