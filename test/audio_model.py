"""A tiny model that hears sounds, and what transformers generates with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

from test.media.audio.sounds import Samples

VOCAB_SIZE = 131
BOS, AUDIO, EOS = (VOCAB_SIZE + number for number in range(3))
SPECIAL = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
SECONDS = 3  # that the model hears at once
RATE = 16_000
FILES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": SECONDS,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE + 5,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4000,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
TOWER: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 128,
    "max_source_positions": SECONDS * 50,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}w1 {% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|> "
    "{% else %}{{ part.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}w2"
)


def save_audio_model(folder: Path) -> tuple[str, Any]:
    """The folder, and the model of transformers. A token is a word; w0 ends the text."""
    torch.manual_seed(7)
    config = Qwen2AudioConfig(text_config=TEXT, audio_config=TOWER, audio_token_index=AUDIO, tie_word_embeddings=False)
    model = Qwen2AudioForConditionalGeneration(config).float().eval()
    for name, weight in model.state_dict().items():
        is_norm = "norm" in name and name.endswith("weight")
        weight.normal_(mean=float(is_norm), std=0.02 if "embed_tokens" in name else 0.2)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder), model


def processed(sounds: Sequence[Samples]) -> dict[str, Any]:
    extractor = WhisperFeatureExtractor(**FILES)
    values = extractor(list(sounds), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    return {"input_features": values["input_features"], "feature_attention_mask": values["attention_mask"]}


def num_tokens(values: dict[str, Any]) -> list[int]:
    """Of each sound."""
    return [((frames - 1) // 2 - 1) // 2 + 1 for frames in values["feature_attention_mask"].sum(-1).tolist()]


def embeddings(model: Any, samples: Samples) -> torch.Tensor:
    """``[tokens, hidden]`` of a sound."""
    values, outputs = processed([samples]), list[torch.Tensor]()
    ids = torch.tensor([[1, *[AUDIO] * num_tokens(values)[0]]])
    hook = model.model.multi_modal_projector.register_forward_hook(lambda *args: outputs.append(args[2]))
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **values)
    hook.remove()
    return outputs[0].flatten(0, -2)[: ids.shape[1] - 1]


def greedy(model: Any, prompt: Sequence[int | Samples], count: int) -> str:
    """The likeliest continuation. A sound stands where it is in the prompt."""
    values = processed([each for each in prompt if not isinstance(each, int)])
    counts = iter(num_tokens(values))
    ids = [
        token_id
        for each in prompt
        for token_id in ([each] if isinstance(each, int) else [BOS, *[AUDIO] * next(counts), EOS])
    ]
    begin = len(ids)
    with torch.inference_mode():
        for _ in range(count):
            tensor = torch.tensor([ids])
            out = model(input_ids=tensor, attention_mask=torch.ones_like(tensor), **values)
            ids.append(int(out.logits[0, -1].argmax()))
    return " ".join(f"w{token_id}" for token_id in ids[begin:] if token_id < VOCAB_SIZE)
