"""Which features exclude each other: one table, read before a process starts or a weight loads.

A row is two features, the reason and the remedy. A feature is a flag that is set, or a property of the model that its
config.json tells. A wrong value of a single flag, or a flag that needs another one, is refused with its field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lightserve.config.commands import ENGINE_HTTP, GATEWAY_LAUNCH, GATEWAY_ROUTER, GATEWAY_WORKER
from lightserve.config.option import changed_options
from lightserve.errors import OptionError

if TYPE_CHECKING:
    from lightserve.config.server import ServerConfig

OF_PORT = frozenset({"host", "port"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json and the flags tell of a model before its weights load."""

    model_type: str
    generates_text: bool = True
    has_kv_cache: bool = True
    kv_dtype: str | None = None  # None: KV is not quantised
    has_experts: bool = False
    has_windows: bool = False  # layers with a sliding window
    has_states: bool = False  # recurrent layers
    is_of_transformers: bool = False  # transformers' modules compute it


class Setup(NamedTuple):
    """What is known of a server or an LLM before it starts."""

    config: ServerConfig
    model: ModelFacts | None = None  # None: not known yet, or there is none
    is_offline: bool = False  # an LLM in the process of its caller


class Feature(NamedTuple):
    name: str
    shown: Callable[[Setup], str]  # what turns it on, as the operator writes it; "": it is off


class Conflict(NamedTuple):
    first: Feature
    second: Feature
    reason: str
    remedy: str
    is_missing: bool = False  # it could work, and is not built


def _not_built(first: Feature, second: Feature, reason: str, remedy: str) -> Conflict:
    return Conflict(first, second, reason, remedy, is_missing=True)


def _above(section_name: str, name: str, usual: float) -> Feature:
    """A number that turns something on."""

    def shown(setup: Setup) -> str:
        value = getattr(getattr(setup.config, section_name), name)
        return f"--{name} {value:g}" if value is not None and value > usual else ""

    return Feature(name, shown)


def _set(section_name: str, name: str) -> Feature:
    """A switch or a text. Its value is not shown: it may be long or secret."""
    return Feature(name, lambda setup: f"--{name}" if getattr(getattr(setup.config, section_name), name) else "")


def _model(name: str, is_on: Callable[[ModelFacts], bool], text: str) -> Feature:
    def shown(setup: Setup) -> str:
        return text.format(setup.model.model_type) if setup.model is not None and is_on(setup.model) else ""

    return Feature(name, shown)


def _first_other(section: Any, allowed: Collection[str]) -> str:
    return next((f"--{name}" for name in changed_options(section) if name not in allowed), "")


def _attention_dp(setup: Setup) -> str:
    worker = setup.config.worker
    if worker.num_groups == 1:
        return ""
    return "--enable_dp_attention" if worker.attention_dp is None else f"--attention_dp {worker.attention_dp}"


def _loras(setup: Setup) -> str:
    worker = setup.config.worker
    if not worker.num_loras:
        return ""
    return "--lora_modules" if worker.lora_modules else "--lora_dir" if worker.lora_dir else "--max_loras"


def _roles(setup: Setup) -> str:
    cluster = setup.config.cluster
    if not cluster.is_disaggregated:
        return ""
    return "--roles" if cluster.roles else f"--role {cluster.role}"


def _ranks(setup: Setup) -> str:
    worker = setup.config.worker
    return f"--tp {worker.tp}" if worker.tp > 1 else f"--pp {worker.pp}" if worker.pp > 1 else ""


def _gateway(setup: Setup) -> str:
    cluster = setup.config.cluster
    return "--engines" if cluster.engines else "--engines_file" if cluster.engines_file is not None else ""


def _engine_flag(setup: Setup) -> str:
    """The first flag that is not of gateways."""
    config = setup.config
    sections = ((config.worker, GATEWAY_WORKER), (config.router, GATEWAY_ROUTER), (config.launch, GATEWAY_LAUNCH))
    return next(filter(None, (_first_other(section, allowed) for section, allowed in sections)), "")


