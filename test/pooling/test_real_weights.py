"""all-MiniLM-L6-v2 and nomic-embed-text-v1.5 with their real weights embed as in transformers.

LIGHTSERVE_TEST_MINILM names the folder of all-MiniLM-L6-v2. LIGHTSERVE_TEST_NOMIC names the GGUF file of
nomic-embed-text-v1.5: the test writes it as the folder of the hub, with MiniLM's tokenizer, which has the same
vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from lightserve.model_files.gguf.header import read_gguf_header
from lightserve.offline.llm import LLM
from test.real_model import LONG, PROMPTS

MINILM = os.environ.get("LIGHTSERVE_TEST_MINILM")
NOMIC = os.environ.get("LIGHTSERVE_TEST_NOMIC")
TEXTS = [*PROMPTS[:-1], LONG[:900]]

pytestmark = [pytest.mark.long, pytest.mark.skipif(MINILM is None, reason="LIGHTSERVE_TEST_MINILM is not set")]

NOMIC_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
NOMIC_CONFIG: dict[str, Any] = {  # the fields of the hub
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "vocab_size": 30522,
    "n_embd": 768,
    "n_inner": 3072,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "layer_norm_epsilon": 1e-12,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "use_rms_norm": None,
    "type_vocab_size": 2,
}


def test_minilm_embeds_as_in_transformers() -> None:
    assert MINILM is not None
    assert worst_cosine(MINILM, AutoModel.from_pretrained(MINILM)) >= 0.9999


@pytest.mark.skipif(NOMIC is None, reason="LIGHTSERVE_TEST_NOMIC is not set")
def test_nomic_embeds_as_in_transformers(tmp_path: Path) -> None:
    save_nomic(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, config=_transformers_config())

    assert worst_cosine(str(tmp_path), model) >= 0.9999


def worst_cosine(folder: str, model: Any) -> float:
    llm = LLM(folder, device="cpu")
    found = llm.embed(TEXTS)
    cosines = []
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            states = model.eval()(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0]
        expected = states.mean(0).numpy()
        cosines.append(float(vector @ expected / np.linalg.norm(expected)))
    print(f"{folder}: cosines from {min(cosines):.7f} to {max(cosines):.7f}")
    return min(cosines)


def save_nomic(folder: Path) -> None:
    header = read_gguf_header(Path(NOMIC or ""))
    data = np.memmap(NOMIC or "", mode="r")
    tensors = {}
    for name, entry in header.tensors.items():
        dtype = np.dtype({"F16": np.float16, "F32": np.float32}[entry.encoding.name])
        count = int(np.prod(entry.shape))
        numbers = data[entry.offset : entry.offset + count * dtype.itemsize].view(dtype)
        tensors[_hub_name(name)] = torch.from_numpy(numbers.astype(np.float32).reshape(entry.shape))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(NOMIC_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MINILM or "") / name, folder / name)


def _hub_name(name: str) -> str:
    *layer, own, kind = name.removeprefix("blk.").split(".")
    return ".".join([*(("encoder.layers", *layer) if layer else ()), NOMIC_NAMES[own], kind])


def _transformers_config() -> Any:
    from transformers import NomicBertConfig

    return NomicBertConfig(vocab_size=30522, max_position_embeddings=2048)
