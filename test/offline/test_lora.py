"""``LLM.generate(lora=)``: a small adapter, trained here, shows in the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.errors import InvalidRequestError
from lightserve.offline.llm import LLM
from test.lora_files import save_adapter
from test.real_model import transformers_smollm2

PROMPT, ANSWER = "The secret word is", " butterfly butterfly butterfly"
STEPS = 12


def train(folder: Path, prompt_ids: list[int], answer_ids: list[int]) -> None:
    """An adapter of the last layers of SmolLM2 that continues the prompt with the answer.

    The model is that of other tests too, so its hooks are removed.
    """
    model = transformers_smollm2()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    matrices: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(("down_proj", "v_proj")) and int(name.split(".")[2]) >= 24:
            generator = torch.Generator().manual_seed(len(matrices))
            a = torch.nn.Parameter(torch.randn(4, module.in_features, generator=generator) * module.in_features**-0.5)
            b = torch.nn.Parameter(torch.zeros(module.out_features, 4))
            matrices[name] = (a, b)
            hooks.append(module.register_forward_hook(lambda _, x, out, a=a, b=b: out + 2.0 * (x[0] @ a.T) @ b.T))
    optimizer = torch.optim.Adam([one for pair in matrices.values() for one in pair], lr=2e-2)
    ids = torch.tensor([prompt_ids + answer_ids])
    labels = torch.tensor([[-100] * len(prompt_ids) + answer_ids])
    for _ in range(STEPS):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.detach()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.detach()
    save_adapter(folder, tensors, r=4, lora_alpha=8, layers_to_transform=list(range(24, 30)))


@pytest.mark.slow
def test_an_adapter_that_was_trained_on_smollm2_shows_in_greedy_text(tmp_path: Path) -> None:
    llm = LLM(max_loras=2, max_total_token_num=2048, quantization="none")
    prompt_ids, answer_ids = llm.tokenizer.encode(PROMPT), llm.tokenizer.encode(ANSWER, add_special_tokens=False)
    train(tmp_path / "trained", prompt_ids, answer_ids)
    assert not any(module._forward_hooks for module in transformers_smollm2().modules())  # other tests use it too
    options: dict[str, Any] = {"max_new_tokens": len(answer_ids), "temperature": 0.0}
    base = llm.generate(PROMPT, **options)[0].text

    mixed = llm.generate([PROMPT] * 3, lora=[None, str(tmp_path / "trained"), None], **options)

    assert [one.text for one in mixed] == [base, ANSWER, base]
    assert base != ANSWER
    with pytest.raises(InvalidRequestError, match=r"cannot be used: .*adapter_config.json: cannot be read"):
        llm.generate(PROMPT, lora=str(tmp_path / "missing"))
    with pytest.raises(InvalidRequestError, match=r"3 prompts but 1 adapters"):
        llm.generate([PROMPT] * 3, lora=["x"])
    assert llm.generate(PROMPT, **options)[0].text == base
