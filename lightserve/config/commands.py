"""Which flags commands and roles take of all those of a server."""

from __future__ import annotations

# what `lightserve engine` takes of the HTTP flags: its banner has the name, its router does what trainers ask, and its
# encoder reads images
ENGINE_HTTP = frozenset({"model_name", "enable_rl", "weights_dir", "limit_mm_per_prompt", "max_image_tokens"})
# what a gateway takes besides the flags of HTTP and of the cluster; the others are of engines
GATEWAY_WORKER = frozenset({"model_dir", "model_type", "task", "pooling", "score_template", "trust_remote_code"})
GATEWAY_ROUTER = frozenset({"request_timeout", "max_queue_size", "disable_dynamic_prompt_cache", "pinned_prefixes"})
GATEWAY_LAUNCH = frozenset({"drain_timeout", "process_timeout", "restart_worker", "log_format"})
NOT_OF_ENGINES = ("dp", "engines", "engines_file", "roles", "cluster_policy", "min_remote_prefill_tokens")
# adapters, which `lightserve deploy` does not take yet
OF_ADAPTERS = ("lora_modules", "lora_dir", "max_loras", "max_lora_rank", "max_cpu_loras")
# what `lightserve deploy` sets for its replicas
SET_BY_DEPLOY = (
    *("dp", "roles", "role", "engines", "engines_file", "listen", "kv_listen", "cluster_keys"),
    *("nnodes", "node_rank", "master_addr", "master_port", "node_timeout"),
)
