"""Damaged model files are either read or refused with ModelFilesError; nothing else happens."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from lightserve.common.checkpoint.reader import open_checkpoint, tensor_metadata
from lightserve.errors import AdapterError, ModelFilesError
from lightserve.model_files import load_tokenizer, resolve
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.names import MODELS
from lightserve.model_files.folder import find_weight_files
from lightserve.model_files.lora.adapter import LinearSize, check_base, check_rank, read_adapter
from lightserve.model_files.source import FolderSource, stored_as
from test.fuzz.profile import FUZZ
from test.lora_files import write_adapter
from test.model_files.files import VOCAB, save_as_gguf, tiny_model
from test.server.launcher_process import TINY
from test.small_text import EOS, small_backend

TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(VOCAB - 3))]
GGUF_TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [float(-i) for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "general.alignment": 32,
}
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308]))
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="lightserve-fuzz-"))


@functools.cache
def whole_gguf() -> tuple[bytes, int]:
    """A file and the offset of its tensors."""
    raw = save_as_gguf(tiny_model("llama"), scratch() / "whole.gguf", GGUF_TOKENIZER).read_bytes()
    return raw, raw.index(b"token_embd.weight") + 2000


@functools.cache
def whole_safetensors() -> tuple[bytes, int]:
    path = scratch() / "whole.safetensors"
    save_file({f"layer.{i}.weight": torch.ones(4, 4) for i in range(3)}, path)
    raw = path.read_bytes()
    return raw, 8 + struct.unpack("<Q", raw[:8])[0]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, head: int) -> bytes:
    """Change some bytes of the header, and perhaps remove or insert some."""
    raw = bytearray(whole)
    for at in draw(st.lists(st.integers(0, head - 1), max_size=4)):
        raw[at] = draw(st.sampled_from([0, 1, 0x22, 0x7F, 0xFF]) | st.integers(0, 255))
    if draw(st.booleans()):
        at = draw(st.integers(0, head))
        raw[at : at + draw(st.integers(0, 16))] = draw(st.binary(max_size=16))
    return bytes(raw[: draw(st.sampled_from([len(raw), head]) | st.integers(0, len(raw)))])


@FUZZ
@given(data=st.data())
def test_a_damaged_gguf_is_read_or_refused(data: st.DataObject) -> None:
    path = scratch() / "damaged.gguf"
    path.write_bytes(data.draw(damaged(*whole_gguf())))

    with contextlib.suppress(ModelFilesError):
        source = resolve(str(path))
        source.eos_token_ids()
        load_tokenizer(source)
        for stored in (source, stored_as(source, "gguf", packed_by_default=False)):
            ModelConfig.from_hf(stored.hf_config())
            list(tensor_metadata(stored))


@FUZZ
@given(data=st.data())
def test_a_damaged_safetensors_file_is_read_or_refused(data: st.DataObject) -> None:
    folder = scratch() / "safetensors"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(data.draw(damaged(*whole_safetensors())))
    source = FolderSource("damaged", folder)

    with contextlib.suppress(ModelFilesError):
        shapes = {name: tuple(tensor.shape) for name, tensor, _ in tensor_metadata(source)}
        assert {name: tuple(tensor.shape) for name, tensor, _ in open_checkpoint(source)} == shapes


@FUZZ
@given(index=st.fixed_dictionaries({"weight_map": values | st.dictionaries(st.text(), values, max_size=3)}) | values)
def test_any_index_is_read_or_refused(index: Any) -> None:
    folder = scratch() / "index"
    folder.mkdir(exist_ok=True)
    (folder / "a.safetensors").write_bytes(whole_safetensors()[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with contextlib.suppress(ModelFilesError):
        find_weight_files(folder)


ROPE_FIELDS = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")
OTHER_FIELDS = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "quantization_config", "seq_length")
ropes = st.dictionaries(st.sampled_from(ROPE_FIELDS), values | st.sampled_from(["yarn", "llama3", "dynamic"]))


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from([*TINY, *OTHER_FIELDS]), values, max_size=3),
    rope=st.none() | ropes | values,
    wanted=st.none() | st.integers(1, 2**40),
)
def test_any_config_is_read_or_refused(changes: dict[str, Any], rope: Any, wanted: int | None) -> None:
    with contextlib.suppress(ModelFilesError):
        config = ModelConfig.from_hf(TINY | {"rope_scaling": rope} | changes)
        config.check_tp(2)
        assert config.request_len(wanted) >= 1


SPECIAL_FIELDS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "intermediate_sizes",
    "sliding_window",
    "layer_types",
    "rotary",
    "rope_ratio",
    "rope_parameters",
    "multi_query_attention",
    "model_max_length",
    "seq_length",
)
blocks = st.fixed_dictionaries(
    {
        "attention": values | st.dictionaries(st.sampled_from(["no_op", "n_heads_in_group"]), values),
        "ffn": values | st.dictionaries(st.sampled_from(["no_op", "ffn_mult", "intermediate_size"]), values),
    }
)


@FUZZ
@given(
    model_type=st.sampled_from(sorted(MODELS)),
    changes=st.dictionaries(st.sampled_from(SPECIAL_FIELDS), values | st.lists(values, max_size=2), max_size=3),
    block_configs=values | st.lists(blocks, max_size=2),
)
def test_any_fields_of_every_model_are_read_or_refused(
    model_type: str, changes: dict[str, Any], block_configs: Any
) -> None:
    with contextlib.suppress(ModelFilesError):
        config = ModelConfig.from_hf(TINY | {"model_type": model_type, "block_configs": block_configs} | changes)
        config.check_tp(2)


@FUZZ
@given(
    fields=st.dictionaries(
        st.sampled_from(["eos_token", "bos_token", "pad_token", "added_tokens_decoder", "chat_template"]),
        values | st.dictionaries(st.sampled_from(["1", "50", "x"]), values) | st.just(EOS),
    )
)
def test_any_tokenizer_config_is_read_or_refused(fields: dict[str, Any]) -> None:
    folder = scratch() / "tokenizer"
    folder.mkdir(exist_ok=True)
    small_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))

    with contextlib.suppress(ModelFilesError):
        load_tokenizer(FolderSource("any", folder))


@FUZZ
@given(data=st.data())
def test_a_damaged_tokenizer_is_read_or_refused(data: st.DataObject) -> None:
    folder = scratch() / "damaged-tokenizer"
    folder.mkdir(exist_ok=True)
    whole = small_backend().to_str().encode()
    (folder / "tokenizer.json").write_bytes(data.draw(damaged(whole, len(whole))))

    with contextlib.suppress(ModelFilesError):
        load_tokenizer(FolderSource("damaged", folder)).decoder.stream(True).push(3)


@functools.cache
def whole_adapter() -> tuple[bytes, int, dict[str, Any]]:
    folder = write_adapter(scratch() / "adapter", {"model.layers.0.self_attn.q_proj": (8, 8)})
    raw = (folder / "adapter_model.safetensors").read_bytes()
    return raw, 8 + struct.unpack("<Q", raw[:8])[0], json.loads((folder / "adapter_config.json").read_text())


@FUZZ
@given(data=st.data())
def test_a_damaged_adapter_is_read_or_refused(data: st.DataObject) -> None:
    raw, head, config = whole_adapter()
    names = st.sampled_from([*config, "init_lora_weights", "layers_to_transform"]) | st.text(max_size=8)
    changes = data.draw(st.dictionaries(names, values, max_size=2))
    folder = scratch() / "damaged_adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    (folder / "adapter_model.safetensors").write_bytes(data.draw(damaged(raw, head) | st.just(raw)))

    with contextlib.suppress(AdapterError):
        adapter = read_adapter(folder)
        check_rank(adapter, 16)
        check_base(adapter, {"model.layers.0.self_attn.q_proj": LinearSize(8, 8)})
