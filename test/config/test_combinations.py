"""Every pair of features either passes all checks of the server, or is refused with the line of the table."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from lightserve.config import ServerConfig, WorkerConfig
from lightserve.config.combinations import FEATURES, OFFLINE, TABLE, Conflict, Feature, Setup, first_conflict
from lightserve.config.parse import config_from_args, parse_server, server_parser
from lightserve.errors import LightserveError, OptionError
from lightserve.links.keys import generate
from lightserve.model_files.config.facts import model_facts
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.source import pooling_of, resolve
from lightserve.models.served_config import read_served_config
from lightserve.offline.llm import LLM
from lightserve.server.checks import check
from test.lora_files import write_adapter
from test.pooling.files import VOCAB_SIZE, word_tokenizer
from test.ports import free_port
from test.worker.heads import save_head

Flags = Mapping[str, Any]

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENTS = {
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
RECURRENT = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"model_type": "qwen3_moe", **SHAPE, **EXPERTS},
    "dense": {"model_type": "llama", **SHAPE},
    "windows": {
        "model_type": "gpt_oss",
        **SHAPE,
        "head_dim": 8,
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "latents": {"model_type": "deepseek_v2", **SHAPE, **LATENTS},
    "recurrent": {"model_type": "qwen3_next", **SHAPE, **EXPERTS, **RECURRENT},
    "encoder": {"model_type": "bert", "architectures": ["BertModel"], **SHAPE, "layer_norm_eps": 1e-6},
    "unknown": {"model_type": "persimmon", **SHAPE},
    "unknown_classifier": {"model_type": "persimmon", "architectures": ["PersimmonForSequenceClassification"], **SHAPE},
}
# of features that a model has; a pair of others is checked with a model that has experts
MODEL_OF = {
    "drafted_states": "recurrent",
    "latent_attention": "latents",
    "no_experts": "dense",
    "no_kv_cache": "encoder",
    "no_states": "experts",
    "no_windows": "experts",
    "pooling": "encoder",
    "states": "recurrent",
    "transformers": "unknown",
    "windowed_pool": "windows",
}
# of flags that only some models take: a pair is checked with such a model, unless the other feature is of another one
MODEL_FOR = {"max_state_rows": "recurrent", "state_dtype": "recurrent", "max_windowed_token_num": "windows"}
MODELS_OF_BOTH = {frozenset({"encoder", "unknown"}): "unknown_classifier"}


@pytest.fixture(scope="module", autouse=True)
def _entry_points_read_once() -> Iterator[None]:
    """Every check asks for the models of other packages, which takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightserve.models.registry.entry_points", functools.cache(entry_points))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        word_tokenizer().save(str(folder / name / "tokenizer.json"))
    save_head(folder / "head", VOCAB_SIZE, 64, [1, 2])
    generate(folder / "keys")
    write_adapter(folder / "adapter", {"model.layers.0.self_attn.q_proj": (64, 64)})
    (folder / "prompts.json").write_text('{"one": "w5 w6"}')
    (folder / "formats.json").write_text('{"default": "int8"}')
    (folder / "engines").write_text("")
    return folder


@pytest.fixture(scope="module")
def examples(folder: Path) -> dict[str, Flags]:
    """Flags that turn each feature on, with what they need."""
    keys = {"cluster_keys": folder / "keys"}
    listen = {"listen": f"tcp://127.0.0.1:{free_port()}", **keys}
    engines = {"engines": "tcp://a:1", **keys}
    node = {"master_addr": "127.0.0.1", "master_port": free_port(), **keys}
    return {
        "attention_dp": {"tp": 2, "ep": 2, "enable_dp_attention": True},
        "deterministic": {"deterministic": True},
        "disable_dynamic_prompt_cache": {"disable_dynamic_prompt_cache": True},
        "dp": {"dp": 2},
        "drafted_states": {"speculative_config": '{"method": "ngram"}'},
        "dummy": {"load_format": "dummy"},
        "engine_flag": {"eos_id": 7},
        "engines": engines,
        "engines_file": {"engines_file": folder / "engines", **keys},
        "ep": {"tp": 2, "ep": 2},
        "gateway": engines,
        "images": {"limit_mm_per_prompt": "image=2"},
        "http_address": {"host": "localhost"},
        "http_flag": {"no_web": True},
        "kv_dtype": {"kv_dtype": "fp8"},
        "kv_ram_gb": {"kv_ram_gb": 1},
        "listen": listen,
        "lora": {"max_loras": 2},
        "max_state_rows": {"max_state_rows": 64},
        "max_windowed_token_num": {"max_windowed_token_num": 64},
        "more_than_two_ranks": {"tp": 4},
        "weights_dir": {"weights_dir": folder, "enable_rl": True},
        "merge_lora": {"merge_lora": folder / "adapter"},
        "nnodes": {"tp": 2, "nnodes": 2, **node},
        "ops_backend": {"ops_backend": "fast_ops"},
        "packed_input_bits": {"packed_input_bits": 8},
        "null_worker": {"null_worker": True},
        "pp": {"pp": 2},
        "profile_dir": {"profile_dir": folder / "profiles"},
        "quantization": {"quantization": "int8"},
        "quantization_config": {"quantization_config": folder / "formats.json"},
        "ranks": {"tp": 2},
        "speculative_config": {"speculative_config": '{"method": "ngram"}'},
        "draft_head": {"speculative_config": json.dumps({"method": "eagle3", "model": str(folder / "head")})},
        "roles": {"role": "prefill", **listen},
        "state_dtype": {"state_dtype": "bfloat16"},
        "enable_rl": {"enable_rl": True},
        "enable_return_routed_experts": {"enable_return_routed_experts": True},
        "pinned_prefixes": {"pinned_prefixes": folder / "prompts.json"},
    }


