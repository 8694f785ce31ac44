"""GGUF files of embedding models, written as llama.cpp's converter does, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoModel

from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.gguf.header import read_gguf_header
from lightserve.model_files.gguf.tokenizer import tokenizer_from_gguf
from lightserve.model_files.source import pooling_of
from lightserve.offline.llm import LLM
from test.model_files.files import add_to, finish
from test.models.architectures.case import build
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save as save_decoder
from test.pooling.files import SMALL, new_model
from test.pooling.test_parity import hidden_of, pooled

TYPES = {"bert": gguf.MODEL_ARCH.BERT, "nomic-bert": gguf.MODEL_ARCH.NOMIC_BERT}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##ed", "the", "(", ")", ",", "naive", "##s"]
POOLING = {"mean": 1, "cls": 2, "last": 3}
TEXTS = ["the (playing), played plays", "Na\u00efve unknown the", ""]
POSITIONS = "embeddings.position_embeddings.weight"
ENCODERS = [("bert", "bert"), ("bert", "xlm-roberta"), ("nomic-bert", "nomic_bert")]
NOMIC_NAMES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "embeddings.LayerNorm": "emb_ln",
}


def tokenizer_metadata(words: list[str] = WORDS, **changes: Any) -> dict[str, Any]:
    """Of a vocabulary of BERT: ▁ before what begins a word."""
    types = [3 if word.startswith("[") else 1 for word in words]
    tokens = [
        word if kind == 3 else word.removeprefix("##") if word.startswith("##") else f"\u2581{word}"
        for word, kind in zip(words, types, strict=True)
    ]
    ids = {"cls": 2, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    roles = {f"{role}_token_id": token_id for role, token_id in ids.items()}
    return {"model": "bert", "tokens": tokens, "token_type": types, "token_type_count": 2, **roles, **changes}


def save(path: Path, architecture: str, model: Any, **changes: Any) -> Path:
    config = model.config
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": (getattr(config, "rope_parameters", None) or {}).get("rope_theta"),
        **changes,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            add_to(writer, f"{architecture}.{key}", value)
    for key, value in tokenizer_metadata().items():
        add_to(writer, f"tokenizer.ggml.{key}", value)
    names = gguf.get_tensor_name_map(TYPES[architecture], config.num_hidden_layers)
    for name, tensor in hub_tensors(architecture, model).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, tensor.float().contiguous().numpy())
    return finish(writer, path)


def hub_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    """With the names of the hub."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pooler.")}
    if architecture == "bert":
        return {name: _from_first_position(name, tensor, model) for name, tensor in tensors.items()}
    renamed = {}
    for name, tensor in tensors.items():
        for ours, theirs in NOMIC_NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name.replace("layers.", "encoder.layers.", 1)] = tensor
    for layer in range(model.config.num_hidden_layers):
        parts = [renamed.pop(f"encoder.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        renamed[f"encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
    return renamed


def _from_first_position(name: str, tensor: Tensor, model: Any) -> Tensor:
    """XLM-RoBERTa has rows for padding before that of the first token."""
    is_shifted = name == POSITIONS and model.config.model_type == "xlm-roberta"
    return tensor[model.config.pad_token_id + 1 :] if is_shifted else tensor


def oracle_tokenizer() -> Tokenizer:
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return backend


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("architecture", "model_type"), ENCODERS)
def test_an_encoder_embeds_as_in_transformers(architecture: str, model_type: str, pooling: str, tmp_path: Path) -> None:
    fields = {"vocab_size": len(WORDS), "pad_token_id": 0, "type_vocab_size": 1 if model_type == "xlm-roberta" else 2}
    fields |= {"head_dim": SMALL["hidden_size"] // SMALL["num_attention_heads"]} if architecture == "nomic-bert" else {}
    model = new_model(AutoModel, model_type, **fields)
    path = save(tmp_path / "model.gguf", architecture, model, pooling_type=POOLING[pooling])

    llm = LLM(str(path), device="cpu", data_type="float32")
    found = llm.embed(TEXTS)

    for text, vector in zip(TEXTS, found, strict=True):
        ids = [2, *oracle_tokenizer().encode(text).ids, 3]
        assert llm.tokenizer.encode(text) == ids
        expected = pooled(hidden_of(model, ids), pooling)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-4)


def test_a_vocabulary_with_capitals_is_not_lowered(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "bert")
    for key, value in tokenizer_metadata([*WORDS, "The"]).items():
        add_to(writer, f"tokenizer.ggml.{key}", value)
    backend, _ = tokenizer_from_gguf(read_gguf_header(finish(writer, tmp_path / "v.gguf")))

    assert backend.encode("The the THE").ids == [2, len(WORDS), WORDS.index("the"), 1, 3]


def test_a_reranker_is_refused(tmp_path: Path) -> None:
    model = new_model(AutoModel, "bert", vocab_size=len(WORDS), pad_token_id=0)
    path = save(tmp_path / "model.gguf", "bert", model, pooling_type=4)

    with pytest.raises(ModelFilesError, match="rerankers are not read from GGUF files"):
        resolve(str(path)).hf_config()


@pytest.mark.parametrize(("kind", "expected"), [(3, "embed"), (0, None)])
def test_a_decoder_that_was_trained_to_embed_says_so(kind: int, expected: str | None, tmp_path: Path) -> None:
    one = GGUF_CASES["qwen3"]
    path = save_decoder(one, build(one.case), tmp_path / "model.gguf", {"pooling_type": kind})

    pooling = pooling_of(resolve(str(path)))

    assert (pooling.task if pooling else None) == expected
