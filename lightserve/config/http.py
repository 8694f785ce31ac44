"""Options of the HTTP processes."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from lightserve.config.addresses import check_redis, is_http_url
from lightserve.config.option import FlagGroup, check_options, option
from lightserve.errors import OptionError
from lightserve.utils.cpu import available_cores

# One HTTP process writes an event in about 25 us: 256 streams take it longer than a GPU needs for a step. The worker,
# the router, the detokenizer and the clients need cores too, and four HTTP processes were enough for 37,000 tokens/s.
CORES_PER_HTTP_PROCESS = 4
MAX_HTTP_PROCESSES = 4  # by default
MAX_MEDIA = 1024  # of a kind and a request
DEFAULT_MEDIA = 16
TEXT_BODY, MEDIA_BODY = 16 * 2**20, 64 * 2**20  # bytes
NO_MEDIA = {"image": 0, "video": 0, "audio": 0}
RL_MAX_CHOICES = 65536
MAX_HTTPSERVER_WORKERS = 64  # ids name one of 256 processes, so each can be replaced three times before one comes again


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Options of the HTTP processes."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces", group=FlagGroup.COMMON)
    limit_mm_per_prompt: str | None = option(
        None,
        "images, videos and sounds of a request at most, as image=N,video=M,audio=K or as a JSON object; image=N "
        "alone is for the others too; 0: read none, and load no tower; default: 16 of each if the model reads them",
        "max_images",
        group=FlagGroup.COMPUTATION,
    )
    max_image_tokens: int | None = option(
        None,
        "tokens of an image at most: larger ones are made smaller; default: what preprocessor_config.json says",
        group=FlagGroup.COMPUTATION,
        at_least=4,
    )
    max_image_mb: int = option(20, "MB of an image file at most", group=FlagGroup.HTTP, at_least=1, at_most=1024)
    max_audio_mb: int = option(25, "MB of a sound file at most", group=FlagGroup.HTTP, at_least=1, at_most=1024)
    max_audio_seconds: int = option(
        1500, "seconds of a sound at most that /v1/audio/transcriptions reads", group=FlagGroup.HTTP, at_least=1
    )
    no_media_urls: bool = option(
        False, "fetch no images of other servers: requests have them as data: URLs", group=FlagGroup.HTTP
    )
    allowed_media_domains: list[str] = option(
        [],
        "hosts, such as img.example.com or *.example.com, from which images are fetched; default: all that are public",
        group=FlagGroup.HTTP,
    )
    media_private_hosts: list[str] = option(
        [],
        "hosts from which images are fetched although their addresses are not public: clients reach them through "
        "this server",
        group=FlagGroup.HTTP,
    )
    allow_http_media: bool = option(False, "fetch images of http: URLs too, unencrypted", group=FlagGroup.HTTP)
    media_timeout: int = option(
        10, "seconds until an image of another server must have arrived", group=FlagGroup.HTTP, at_least=1, at_most=600
    )
    port: int = option(8000, "port to listen on; 0: any free port", group=FlagGroup.COMMON)
    httpserver_workers: int | None = option(
        None,
        "number of HTTP processes; default: one for every 4 cores, at least 1 and at most 4",
        "api_server_count",
        group=FlagGroup.HTTP,
        at_least=1,
        at_most=MAX_HTTPSERVER_WORKERS,
    )
    model_name: list[str] = option(
        [],
        "names of the model for clients; responses show the first; default: the name of its folder",
        "served_model_name",
        group=FlagGroup.COMMON,
    )
    api_key: list[str] = option([], "keys that clients may use; default: no key is needed", group=FlagGroup.COMMON)
    api_key_file: str | None = option(
        None,
        "file with API keys, one per line, each with a name and limits of its own if you like; unlike --api_key, ps "
        "does not show them",
        group=FlagGroup.KEYS,
    )
    admin_key: list[str] = option(
        [],
        "keys for routes that change the server, such as /abort_request; default: the API keys",
        group=FlagGroup.KEYS,
    )
    admin_key_file: str | None = option(None, "file with admin keys, one per line", group=FlagGroup.KEYS)
    key_requests_per_minute: int | None = option(
        None,
        "requests of an API key in a minute at most, then 429; a line of --api_key_file may have another number; "
        "default: no limit",
        group=FlagGroup.KEYS,
        at_least=1,
    )
    key_concurrency: int | None = option(
        None,
        "requests of an API key at once at most, then 429; a line of --api_key_file may have another number; "
        "default: no limit",
        group=FlagGroup.KEYS,
        at_least=1,
    )
    ssl_keyfile: str | None = option(
        None, "private key for HTTPS, PEM; default: contained in --ssl_certfile", group=FlagGroup.KEYS
    )
    ssl_certfile: str | None = option(
        None, "certificate chain for HTTPS, PEM; default: plain HTTP", group=FlagGroup.KEYS
    )
    ssl_ca_certs: str | None = option(
        None,
        "CA certificates, PEM; every client must then present a certificate signed by one of them",
        group=FlagGroup.KEYS,
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: auto: of the model's generation_config.json; none: the API's own; "
        "or a folder or file with another one; a request's own values win",
        group=FlagGroup.MODEL_FILES,
    )
    default_max_tokens: int | None = option(
        None,
        "maximum new tokens of a request that names no maximum; default: the rest of the context",
        group=FlagGroup.SCHEDULING,
        at_least=1,
    )
    chat_template: str | None = option(
        None,
        "Jinja file, or the template itself, that replaces the model's chat templates; default: the model's own",
        group=FlagGroup.MODEL_FILES,
    )
    default_chat_template_kwargs: str = option(
        "", "JSON object with variables for the chat template; a request's own values win", group=FlagGroup.MODEL_FILES
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls, such as hermes or llama3_json; auto: detect from its chat template",
        group=FlagGroup.MODEL_FILES,
    )
    reasoning_parser: str = option(
        "auto",
        "format of reasoning: qwen3, deepseek_r1, or two tags as BEGIN,END; auto: detect from the chat template",
        group=FlagGroup.MODEL_FILES,
    )
    strict_fields: bool = option(
        False,
        "refuse a request that has an unknown field near a known one, such as max_token; "
        "default: serve it, with a header Warning",
        group=FlagGroup.HTTP,
    )
    use_tgi_api: bool = option(
        False, "treat an ambiguous body on /generate as TGI's, not as LightLLM's", group=FlagGroup.HTTP
    )
    enable_rl: bool = option(
        False,
        "serve the endpoints of trainers: pause, sleep, tokens in and out; they change the server, so set --admin_key",
        group=FlagGroup.RL,
    )
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] | None = option(
        None,
        "distribution of the logprobs of new tokens; raw: the model's; processed: the one that was sampled from, after "
        "penalties, temperature, top_k and top_p; default: raw, but processed in SGLang's /generate",
        group=FlagGroup.RL,
    )
    weights_dir: str | None = option(
        None,
        "trainers may have weights loaded from folders below this one (--enable_rl); default: from none",
        group=FlagGroup.RL,
    )
    root_path: str = option(
        "", "path of the server behind a reverse proxy, such as /llm; the proxy may remove it", group=FlagGroup.HTTP
    )
    no_web: bool = option(False, "serve no chat page: GET / is text for browsers too", group=FlagGroup.HTTP)
    allowed_origins: list[str] = option([], "web origins that may call the server (CORS); *: all", group=FlagGroup.HTTP)
    allowed_hosts: list[str] = option(
        [],
        "names of this server, such as llm.example.com or *.example.com, that a request may have as Host; *: all; "
        "default: all, but only local names if --host is a loopback address",
        group=FlagGroup.HTTP,
    )
    max_body_bytes: int | None = option(
        None,
        "maximum bytes of a request body; a larger one gets status 413; default: 16 MiB, or 64 MiB if the model reads "
        "images or sounds",
        group=FlagGroup.HTTP,
        at_least=1,
    )
    max_choices: int = option(128, "maximum choices of one request: prompts times n", group=FlagGroup.HTTP, at_least=1)
    response_store_size: int = option(
        1000,
        "maximum responses of /v1/responses that are stored, oldest removed first; 0: none is stored",
        group=FlagGroup.HTTP,
        at_least=0,
    )
    response_store_bytes: int = option(
        128 * 2**20, "maximum bytes of all stored responses, on the disk", group=FlagGroup.HTTP, at_least=0
    )
    tool_server: list[str] = option(
        [],
        "MCP servers of the operator, as LABEL=URL; requests use one by its label, and web_search and code_interpreter "
        "are those of these names",
        group=FlagGroup.HTTP,
    )
    no_mcp_urls: bool = option(
        False, "call no MCP servers that requests name by URL; those of --tool_server stay", group=FlagGroup.HTTP
    )
    allowed_mcp_domains: list[str] = option(
        [],
        "hosts, such as mcp.example.com or *.example.com, of MCP servers that requests may name; default: all that are "
        "public",
        group=FlagGroup.HTTP,
    )
    mcp_private_hosts: list[str] = option(
        [],
        "hosts of MCP servers that requests may name although their addresses are not public: clients reach them "
        "through this server",
        group=FlagGroup.HTTP,
    )
    allow_http_mcp: bool = option(False, "call MCP servers of http: URLs too, unencrypted", group=FlagGroup.HTTP)
    mcp_timeout: int = option(
        60, "seconds until an MCP server must have answered a call", group=FlagGroup.HTTP, at_least=1, at_most=3600
    )
    max_tool_rounds: int = option(
        16,
        "times that a model may go on after calls of MCP tools in one response; then it must answer",
        group=FlagGroup.HTTP,
        at_least=1,
        at_most=1024,
    )
    stream_log: str | None = option(
        None,
        "Redis or Valkey server that keeps streams, such as redis://10.0.0.5:6379/1; a client that lost its connection "
        "resumes its stream with Last-Event-ID, at any HTTP process or gateway with the same one; a client that "
        "disconnects does not stop its request at once: see --stream_log_ttl",
        group=FlagGroup.PARALLEL,
    )
    stream_log_ttl: float = option(
        60.0,
        "seconds for which a client can come back for a stream of --stream_log; a request whose client has "
        "disconnected runs on for so long",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )
    batch_dir: str | None = option(
        None,
        "folder for /v1/files, /v1/batches and /v1/messages/batches; batches outlive the server there; default: none",
        group=FlagGroup.BATCHES,
    )
    batch_concurrency: int = option(
        256,
        "maximum requests of batches that run at once, beside those of clients, which go first",
        group=FlagGroup.BATCHES,
        at_least=1,
    )
    batch_max_file_bytes: int = option(
        200 * 2**20, "maximum bytes of an uploaded file", group=FlagGroup.BATCHES, at_least=1
    )
    batch_dir_bytes: int = option(
        8 * 2**30, "maximum bytes of all uploaded files and results", group=FlagGroup.BATCHES, at_least=1
    )
    metrics_compat: str = option(
        "", "also export metrics with the names of vllm and/or lightllm, comma-separated", group=FlagGroup.OBSERVABILITY
    )
    otlp_endpoint: str | None = option(
        None,
        "collector for OpenTelemetry traces, such as http://localhost:4318; needs opentelemetry-proto",
        group=FlagGroup.OBSERVABILITY,
    )
    disable_log_requests: bool = option(
        False, "do not log a line per request", "disable_uvicorn_access_log", group=FlagGroup.OBSERVABILITY
    )

    def __post_init__(self) -> None:
        check_options(self)
        if "" in self.model_name:
            raise OptionError("model_name: a name must not be empty")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise OptionError("--ssl_keyfile and --ssl_ca_certs need --ssl_certfile")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise OptionError(f"root_path={self.root_path!r}: must begin with / and must not end with it, as /llm")
        if not 0 <= self.port < 65536:
            raise OptionError(f"port={self.port}: must be between 0 and 65535")
        if self.otlp_endpoint is not None and not is_http_url(self.otlp_endpoint):
            raise OptionError(f"otlp_endpoint={self.otlp_endpoint!r}: must be an address as http://localhost:4318")
        if self.stream_log is not None:
            check_redis("stream_log", self.stream_log)
        if self.weights_dir is not None and not self.enable_rl:
            raise OptionError("--weights_dir needs --enable_rl: only trainers have weights loaded")
        _ = self.template_variables, self.media_limits, self.tool_servers
        unknown = set(self.compat_names) - {"vllm", "lightllm"}
        if unknown:
            raise OptionError(
                f"metrics_compat={self.metrics_compat!r}: must be vllm, lightllm or both, comma-separated"
            )

    @property
    def media_limits(self) -> dict[str, int]:
        """Of a request, by kind. The launcher sets the default of the model."""
        return NO_MEDIA if self.limit_mm_per_prompt is None else _media_limits(self.limit_mm_per_prompt)

    @property
    def reads_media(self) -> bool:
        """If not, there is no encoder."""
        return any(self.media_limits.values())

    @property
    def body_limit(self) -> int:
        """Bytes of a request. Photos of a phone have 4 MB each, and a third more in base64."""
        return self.max_body_bytes or (MEDIA_BODY if self.reads_media else TEXT_BODY)

    @property
    def processed_logprobs(self) -> bool | None:
        """None: each API has its own default."""
        return None if self.logprobs_mode is None else self.logprobs_mode.startswith("processed")

    @property
    def choices_limit(self) -> int:
        """Choices of one request; a trainer sends a whole batch."""
        return max(self.max_choices, RL_MAX_CHOICES) if self.enable_rl else self.max_choices

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
    def tool_servers(self) -> dict[str, str]:
        """The URLs of --tool_server by label."""
        servers: dict[str, str] = {}
        for text in self.tool_server:
            label, _, url = text.partition("=")
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", label) or not is_http_url(url) or label in servers:
                raise OptionError(f"tool_server={text!r}: must be LABEL=URL, as search=http://127.0.0.1:9000/mcp, once")
            servers[label] = url
        return servers

    @property
    def compat_names(self) -> list[str]:
        return [name.strip() for name in self.metrics_compat.split(",") if name.strip()]


def _media_limits(text: str) -> dict[str, int]:
    """Of image=N,video=M,audio=K, of vLLM's JSON object, or of a number alone, which is that of images."""
    if text.lstrip().startswith("{"):
        given = _json_object("limit_mm_per_prompt", text)
    else:
        pairs = (text if "=" in text else f"image={text}").replace(" ", "").split(",")
        given = dict(pair.partition("=")[::2] for pair in pairs)
    numbers = {kind: str(number) for kind, number in given.items()}
    if not numbers or not numbers.keys() <= NO_MEDIA.keys() or not all(map(_is_limit, numbers.values())):
        raise OptionError(
            f"limit_mm_per_prompt={text!r}: must be image=N, video=N, audio=N or several with commas, with N from 0 to "
            f"{MAX_MEDIA}"
        )
    images = int(numbers.get("image", DEFAULT_MEDIA))
    return {kind: int(numbers.get(kind, images)) for kind in NO_MEDIA}


def _is_limit(number: str) -> bool:
    return number.isdecimal() and int(number) <= MAX_MEDIA


@functools.lru_cache(maxsize=4)
def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"{name}={text!r}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise OptionError(f"{name}={text!r}: must be a JSON object")
    return value