def _http_flag(setup: Setup) -> str:
    """The first flag that only a server with HTTP takes; other nodes have the flags of node 0."""
    return "" if setup.config.is_other_node else _first_other(setup.config.http, ENGINE_HTTP | OF_PORT)


def _http_address(setup: Setup) -> str:
    changed = {} if setup.config.is_other_node else changed_options(setup.config.http)
    return next((f"--{name}" for name in changed if name in OF_PORT), "")


def _kv_dtype(setup: Setup) -> str:
    """Of the flag, or of the checkpoint."""
    return "" if setup.model is None or setup.model.kv_dtype is None else f"--kv_dtype {setup.model.kv_dtype}"


def _state_dtype(setup: Setup) -> str:
    dtype = setup.config.worker.state_dtype
    return "" if dtype == "float32" else f"--state_dtype {dtype}"


def _draft_head(setup: Setup) -> str:
    config = setup.config.worker.speculation
    return f"--speculative_config with the method {config.method}" if config is not None and config.has_head else ""


def _states(setup: Setup) -> str:
    """Of a process that computes."""
    is_on = setup.model is not None and setup.model.has_states and not setup.config.cluster.is_gateway
    return f"a {setup.model.model_type} model, which has recurrent layers" if is_on and setup.model else ""


def _drafted_states(setup: Setup) -> str:
    states = _states(setup)
    return f"--speculative_config for {states}" if states and setup.config.worker.speculative_config else ""


IMAGES = Feature("images", lambda setup: "--limit_mm_per_prompt" if setup.config.http.reads_media else "")
PP, EP = _above("worker", "pp", 1), _above("worker", "ep", 1)
ATTENTION_DP = Feature("attention_dp", _attention_dp)
RANKS = Feature("ranks", _ranks)
VISUAL_DP = _above("worker", "visual_dp", 1)
DETERMINISTIC, OPS_BACKEND = _set("worker", "deterministic"), _set("worker", "ops_backend")
QUANTIZATION, QUANTIZATION_CONFIG = _set("worker", "quantization"), _set("worker", "quantization_config")
DUMMY = Feature("dummy", lambda setup: "--load_format dummy" if setup.config.worker.load_format == "dummy" else "")
LORA, MERGE_LORA = Feature("lora", _loras), _set("worker", "merge_lora")
SPECULATION = _set("worker", "speculative_config")
STATE_DTYPE = Feature("state_dtype", _state_dtype)
DRAFT_HEAD = Feature("draft_head", _draft_head)
KV_RAM = _above("worker", "kv_ram_gb", 0)
MAX_WINDOWED, MAX_STATES = _above("worker", "max_windowed_token_num", 0), _above("worker", "max_state_rows", 0)
NO_PREFIX_CACHE = _set("router", "disable_dynamic_prompt_cache")
PINNED_PREFIXES = _set("router", "pinned_prefixes")
NULL_WORKER = _set("launch", "null_worker")
DP, NNODES = _above("cluster", "dp", 1), _above("cluster", "nnodes", 1)
ENGINES, ENGINES_FILE = _set("cluster", "engines"), _set("cluster", "engines_file")
GATEWAY, LISTEN = Feature("gateway", _gateway), _set("cluster", "listen")
ROLES = Feature("roles", _roles)
WEIGHTS_DIR = _set("http", "weights_dir")
ENGINE_FLAG = Feature("engine_flag", _engine_flag)
HTTP_FLAG, HTTP_ADDRESS = Feature("http_flag", _http_flag), Feature("http_address", _http_address)
OFFLINE = Feature("offline", lambda setup: "LLM()" if setup.is_offline else "")
POOLING = _model("pooling", lambda model: not model.generates_text, "a model that generates no text")
NO_KV_CACHE = _model("no_kv_cache", lambda model: not model.has_kv_cache, "a model without a KV cache")
KV_DTYPE = Feature("kv_dtype", _kv_dtype)
NO_EXPERTS = _model("no_experts", lambda model: not model.has_experts, "a {} model")
NO_WINDOWS = _model("no_windows", lambda model: not model.has_windows, "a {} model")
DRAFTED_STATES = Feature("drafted_states", _drafted_states)
NO_STATES = _model("no_states", lambda model: not model.has_states, "a {} model")
TRANSFORMERS = _model("transformers", lambda model: model.is_of_transformers, "a {} model run by transformers")
PACKED_INPUT = _set("worker", "packed_input_bits")
ROUTED_EXPERTS = _set("worker", "enable_return_routed_experts")

