"""A tiny model that reads images, and what transformers generates with it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB_SIZE = 131
START, PAD, END, VIDEO = (VOCAB_SIZE + number for number in range(4))
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 5,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4000,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4},
    "bos_token_id": None,
    "eos_token_id": 0,
}
QWEN3 = {**TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RECURRENT = {
    **QWEN3,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": TEXT,
    "qwen2_5_vl": TEXT,
    "qwen3_vl": {**QWEN3, "num_hidden_layers": 4},
    "qwen3_vl_moe": {**QWEN3, **EXPERTS, "num_hidden_layers": 3},
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32},
}
QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 40,
    "num_position_embeddings": 25,
}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {**QWEN3_VISION, "deepstack_visual_indexes": [2, 0]},
    "qwen3_vl_moe": {**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": QWEN3_VISION,
    "qwen3_5_moe": QWEN3_VISION,
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "num_heads": 2,
        "intermediate_size": 40,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
FILES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 40,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN3_FILES = {**FILES, "patch_size": 16, "min_pixels": 64 * 64, "max_pixels": 32 * 32 * 40}
CHAT_TEMPLATE = (
    "{% for message in messages %}w1 {% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|> "
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|> "
    "{% else %}{{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}w2"
)


def preprocessor_of(model_type: str) -> dict[str, Any]:
    return QWEN3_FILES if model_type.startswith("qwen3") else FILES


def video_preprocessor_of(model_type: str) -> dict[str, Any]:
    least, most = (64 * 64, 32 * 32 * 60) if model_type.startswith("qwen3") else (56 * 56, 28 * 28 * 20)
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def save_vision_model(folder: Path, model_type: str = "qwen2_5_vl") -> tuple[str, Any]:
    """The folder, and the model of transformers. A token is a word; w0 ends the text."""
    torch.manual_seed(5)
    ids = {"image_token_id": PAD, "video_token_id": VIDEO, "vision_start_token_id": START}
    ids["vision_end_token_id"] = END
    config = AutoConfig.for_model(
        model_type, text_config=TEXTS[model_type], vision_config=VISION[model_type], tie_word_embeddings=False, **ids
    )
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for name, weight in model.state_dict().items():
        weight.normal_(mean="norm" in name or "ln_q" in name, std=0.02 if "embed_tokens" in name else 0.25)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_of(model_type)))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video_preprocessor_of(model_type)))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder), model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Large squares: the means of noise are the same in all pictures."""
    squares = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def oracle_inputs(prompt: Sequence[int], images: Sequence[Image.Image], model_type: str) -> dict[str, Any]:
    """``prompt`` has PAD once for each image."""
    if not images:
        return {"input_ids": torch.tensor([list(prompt)])}
    values = Qwen2VLImageProcessorPil(**{**preprocessor_of(model_type), "image_processor_type": None})(
        list(images), return_tensors="pt"
    )
    counts = iter((values["image_grid_thw"].prod(-1) // 4).tolist())
    ids = [token_id for each in prompt for token_id in ([each] * next(counts) if each == PAD else [each])]
    tensor = torch.tensor([ids])
    return {"input_ids": tensor, "mm_token_type_ids": (tensor == PAD).int(), **values}


def greedy(model: Any, prompt: Sequence[int], images: Sequence[Image.Image], count: int) -> list[int]:
    """The likeliest continuation, computed from scratch for each token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(**oracle_inputs(ids, images, model.config.model_type)).logits[0, -1].argmax()))
    return ids[len(prompt) :]
