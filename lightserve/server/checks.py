"""Checks that run before any process starts: they find in milliseconds what would fail after minutes of loading."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lightserve.config import HttpConfig, ServerConfig, WorkerConfig
from lightserve.config.combinations import Setup, check_combinations
from lightserve.errors import ModelFilesError, OptionError, ServerError, UnsupportedModelTypeError
from lightserve.links.tls import server_context
from lightserve.model_files.config.facts import model_facts
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.sampling_defaults import read_sampling_defaults
from lightserve.model_files.lora.adapter import check_rank, read_adapter
from lightserve.model_files.lora.paths import parse_module
from lightserve.model_files.pinned_prefixes import encode_pinned_prefixes
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.source import ModelSource, pooling_of, require_weights, resolve, stored_as
from lightserve.model_files.speculation import resolved_speculation, served_with_head
from lightserve.model_files.tokenizer.tokenizer import NO_TOKENIZER, Tokenizer, load_tokenizer_or_none
from lightserve.models.served_config import read_served_config
from lightserve.server.cluster_checks import check_cluster, check_nodes
from lightserve.utils import net
from lightserve.utils.extras import install_command
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

FITTING_TIMEOUT_S = 60.0  # to import torch on a loaded machine
OTLP_MODULE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
SHOWN = 3  # of the models that fit
RUN_BY_TRANSFORMERS = (
    "%s: model_type %r has no class here, so the modules of transformers compute it, slowly; --model_impl lightserve "
    "refuses it"
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str  # the first name that clients use
    architecture: str
    sampling_defaults: str  # what the model's files set, for the operator; "": nothing
    path: Path | None = None  # of its files
    speculative_config: str | None = None  # with local files, and a method instead of auto


def check(config: ServerConfig) -> ModelInfo:
    """Raise a LightserveError that says what the operator must change. Download the model if it is not there."""
    check_cluster(config)
    check_nodes(config)
    if config.cluster.listen is None and not config.is_other_node:
        net.bind(config.http.host, config.http.port).close()
        _check_access(config.http)
    check_otlp(config.http)
    check_profile_dir(None if config.is_other_node else config.launch.profile_dir)
    check_adapters(config)
    config = replace(config, worker=served_with_head(config.worker))
    is_weightless = config.launch.null_worker or config.worker.load_format == "dummy" or config.cluster.is_gateway
    trusts_code = config.worker.trust_remote_code
    source = resolve(config.worker.model_dir, needs_weights=False, trusts_code=trusts_code)
    tokenizer = load_tokenizer_or_none(source, config.http.chat_template)
    pooling = pooling_of(
        source, config.worker.model_type, config.worker.task, config.worker.pooling, config.worker.score_template
    )
    speculative_config = config.worker.speculative_config
    if not config.launch.null_worker:
        model = _check_model(source, config, tokenizer, pooling)
        speculative_config = resolved_speculation(config.worker, source, model).speculative_config
    if config.worker.speculation is not None and speculative_config is None:
        logger.info("speculative_config=auto: no MTP layer can draft here, so nothing is drafted")
    if not is_weightless:
        require_weights(source)  # after the checks, because a download may take long
    if config.router.pinned_prefixes is not None:
        encode_pinned_prefixes(config.router.pinned_prefixes, tokenizer)
    if tokenizer is not None and tokenizer.note:
        logger.info(tokenizer.note)
    if pooling is None:
        _warn_about_missing_parts(source, config, tokenizer)
    architectures = source.hf_config().get("architectures") or [source.hf_config().get("model_type")]
    defaults = read_sampling_defaults(source, config.http.generation_config)
    name = config.http.first_model_name(source.name)
    return ModelInfo(name, str(architectures[0]), str(defaults), source.path, speculative_config)


def with_local_files(config: ServerConfig, model: ModelInfo) -> ServerConfig:
    """The config with the path of the model's files: no other process asks the hub, which may have changed."""
    if model.path is None:
        return config
    worker = replace(config.worker, model_dir=str(model.path), speculative_config=model.speculative_config)
    return replace(config, worker=worker, http=replace(config.http, model_name=config.http.model_name or [model.name]))


def _check_access(http: HttpConfig) -> None:
    if http.ssl_certfile is not None:
        server_context(http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs)
    if not (http.api_key or http.ssl_ca_certs or net.is_local(http.host)):
        logger.warning("anyone who can reach %s may use the server: set --api_key_file", http.host)


def check_otlp(http: HttpConfig) -> None:
    if http.otlp_endpoint is None:
        return
    try:
        importlib.import_module(OTLP_MODULE)
    except ImportError as error:
        raise ServerError(
            f"--otlp_endpoint needs the package opentelemetry-proto; run: {install_command('otlp')} ({error})"
        ) from error


