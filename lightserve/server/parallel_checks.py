"""Checks of an engine with several ranks: what the ranks can divide, and what they cannot do yet."""

from __future__ import annotations

from lightserve.config import ServerConfig, WorkerConfig
from lightserve.errors import OptionError
from lightserve.model_files.model_config import ModelConfig


def check_rank_flags(config: ServerConfig, has_pooling: bool) -> None:
    """Refuse what several ranks cannot do yet. ``has_pooling``: the model computes embeddings or scores."""
    worker = config.worker
    if config.launch.null_worker and worker.ep > 1:
        raise OptionError(f"ep={worker.ep}: the null worker has no experts to divide; leave out one of the flags")
    _check_groups(config, has_pooling)
    if worker.pp == 1:
        return
    if config.launch.null_worker:
        raise OptionError(f"pp={worker.pp}: the null worker has no layers to divide; leave out one of the flags")
    if worker.num_loras:
        raise OptionError(
            f"pp={worker.pp}: pipeline stages do not serve LoRA adapters yet; use --tp, or --merge_lora for one adapter"
        )
    if has_pooling:
        raise OptionError(f"pp={worker.pp}: pipeline stages serve text models only; use --tp")


def _check_groups(config: ServerConfig, has_pooling: bool) -> None:
    """Refuse what attention groups cannot do yet."""
    worker, cluster = config.worker, config.cluster
    if worker.num_groups == 1:
        return
    for is_set, flag, remedy in (
        (worker.pp > 1, f"pp={worker.pp}", "use more ranks (--tp, --ep)"),
        (worker.num_loras > 0, "LoRA adapters", "--merge_lora serves one adapter"),
        (worker.kv_ram_gb > 0, "kv_ram_gb", "leave it out"),
        (config.router.static_prompts is not None, "static_prompts", "leave it out"),
        (cluster.nnodes > 1, f"nnodes={cluster.nnodes}", "start a server on each machine"),
        (cluster.dp > 1, f"dp={cluster.dp}", "start several servers"),
        (cluster.listen is not None, "listen", "serve it with `lightserve serve`"),
        (has_pooling, "an embedding model", "use --tp and --ep alone"),
    ):
        if is_set:
            raise OptionError(f"{flag}: not with data-parallel attention (--enable_dp_attention) yet; {remedy}")


def check_ranks(worker: WorkerConfig, model: ModelConfig) -> None:
    """Check that the ranks can divide the model."""
    model.check_tp(worker.attention_tp)
    if worker.pp > model.num_layers:
        raise OptionError(f"pp={worker.pp}: the model has {model.num_layers} layers, and each stage needs one")
    if worker.ep == 1:
        return
    if model.experts_name is None:
        raise OptionError(f"ep={worker.ep}: a {model.model_type} model has no experts; use --tp alone")
    experts = model.count(model.experts_name)
    if experts % worker.ep:
        raise OptionError(f"ep={worker.ep}: it does not divide the {experts} experts of the model")
