"""What can be known to go wrong before anything heavy starts."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.common.model_config import ModelConfig
from lightserve.config import HttpConfig, ServerConfig
from lightserve.errors import ModelFilesError
from lightserve.model_files.source import ModelSource, resolve
from lightserve.model_files.tokenizer import has_tokenizer
from lightserve.models.registry import check_supported
from lightserve.utils import net
from lightserve.utils.logger import init_logger
from lightserve.utils.tls import server_context

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str  # what clients call it
    architecture: str


def check(config: ServerConfig) -> ModelFacts:
    """Raise the LightserveError that tells the operator what to change; fetch the default model if it is wanted."""
    net.bind(config.http.host, config.http.port).close()
    _check_access(config.http)
    is_weightless = config.launch.null_worker or config.worker.load_format == "dummy"
    source = resolve(config.worker.model_dir, needs_weights=not is_weightless)
    if not config.launch.null_worker:
        _check_model(source, config)
    _warn_of_what_is_missing(source)
    architectures = source.hf_config().get("architectures") or [source.hf_config().get("model_type")]
    return ModelFacts(config.http.model_name or source.name, str(architectures[0]))


def _check_access(http: HttpConfig) -> None:
    if http.ssl_certfile is not None:
        server_context(http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs)
    if not (http.api_key or http.ssl_ca_certs or net.is_local(http.host)):
        logger.warning("anyone who reaches %s may use the server: it has no --api_key_file", http.host)


def _check_model(source: ModelSource, config: ServerConfig) -> None:
    hf = source.hf_config()
    if "model_type" not in hf:
        raise ModelFilesError(f"{source.path}: config.json has no model_type; give a folder that holds a whole model")
    check_supported(str(hf["model_type"]))  # before its shape: another architecture has other names for it
    model = ModelConfig.from_hf(hf)
    model.check_tp(config.worker.tp)
    model.request_len(config.worker.max_req_total_len)


def _warn_of_what_is_missing(source: ModelSource) -> None:
    if not has_tokenizer(source):
        logger.warning("%s has no tokenizer: prompts must be token ids, and answers have no text", source.path)
    elif source.chat_template() is None:
        logger.warning("%s has no chat template: /v1/chat/completions will answer 400", source.path)