def check_profile_dir(folder: str | None) -> None:
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ServerError(f"--profile_dir {folder}: cannot be written ({error}); choose another folder") from error


def check_adapters(config: ServerConfig) -> None:
    """What can be known without the weights: the worker checks shapes before it loads them."""
    worker = config.worker
    modules = list(map(parse_module, worker.lora_modules))
    if worker.lora_dir is not None and not os.path.isdir(worker.lora_dir):
        raise OptionError(f"lora_dir={worker.lora_dir!r}: there is no such folder; create it")
    for name, path in modules:
        if name in config.http.model_name:
            raise OptionError(f"lora_modules: {name!r} is the name of the base model (--model_name)")
        check_rank(read_adapter(Path(path)), worker.max_lora_rank)
    if worker.merge_lora is not None:
        read_adapter(Path(worker.merge_lora))


def _check_model(
    source: ModelSource, config: ServerConfig, tokenizer: Tokenizer | None, pooling: PoolingConfig | None
) -> ModelConfig:
    worker = config.worker
    model = _model_config(stored_as(source, worker.quantization, packed_by_default=False), worker)
    model.request_len(worker.max_req_total_len)
    if model.is_of_transformers and worker.model_impl == "auto":
        logger.warning(RUN_BY_TRANSFORMERS, source.path, model.model_type)
    check_combinations(Setup(config, model_facts(worker, model, pooling)))
    check_ranks(worker, model)
    if (worker.max_total_token_num or math.inf) < (worker.max_req_total_len or 2):
        raise ServerError(
            f"max_total_token_num={worker.max_total_token_num} is less than one request of "
            f"{worker.max_req_total_len or 2} tokens; raise --max_total_token_num, or lower --max_req_total_len to it"
        )
    if tokenizer is not None and tokenizer.num_ids > model.vocab_size:
        text = (
            "%s: the tokenizer has %d tokens, the model's embedding only %d; prompts with the other tokens are refused"
        )
        logger.warning(text, source.path, tokenizer.num_ids, model.vocab_size)
    return model


def _model_config(source: ModelSource, worker: WorkerConfig) -> ModelConfig:
    hf = source.hf_config()
    if "model_type" not in hf and worker.model_type is None:
        raise ModelFilesError(
            f"{source.path}: config.json has no model_type; set --model_dir to a folder with a complete model"
        )
    try:
        return read_served_config(source, worker)
    except UnsupportedModelTypeError as error:
        raise ModelFilesError(f"{error}{_hint(source, worker)}") from error
    except ModelFilesError as error:
        raise ModelFilesError(f"{source.path}: {error}") from error


def _hint(source: ModelSource, worker: WorkerConfig) -> str:
    """Which supported model has the same tensors, if there is one: many models are Llama under another name."""
    fitting = _fitting_models(source) if worker.load_format == "auto" else []
    return f"; its tensors fit {', '.join(fitting[:SHOWN])}: try --model_type {fitting[0]}" if fitting else ""


def _fitting_models(source: ModelSource) -> list[str]:
    """In a process of its own, because the launcher does not import torch."""
    command = [sys.executable, "-m", "lightserve.tools.fitting_models", "--model_dir", str(source.path)]
    try:
        source.weight_files()  # of a model on the hub they are not downloaded yet
        done = subprocess.run(command, capture_output=True, text=True, timeout=FITTING_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError, ModelFilesError):
        return []  # it is a hint only
    return done.stdout.split()


def _warn_about_missing_parts(source: ModelSource, config: ServerConfig, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        logger.warning(NO_TOKENIZER, source.path)
    elif not tokenizer.has_chat_template:
        logger.warning("%s has no chat template: /v1/chat/completions returns 400", source.path)
    if not (source.eos_token_ids() or config.router.eos_id):
        logger.warning(
            "%s defines no end token: every response runs to its length limit; set one with --eos_id", source.path
        )


def check_ranks(worker: WorkerConfig, model: ModelConfig) -> None:
    """Check that the ranks can divide the model."""
    model.check_tp(worker.attention_tp)
    if worker.pp > model.num_layers:
        raise OptionError(f"pp={worker.pp}: the model has {model.num_layers} layers, and each stage needs one")
    if worker.ep == 1 or model.experts_name is None:
        return
    experts = model.count(model.experts_name)
    if experts % worker.ep:
        raise OptionError(f"ep={worker.ep}: it does not divide the {experts} experts of the model")
