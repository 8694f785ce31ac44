"""A tiny SmolVLM, which splits images into tiles, and what transformers generates with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

WORDS = 131
IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
ROWS_AND_COLUMNS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
ADDED = [IMAGE, FAKE, WHOLE, "\n", "\n\n", *ROWS_AND_COLUMNS]
PLACEHOLDER = WORDS
TILE, TILE_TOKENS = 32, 4
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": WORDS + len(ADDED),
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 2000,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": TILE,
    "patch_size": 8,
}
FILES: dict[str, Any] = {
    "size": {"longest_edge": 3 * TILE},
    "max_image_size": {"longest_edge": TILE},
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.6],
    "resample": 1,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}w1 {% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image> "
    "{% else %}{{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}w2"
)


def save_tiled_model(folder: Path, model_type: str = "smolvlm") -> tuple[str, Any, Tokenizer]:
    """The folder, the model of transformers and its tokenizer. A token is a word; w0 ends the text."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        model_type, text_config=TEXT, vision_config=VISION, image_token_id=PLACEHOLDER, scale_factor=2
    )
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for name, weight in model.state_dict().items():
        weight.normal_(mean="norm" in name, std=0.02 if "embed_tokens" in name else 0.25)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder), model, tokenizer


def processed(images: Sequence[Image.Image], **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The inputs of transformers' model, and the text that stands for each image."""
    processor = SmolVLMImageProcessorPil(**{**FILES, **fields})
    values = processor([list(images)], return_row_col_info=True, return_tensors="pt")
    rows, columns = values.pop("rows")[0], values.pop("cols")[0]
    grids = zip(rows, columns, strict=True)
    texts = [get_image_prompt_string(*grid, TILE_TOKENS, FAKE, IMAGE, WHOLE) for grid in grids]
    return dict(values), texts


def greedy(
    model: Any, tokenizer: Tokenizer, prompt: Sequence[int | Image.Image], count: int
) -> tuple[list[int], list[int]]:
    """The likeliest continuation of a prompt with images, computed from scratch for each token; and the prompt."""
    images = [part for part in prompt if isinstance(part, Image.Image)]
    inputs, texts = processed(images) if images else ({}, [])
    shown = iter(texts)
    words = [f"w{part}" if isinstance(part, int) else next(shown) for part in prompt]
    ids: list[int] = tokenizer.encode(" ".join(words)).ids
    length = len(ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1].argmax()))
    return ids[length:], ids[:length]
