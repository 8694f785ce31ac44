"""Small EAGLE-3 heads with random weights, in both formats, and what they must compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.offline.llm import LLM
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.heads.proposer import HeadProposer, RowsOfStep
from lightserve.worker.step_runner import StepOut

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH = 48, 4, 2, 16, 96
EPS = 1e-5
AUX_LAYERS = [0, 1, 2]  # of a model with two layers


def layer_config(vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "max_position_embeddings": 4096,
    }


def head_tensors(layer: str, target_hidden: int, drafted: list[int], seed: int = 0) -> dict[str, Tensor]:
    """``layer``: the prefix of the layer's tensors. ``drafted``: the tokens that the head can draft, in order."""
    random = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int) -> Tensor:
        weight: Tensor = torch.randn(rows, columns, generator=random) * columns**-0.5
        return weight

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    return {
        "fc.weight": linear(HIDDEN, 3 * target_hidden),
        f"{layer}.hidden_norm.weight": norm(HIDDEN),
        f"{layer}.input_layernorm.weight": norm(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": norm(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": linear(HEADS * DIM, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj.weight": linear(KV_HEADS * DIM, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj.weight": linear(KV_HEADS * DIM, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": linear(HIDDEN, HEADS * DIM),
        f"{layer}.mlp.gate_proj.weight": linear(WIDTH, HIDDEN),
        f"{layer}.mlp.up_proj.weight": linear(WIDTH, HIDDEN),
        f"{layer}.mlp.down_proj.weight": linear(HIDDEN, WIDTH),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": linear(len(drafted), HIDDEN) * 2,
        "d2t": torch.tensor(drafted) - torch.arange(len(drafted)),
    }


def save_head(
    folder: Path, vocab_size: int, target_hidden: int, drafted: list[int], speculators: bool = False, **fields: Any
) -> str:
    """``fields``: of config.json besides."""
    tensors = head_tensors("layers.0" if speculators else "midlayer", target_hidden, drafted)
    if fields.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(
            3 * target_hidden, generator=torch.Generator().manual_seed(2)
        )
    if target_hidden != HIDDEN:
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(1))
    config: dict[str, Any] = {"draft_vocab_size": len(drafted), "target_hidden_size": target_hidden}
    config["eagle_aux_hidden_state_layer_ids"] = AUX_LAYERS
    if speculators:
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer_config(vocab_size)}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(vocab_size)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class Recorder:
    """What the head computes after each step: the last position of a request, its drafts and their logits."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted: list[tuple[int, int, list[int], list[Tensor]]] = []  # row, position, drafts, logits of each
        self._logits: list[Tensor] = []
        proposer = llm.worker._drafts._head
        assert proposer is not None
        sample, draft = ops.sample, proposer.draft

        def record_logits(logits: Tensor, *at: Any) -> Tensor:
            self._logits.append(logits)
            return sample(logits, *at)

        def record(out: StepOut, rows: RowsOfStep | None, known_after: Tensor | None, num_drafts: int) -> None:
            self._logits = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ops, "sample", record_logits)
                draft(out, rows, known_after, num_drafts)
            if self._logits:  # some request has sampled
                self._record(proposer, out, rows)

        monkeypatch.setattr(proposer, "draft", record)

    def _record(self, proposer: HeadProposer, out: StepOut, rows: RowsOfStep | None) -> None:
        assert out.for_head is not None
        step = out.for_head.step
        last = step.attn.b_start_loc + step.attn.b_seq_len - step.attn.b_ready_cache_len - 1
        places = last.long() if rows is None else rows.tokens[rows.last]
        for index, row in enumerate(out.columns.reqs["row"].tolist()):
            position = int(step.position_ids[places[index]])
            logits = [of_draft[index] for of_draft in self._logits]
            drafts = proposer._table[row].tolist()
            assert set(drafts[len(logits) :]) <= {NO_DRAFT}
            self.drafted.append((row, position, drafts[: len(logits)], logits))


class TorchHead:
    """The definition: whole texts at once, without a cache."""

    def __init__(self, folder: str, target_embedding: Tensor) -> None:
        self.weights = load_file(Path(folder) / "model.safetensors")
        self.config = json.loads((Path(folder) / "config.json").read_text())
        is_original = "midlayer.hidden_norm.weight" in self.weights
        self.layer = "midlayer" if is_original else "layers.0"
        self.norm_before_residual = self.config.get("norm_before_residual", not is_original)
        self.embedding = self.weights.get("embed_tokens.weight", target_embedding)

    def fc(self, aux: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            aux = _rms(aux, self.weights["input_norm.weight"])
        return F.linear(aux, self.weights["fc.weight"])

    def layer_out(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The sum behind the layer, from hidden states and the tokens after them, at positions from 0 on."""
        return self.embedded_out(hidden, F.embedding(token_ids, self.embedding), torch.arange(len(hidden)))

    def embedded_out(self, hidden: Tensor, embedding: Tensor, positions: Tensor) -> Tensor:
        """``layer_out`` with embeddings of the tokens, or of images."""
        embedded = _rms(embedding, self._of("input_layernorm"))
        normed = _rms(hidden, self._of("hidden_norm"))
        residual = (normed if self.norm_before_residual else hidden) + self._attention(
            torch.cat((embedded, normed), -1), positions
        )
        x = _rms(residual, self._of("post_attention_layernorm"))
        gated = F.silu(F.linear(x, self._of("mlp.gate_proj"))) * F.linear(x, self._of("mlp.up_proj"))
        return residual + F.linear(gated, self._of("mlp.down_proj"))

    def recycled(self, summed: Tensor) -> Tensor:
        """The hidden states for the next draft."""
        return _rms(summed, self.weights["norm.weight"]) if self.config.get("norm_output") else summed

    def logits(self, summed: Tensor) -> Tensor:
        """Of the tokens that it drafts."""
        return F.linear(_rms(summed, self.weights["norm.weight"]), self.weights["lm_head.weight"])

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        count = len(x)
        q, k, v = (
            F.linear(x, self._of(f"self_attn.{name}_proj")).view(count, -1, DIM).transpose(0, 1) for name in "qkv"
        )
        angles = positions[:, None] * 5000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        q, k = _rotated(q, angles), _rotated(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(0, 1).flatten(1), self._of("self_attn.o_proj"))

    def _of(self, name: str) -> Tensor:
        return self.weights[f"{self.layer}.{name}.weight"]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