def command(flags: Flags) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


def combined(folder: Path, first: Flags, second: Flags, model: str) -> list[str]:
    """The command line with both. Ranks are as many as the one with more of them has."""
    flags = {"model_dir": folder / model, **first, **second}
    flags["tp"] = max(first.get("tp", 1), second.get("tp", 1))
    if "ep" in flags:
        flags["ep"] = flags["tp"]
    return command(flags if "listen" in flags or "host" in flags else {"port": 0, **flags})


def model_of(*features: Feature) -> str | None:
    """Which model has these features; None: no single one has them."""
    names = {MODEL_OF[feature.name] for feature in features if feature.name in MODEL_OF}
    if len(names) > 1:
        return MODELS_OF_BOTH.get(frozenset(names))
    wanted = (MODEL_FOR[feature.name] for feature in features if feature.name in MODEL_FOR)
    return next(iter(names), next(wanted, "experts"))


def expected(line: list[str]) -> str | None:
    """What the table says of this command line, without the server's checks."""
    parsed = parser().parse(line)
    parts = {name: config_from_args(part, parsed) for name, part in get_type_hints(ServerConfig).items()}
    config: Any = SimpleNamespace(**parts, is_other_node=False)
    by_flags = first_conflict(Setup(config))
    if by_flags is not None or config.launch.null_worker:
        return by_flags
    return first_conflict(Setup(config, model_facts(config.worker, *read_model(config.worker.model_dir))))


parser = functools.cache(server_parser)


@functools.cache
def read_model(model_dir: str) -> tuple[ModelConfig, PoolingConfig | None]:
    source = resolve(model_dir, needs_weights=False)
    return read_served_config(source, WorkerConfig()), pooling_of(source)


def refusal(line: list[str]) -> str | None:
    try:
        check(parse_server(line))
    except LightserveError as error:
        return str(error)
    return None


# features that combine with all others: no row has them
FREE = [
    Feature(name, lambda setup: "")
    for name in ("more_than_two_ranks", "enable_rl", "latent_attention", "profile_dir", "states", "windowed_pool")
]
SERVER_FEATURES = [*(feature for feature in FEATURES if feature is not OFFLINE), *FREE]


@pytest.mark.parametrize("feature", SERVER_FEATURES, ids=lambda feature: feature.name)
def test_every_pair_starts_or_is_refused_with_the_line_of_the_table(
    feature: Feature, folder: Path, examples: dict[str, Flags]
) -> None:
    for other in SERVER_FEATURES[SERVER_FEATURES.index(feature) :]:
        model = model_of(feature, other)
        if model is not None:
            line = combined(folder, examples.get(feature.name, {}), examples.get(other.name, {}), model)

            assert refusal(line) == expected(line), line


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if OFFLINE not in row],
    ids=lambda row: f"{row.first.name}-{row.second.name}",
)
def test_every_row_of_the_table_refuses_its_pair(row: Conflict, folder: Path, examples: dict[str, Flags]) -> None:
    model = model_of(row.first, row.second)
    assert model is not None

    line = combined(folder, examples.get(row.first.name, {}), examples.get(row.second.name, {}), model)

    found = refusal(line) or ""
    assert found.endswith(f": {row.reason}; {row.remedy}")
    assert " cannot be used with " in found


def test_no_pair_is_twice_in_the_table() -> None:
    pairs = [frozenset((row.first.name, row.second.name)) for row in TABLE]

    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 for pair in pairs)


@pytest.mark.parametrize("model", sorted(MODELS.keys() - MODELS_OF_BOTH.values()))
def test_a_server_without_flags_has_no_conflict(folder: Path, model: str) -> None:
    assert refusal(["--port=0", f"--model_dir={folder / model}"]) is None


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"visual_dp": 2}, "--visual_dp 2 cannot be used with LLM(): it encodes images in its own process; start a"),
        (
            {"max_windowed_token_num": 9},
            "--max_windowed_token_num 9 cannot be used with a qwen3_moe model: none of its",
        ),
    ],
)
def test_an_llm_reads_the_table_before_it_loads_weights(folder: Path, options: dict[str, Any], found: str) -> None:
    with pytest.raises(OptionError) as error:
        LLM(str(folder / "experts"), **options)  # its file of weights has none

    assert str(error.value).startswith(found)


def test_weights_of_a_folder_need_trainers(folder: Path) -> None:
    with pytest.raises(OptionError, match="--weights_dir needs --enable_rl"):
        parse_server([f"--weights_dir={folder}"])
