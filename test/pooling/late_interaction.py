"""Tiny ColBERT models in the files of Stanford and of PyLate, and their definition over transformers' model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import AutoModel

from test.pooling.files import CLS, SEP, SPECIAL, VOCAB_SIZE, new_model

TOKENS = (*SPECIAL, "[MASK]", "[unused0]", "[unused1]", ".", ",")
MASK, QUERY, DOCUMENT, DOT = (TOKENS.index(token) for token in ("[MASK]", "[unused0]", "[unused1]", "."))
SIZE = 20
QUERY_LENGTH = 12


@dataclass(frozen=True)
class ColBert:
    """The definition, as PyLate's and Stanford's code has it."""

    model: Any
    linear: torch.Tensor
    sees_masks: bool = False

    def vectors(self, ids: list[int], num_seen: int | None = None) -> np.ndarray:
        """Only the first ``num_seen`` tokens are seen."""
        mask = torch.arange(len(ids))[None] < (num_seen or len(ids))
        with torch.inference_mode():
            states = self.model(torch.tensor([ids]), attention_mask=mask.long()).last_hidden_state[0]
            vectors: np.ndarray = F.normalize(states @ self.linear.T, dim=-1).numpy()
        return vectors

    def query(self, words: list[int]) -> np.ndarray:
        ids = [CLS, QUERY, *words, SEP]
        expanded = ids + [MASK] * (QUERY_LENGTH - len(ids))
        return self.vectors(expanded, None if self.sees_masks else len(ids))

    def document(self, words: list[int]) -> np.ndarray:
        ids = np.array([CLS, DOCUMENT, *words, SEP])
        vectors: np.ndarray = self.vectors(ids.tolist())[ids != DOT]
        return vectors

    def score(self, query: list[int], document: list[int]) -> float:
        return float((self.query(query) @ self.document(document).T).max(axis=1).sum())


def text_of(words: list[int]) -> str:
    return " ".join("." if word == DOT else f"w{word}" for word in words)


def stanford(folder: Path, sees_masks: bool = False) -> ColBert:
    """As colbert-ir/colbertv2.0: one file with the tensors of both, and artifact.metadata."""
    definition = ColBert(new_model(AutoModel, "bert", type_vocab_size=2), _linear(), sees_masks)
    tensors = {f"bert.{name}": weight.contiguous() for name, weight in definition.model.state_dict().items()}
    save_file(tensors | {"linear.weight": definition.linear}, folder / "model.safetensors")
    config = definition.model.config.to_dict() | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    metadata: dict[str, Any] = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "dim": SIZE,
        "mask_punctuation": True,
    }
    metadata |= {"query_maxlen": QUERY_LENGTH, "doc_maxlen": 60, "attend_to_mask_tokens": sees_masks}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    _save_tokenizer(folder)
    return definition


def pylate(folder: Path, sees_masks: bool = False) -> ColBert:
    """As GTE-ModernColBERT: a dense module behind ModernBERT."""
    fields = {"local_attention": 64, "norm_bias": False}
    definition = ColBert(new_model(AutoModel, "modernbert", **fields), _linear(), sees_masks)
    definition.model.save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Dense").mkdir()
    dense: dict[str, Any] = {"in_features": 48, "out_features": SIZE, "bias": False, "use_residual": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": definition.linear}, folder / "1_Dense" / "model.safetensors")
    settings: dict[str, Any] = {
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[unused0]",
        "document_prefix": "[unused1]",
    }
    settings |= {"query_length": QUERY_LENGTH, "document_length": 60, "do_query_expansion": True}
    settings |= {"attend_to_expansion_tokens": sees_masks, "skiplist_words": ["."], "prompts": {}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    _save_tokenizer(folder)
    return definition


def _linear() -> torch.Tensor:
    return torch.randn(SIZE, 48, generator=torch.Generator().manual_seed(2))


def _save_tokenizer(folder: Path) -> None:
    words = [*TOKENS, *(f"w{i}" for i in range(len(TOKENS), VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([token for token in TOKENS if token.startswith("[") and token != "[UNK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
