"""In which group ``--help`` shows each flag. The flags themselves are the fields of the config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

COMMON = "Common flags"
GROUPS: dict[str, tuple[str, ...]] = {
    COMMON: (
        "model_dir",
        "host",
        "port",
        "model_name",
        "api_key",
        "device",
        "tp",
        "pp",
        "dp",
        "data_type",
        "quantization",
        "max_req_total_len",
        "mem_fraction",
    ),
    "Model files": (
        "model_type",
        "task",
        "pooling",
        "load_format",
        "trust_remote_code",
        "quantization_config",
        "packed_input_bits",
        "chat_template",
        "default_chat_template_kwargs",
        "generation_config",
        "tool_call_parser",
        "reasoning_parser",
        "eos_id",
    ),
    "Memory and computation": (
        "kv_dtype",
        "max_total_token_num",
        "max_windowed_token_num",
        "kv_ram_gb",
        "kv_disk_gb",
        "kv_disk_dir",
        "kv_remote",
        "batch_max_tokens",
        "chunked_prefill_size",
        "itl_target_ms",
        "disable_chunked_prefill",
        "disable_dynamic_prompt_cache",
        "deterministic",
    ),
    "LoRA adapters": (
        "lora_modules",
        "lora_dir",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "merge_lora",
    ),
    "Several devices or machines": (
        "ep",
        "enable_dp_attention",
        "attention_dp",
        "disable_custom_allreduce",
        "engines",
        "engines_file",
        "listen",
        "cluster_keys",
        "cluster_policy",
        "roles",
        "role",
        "kv_listen",
        "cluster_tls",
        "kv_transport",
        "min_split_tokens",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "node_timeout",
        "journal",
        "journal_ttl",
    ),
    "Scheduling": (
        "running_max_req_size",
        "router_policy",
        "router_token_ratio",
        "default_max_tokens",
        "max_queue_size",
        "max_queue_tokens",
        "request_timeout",
        "static_prompts",
    ),
    "HTTP": (
        "httpserver_workers",
        "root_path",
        "no_web",
        "use_tgi_api",
        "strict_fields",
        "allowed_origins",
        "allowed_hosts",
        "max_body_bytes",
        "max_choices",
        "response_store_size",
        "response_store_bytes",
    ),
    "Keys and TLS": (
        "api_key_file",
        "admin_key",
        "admin_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
    ),
    "Logs and metrics": (
        "log_format",
        "disable_log_requests",
        "log_stats_interval",
        "metrics_compat",
        "otlp_endpoint",
        "debug_requests",
        "profile_dir",
    ),
    "Faults and shutdown": (
        "restart_worker",
        "step_timeout",
        "process_timeout",
        "drain_timeout",
    ),
    "Development": (
        "null_worker",
        "null_step_ms",
        "null_token_us",
    ),
}
OTHERS = "Other flags"

ENGINE_HTTP = frozenset({"model_name"})  # what `lightserve engine` takes of the HTTP flags: its banner has it
# flags of servers with several engines, and of adapters, which engines of other machines do not serve
NOT_OF_ENGINES = (
    *("dp", "engines", "engines_file", "roles", "cluster_policy", "min_split_tokens"),
    *("lora_modules", "lora_dir", "max_loras", "max_lora_rank", "max_cpu_loras"),
)
# what `lightserve deploy` sets for its replicas
SET_BY_DEPLOY = (
    *("dp", "roles", "role", "engines", "engines_file", "listen", "kv_listen", "cluster_keys"),
    *("nnodes", "node_rank", "master_addr", "master_port", "node_timeout"),
)


def grouped(names: Iterable[str], common: Sequence[str] = ()) -> dict[str, list[str]]:
    """``names`` by group, each exactly once, those of ``common`` first. A flag without a group is in OTHERS."""
    left = dict.fromkeys(names)
    found: dict[str, list[str]] = {}
    for title, members in {**GROUPS, COMMON: (*common, *GROUPS[COMMON])}.items():
        if here := [name for name in members if name in left]:
            found[title] = here
            for name in here:
                del left[name]
    return found | ({OTHERS: list(left)} if left else {})
