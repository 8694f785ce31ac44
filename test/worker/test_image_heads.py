"""Draft heads of models that read images: they read the embeddings of images, and never change a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightserve.offline.llm import LLM
from test.vision_model import RECURRENT, TEXT, oracle_inputs, picture, save_vision_model
from test.worker.dflash import save_drafter
from test.worker.heads import AUX_LAYERS, HIDDEN, Recorder, TorchHead, save_head
from test.worker.test_mtp_formats import Mtp
from test.worker.test_ngram import GREEDY, SEEDED, assert_same, num_accepted, params_of, without_costs

VOCAB, DRAFTED_IDS, NUM_DRAFTS = TEXT["vocab_size"], [5, 9, 12, 40], 3
LIKELY = {"allowed_token_ids": tuple(DRAFTED_IDS), "ignore_eos": True}
FREE = {"ignore_eos": True}
IMAGES = [picture(84, 112, 1), picture(150, 60, 2)]
Message = list[dict[str, Any]]


def make(folder: str, config: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"device": "cpu", "max_total_token_num": 2000, "running_max_req_size": 16, **options}
    speculation: dict[str, Any] = (
        {} if config is None else {"speculative_config": {"num_speculative_tokens": NUM_DRAFTS, **config}}
    )
    llm = LLM(folder, data_type="float32", embed_cache_gb=0.01, **speculation, **options)
    if speculation:
        without_costs(llm)
    return llm


def chat(*parts: Any) -> Message:
    shown = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": shown}]


CHATS = [
    chat(IMAGES[0], "w40 w41"),
    chat("w7 w8", IMAGES[1], "w9", IMAGES[0], "w5 w9 w5 w9"),
    chat(IMAGES[0], "w40 w42"),  # the image is cached
    chat("w5 w9 w12"),
]


def eagle3(folder: Path) -> tuple[str, dict[str, Any]]:
    model, _ = save_vision_model(folder / "model")
    return model, {"method": "eagle3", "model": save_head(folder / "head", VOCAB, HIDDEN, DRAFTED_IDS)}


def dflash(folder: Path) -> tuple[str, dict[str, Any]]:
    model, _ = save_vision_model(folder / "model", "qwen3_vl")
    drafter = save_drafter(folder / "drafter", VOCAB, HIDDEN, DRAFTED_IDS)
    return model, {"method": "dflash", "model": drafter}


def mtp(folder: Path) -> tuple[str, dict[str, Any]]:
    model, _ = save_vision_model(folder / "model", "qwen3_5")
    file = Path(model) / "model.safetensors"
    save_file({**load_file(file), **Mtp("qwen3_5_text", **RECURRENT).tensors()}, file, {"format": "pt"})
    return model, {"method": "mtp"}


def draft_model(folder: Path) -> tuple[str, dict[str, Any]]:
    """The same layers without an encoder, as Qwen2.5 is beside Qwen2.5-VL."""
    model, _ = save_vision_model(folder / "model")
    text = folder / "text"
    shutil.copytree(model, text)
    tensors = load_file(text / "model.safetensors")
    tensors = {name.replace("model.language_model.", "model."): one for name, one in tensors.items()}
    of_text = {name: one for name, one in tensors.items() if not name.startswith(("visual.", "model.visual."))}
    save_file(of_text, text / "model.safetensors", {"format": "pt"})
    config = AutoConfig.for_model("qwen2", **{**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(text)
    return model, {"method": "draft_model", "model": str(text)}


def draft_model_of_images(folder: Path) -> tuple[str, dict[str, Any]]:
    """One that could read images too. Its encoder is not loaded."""
    model, _ = save_vision_model(folder / "model")
    return model, {"method": "draft_model", "model": model}


OF_IMAGES = pytest.param(draft_model_of_images, FREE, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("save", "rules"),
    [(eagle3, LIKELY), (dflash, LIKELY), (mtp, LIKELY), (draft_model, FREE), OF_IMAGES],
)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"temperature": 1.0}], ids=["greedy", "seeded"])
def test_the_text_after_images_is_that_without_drafts(
    tmp_path: Path,
    save: Callable[[Path], tuple[str, dict[str, Any]]],
    rules: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    folder, config = save(tmp_path)
    params = params_of(sampling, rules, {"max_new_tokens": 20})
    with make(folder, None) as plain, make(folder, config, batch_max_tokens=16) as drafting:
        expected = plain.chat(CHATS, params)

        drafted = [drafting.chat(CHATS, params) for _ in range(2)]

    for generations in drafted:
        assert_same(generations, expected)
        assert num_accepted(generations) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("save", [eagle3, dflash])
def test_heads_draft_behind_captured_steps_with_images(
    tmp_path: Path, save: Callable[[Path], tuple[str, dict[str, Any]]]
) -> None:
    folder, config = save(tmp_path)
    params = params_of(GREEDY, LIKELY, {"max_new_tokens": 20})
    options: dict[str, Any] = {"device": "cuda", "deterministic": True}
    with make(folder, None, **options) as plain, make(folder, config, **options) as drafting:
        expected = plain.chat(CHATS, params)

        drafted = [drafting.chat(CHATS, params) for _ in range(2)]

    for generations in drafted:
        assert_same(generations, expected)
        assert all(one.drafts is not None for one in generations)


def expected_logits(model: Any, head: TorchHead, prompt: list[int], out: list[int], drafts: list[int]) -> list[Tensor]:
    """Of the drafts after ``out``, whose last token is not computed yet: by definition, without a cache.

    ``prompt`` has one token for each image.
    """
    states: dict[int, Tensor] = {}
    text, positions = model.model.language_model, []
    hooks = [
        text.register_forward_pre_hook(lambda *call: positions.append(call[2]["position_ids"]), with_kwargs=True),
        text.layers[0].register_forward_pre_hook(lambda _, args: states.update({0: args[0][0]})),
        *(
            layer.register_forward_hook(lambda *call, count=count: states.update({count: call[2].view(-1, HIDDEN)}))
            for count, layer in enumerate(text.layers, 1)
        ),
    ]
    with torch.no_grad():
        model(**oracle_inputs([*prompt, *out[:-1]], IMAGES[:1], "qwen2_5_vl"))
        for hook in hooks:
            hook.remove()
        hidden = head.fc(torch.cat([states[count] for count in AUX_LAYERS], dim=-1))
        places = positions[0][-3, 0]
        embedded, logits = torch.cat((states[0][1:], head.embedding[out[-1:]])), []
        for draft in drafts:
            summed = head.embedded_out(hidden, embedded, places)
            logits.append(head.logits(summed[-1:])[0])
            hidden = torch.cat((hidden, head.recycled(summed[-1:])))
            embedded = torch.cat((embedded, head.embedding[[draft]]))
            places = torch.cat((places, places[-1:] + 1))
    return logits


@pytest.mark.parametrize("chunk", [9, 100])
def test_a_head_reads_the_embeddings_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    folder, model = save_vision_model(tmp_path / "model")
    head_folder = save_head(tmp_path / "head", VOCAB, HIDDEN, DRAFTED_IDS)
    tensors = load_file(Path(folder) / "model.safetensors")
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    head = TorchHead(head_folder, embedding)
    with make(folder, {"method": "eagle3", "model": head_folder}, batch_max_tokens=chunk) as llm:
        recorder = Recorder(llm, monkeypatch)
        (generation,) = llm.chat([CHATS[0]], params_of(LIKELY, GREEDY, {"max_new_tokens": 9}))

    out, compared = generation.token_ids, 0
    pads = max(generation.prompt_ids, key=generation.prompt_ids.count)
    first = generation.prompt_ids.index(pads)
    prompt = [token for place, token in enumerate(generation.prompt_ids) if token != pads or place == first]
    for _, position, drafts, logits in recorder.drafted:
        known = position + 2 - len(generation.prompt_ids)
        if 0 < known <= len(out):
            expected = expected_logits(model, head, prompt, out[:known], drafts)
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours[DRAFTED_IDS], theirs, rtol=2e-4, atol=2e-4)
                compared += 1
    assert compared >= NUM_DRAFTS * 2


@torch.no_grad()
@pytest.mark.parametrize("chunk", [9, 100])
def test_a_draft_model_reads_placeholders_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Each at its place in the sequence. It does not see the first token."""
    folder, config = draft_model(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32).eval()
    with make(folder, config, batch_max_tokens=chunk) as llm:
        recorder = Recorder(llm, monkeypatch)
        (generation,) = llm.chat([CHATS[1]], params_of(FREE, GREEDY, {"max_new_tokens": 8}))

    text, compared = [*generation.prompt_ids, *generation.token_ids], 0
    for _, position, drafts, logits in recorder.drafted:
        if len(generation.prompt_ids) < position + 2 <= len(text):
            expected = hf(torch.tensor([[*text[1 : position + 2], *drafts]])).logits[0, position:-1]
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
                compared += 1
    assert compared >= NUM_DRAFTS