_NO_IMAGES = "add --limit_mm_per_prompt 0, or leave it out"

TABLE = (
    # a process is a gateway, an engine, or both in one
    Conflict(ENGINES, ENGINES_FILE, "both list the engines", "write all addresses into the file"),
    Conflict(GATEWAY, LISTEN, "a process is a gateway or an engine", "start two"),
    Conflict(DP, GATEWAY, "a gateway has no engines of its own", "start one engine for each device with --listen"),
    Conflict(DP, LISTEN, "an address has one engine", "start one engine for each of several ports"),
    Conflict(NNODES, GATEWAY, "a gateway has no ranks", "set it on the engines"),
    Conflict(ENGINE_FLAG, GATEWAY, "a gateway does not compute", "set it on the engines"),
    Conflict(HTTP_FLAG, LISTEN, "an engine has no HTTP", "set it on the gateways"),
    Conflict(HTTP_ADDRESS, LISTEN, "an engine has no HTTP", "its address is --listen tcp://HOST:PORT"),
    # an LLM in the process of its caller
    _not_built(VISUAL_DP, OFFLINE, "it encodes images in its own process", "start a server"),
    # trainers
    _not_built(
        ROUTED_EXPERTS,
        TRANSFORMERS,
        "its modules do not show which experts they choose",
        "leave out one of the flags",
    ),
    Conflict(
        ROUTED_EXPERTS,
        POOLING,
        "trainers replay the experts of texts that a model generates",
        "leave out --enable_return_routed_experts",
    ),
    Conflict(ROUTED_EXPERTS, NULL_WORKER, "it has no experts", "leave out one of the flags"),
    Conflict(ROUTED_EXPERTS, NO_EXPERTS, "it has no experts", "leave out --enable_return_routed_experts"),
    Conflict(WEIGHTS_DIR, GATEWAY, "a gateway has no weights", "set it on the engines"),
    Conflict(ROUTED_EXPERTS, OFFLINE, "requests of a server return them", "start a server"),
    # attention groups
    _not_built(ATTENTION_DP, POOLING, "attention groups generate text", "use --tp and --ep alone"),
    # adapters
    Conflict(MERGE_LORA, DUMMY, "there are no weights to merge it into", "leave out --load_format dummy"),
    # the null worker
    Conflict(NULL_WORKER, PP, "it has no layers to divide", "leave out one of the flags"),
    Conflict(NULL_WORKER, EP, "it has no experts to divide", "leave out one of the flags"),
    Conflict(NULL_WORKER, ROLES, "it has no KV to send", "leave out one of the flags"),
    Conflict(NULL_WORKER, LORA, "it has no model that adapters could change", "leave out their flags"),
    Conflict(NULL_WORKER, MERGE_LORA, "it has no model that adapters could change", "leave out their flags"),
    # speculation
    Conflict(SPECULATION, NULL_WORKER, "it computes no text that could repeat itself", "leave out one of the flags"),
    _not_built(DRAFT_HEAD, ATTENTION_DP, "a head drafts for one group of ranks", "use the method ngram"),
    _not_built(DRAFT_HEAD, TRANSFORMERS, "its modules do not show their hidden states", "use the method ngram"),
    Conflict(SPECULATION, POOLING, "it has no tokens to draft", "leave out --speculative_config"),
    # the prefix cache
    Conflict(KV_RAM, NO_PREFIX_CACHE, "it keeps prefixes that the prefix cache evicts", "leave out one of the flags"),
    Conflict(ROLES, NO_PREFIX_CACHE, "KV that is sent enters the prefix cache", "leave out one of the flags"),
    Conflict(
        PINNED_PREFIXES, NO_PREFIX_CACHE, "pinned prefixes stay in the prefix cache", "leave out one of the flags"
    ),
    # numbers
    Conflict(
        OPS_BACKEND,
        DETERMINISTIC,
        "a row of other packages' operators may depend on the rows beside it",
        "leave one out",
    ),
    Conflict(QUANTIZATION, QUANTIZATION_CONFIG, "both choose a format", "put the first into the file as its default"),
    # models that transformers runs
    _not_built(TRANSFORMERS, RANKS, "its modules run on one device", "leave out --tp and --pp"),
    _not_built(TRANSFORMERS, QUANTIZATION, "its modules have their own linears", "leave out --quantization"),
    _not_built(TRANSFORMERS, QUANTIZATION_CONFIG, "its modules have their own linears", "leave it out"),
    _not_built(TRANSFORMERS, PACKED_INPUT, "its modules have their own linears", "leave it out"),
    _not_built(TRANSFORMERS, LORA, "its modules take no adapters", "merge them into the checkpoint"),
    _not_built(TRANSFORMERS, MERGE_LORA, "transformers loads the weights", "merge it into the checkpoint"),
    _not_built(TRANSFORMERS, KV_DTYPE, "its KV has the type of its weights", "use --kv_dtype none"),
    Conflict(TRANSFORMERS, DETERMINISTIC, "products of its modules depend on the batch", "leave out --deterministic"),
    _not_built(TRANSFORMERS, POOLING, "it generates text only", "leave out --task and --pooling"),
    _not_built(TRANSFORMERS, MAX_WINDOWED, "its layers share one KV pool", "leave it out"),
    # models
    Conflict(POOLING, ROLES, "it has no prompts that another engine could continue", "start engines without roles"),
    Conflict(POOLING, KV_RAM, "no prefix of it is cached", "leave out --kv_ram_gb"),
    Conflict(POOLING, PINNED_PREFIXES, "no prefix of it is cached", "leave out --pinned_prefixes"),
    Conflict(NO_KV_CACHE, DETERMINISTIC, "the texts of a step are computed together", "leave out --deterministic"),
    Conflict(EP, NO_EXPERTS, "it has no experts", "use --tp alone"),
    Conflict(MAX_WINDOWED, NO_WINDOWS, "none of its layers has a sliding window", "leave it out"),
    Conflict(MAX_STATES, NO_STATES, "none of its layers is recurrent", "leave it out"),
    Conflict(STATE_DTYPE, NO_STATES, "none of its layers is recurrent", "leave it out"),
    Conflict(STATE_DTYPE, DETERMINISTIC, "a state is rounded where a step ends", "leave out one of the flags"),
    Conflict(
        DRAFTED_STATES,
        STATE_DTYPE,
        "with drafts, states would be rounded at other tokens",
        "leave out one of the flags",
    ),
    Conflict(
        DRAFTED_STATES, DETERMINISTIC, "states of several tokens are computed at once", "leave out --speculative_config"
    ),
    # images
    Conflict(IMAGES, NULL_WORKER, "it computes nothing", _NO_IMAGES),
    _not_built(IMAGES, TRANSFORMERS, "its modules get token ids only", _NO_IMAGES),
    _not_built(IMAGES, POOLING, "images of models that generate no text are not read yet", _NO_IMAGES),
)
FEATURES = tuple({feature.name: feature for row in TABLE for feature in (row.first, row.second)}.values())


def first_conflict(setup: Setup) -> str | None:
    """Why these features exclude each other, in one line; None: they do not."""
    shown = {feature: feature.shown(setup) for feature in FEATURES}
    for first, second, reason, remedy, _ in TABLE:
        if shown[first] and shown[second]:
            return f"{shown[first]} cannot be used with {shown[second]}: {reason}; {remedy}"
    return None


def check_combinations(setup: Setup) -> None:
    if conflict := first_conflict(setup):
        raise OptionError(conflict)
