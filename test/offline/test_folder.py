"""The offline LLM on a folder as transformers writes it, on whatever device this machine has."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from lightserve.errors import InvalidRequestError, ServerError
from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from test.models.tiny import build_hf

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 17, 3, 99, 42], [77, 2, 130], [64], list(range(1, 40))]


@pytest.fixture(scope="module")
def hf() -> Any:
    return build_hf("llama-gqa")


@pytest.fixture(scope="module")
def folder(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    hf.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_those_of_transformers(hf: Any, folder: Path, device: str) -> None:
    llm = LLM(str(folder), device=device, data_type="float32", max_total_token_num=512, running_max_req_size=3)

    ours = llm.generate(PROMPTS, GenerationParams.of(max_new_tokens=20, temperature=0, ignore_eos=True))

    for prompt, generation in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = hf.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
        assert generation.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_gives_the_same_tokens_alone_and_among_others(folder: Path, device: str) -> None:
    llm = LLM(str(folder), device=device, data_type="float32", max_total_token_num=512)
    seeded = GenerationParams.of(max_new_tokens=20, temperature=0.8, top_k=40, top_p=0.9, seed=5, ignore_eos=True)
    other = GenerationParams.of(max_new_tokens=20, temperature=1.0, min_p=0.05, repetition_penalty=1.2, ignore_eos=True)

    alone = llm.generate([PROMPTS[0]], seeded)[0].token_ids
    among = llm.generate(PROMPTS, [seeded, other, other, seeded])[0].token_ids

    assert among == alone


@pytest.mark.parametrize("device", DEVICES)
def test_dummy_weights_need_no_file_but_the_config(folder: Path, tmp_path: Path, device: str) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    llm = LLM(str(tmp_path), load_format="dummy", device=device, max_total_token_num=512)

    generation = llm.generate([5, 6, 7], GenerationParams.of(max_new_tokens=8, ignore_eos=True))[0]
    assert len(generation.token_ids) == 8
    assert generation.text == ""
    with pytest.raises(InvalidRequestError, match="no tokenizer; give prompts as token ids"):
        llm.generate("w5 w6 w7")


def test_weights_without_a_tokenizer_complete_token_ids(
    hf: Any, folder: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    llm = LLM(str(tmp_path), device="cpu", data_type="float32", max_total_token_num=512)

    (generation,) = llm.generate(PROMPTS[0], GenerationParams.of(max_new_tokens=20, temperature=0, ignore_eos=True))
    theirs = hf.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert generation.token_ids == theirs[0, len(PROMPTS[0]) :].tolist()
    assert f"{tmp_path} has no tokenizer: prompts must be token ids" in log.text
    for ask in (lambda: llm.generate("w5 w6"), lambda: llm.chat([{"role": "user", "content": "w5"}])):
        with pytest.raises(InvalidRequestError, match="no tokenizer; give prompts as token ids"):
            ask()


def test_rope_scaling_stretches_the_longest_request(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    config["rope_parameters"]["original_max_position_embeddings"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))

    llm = LLM(str(tmp_path), load_format="dummy", device="cpu", max_req_total_len=512)

    assert (
        len(llm.generate([list(range(130)) * 3], GenerationParams.of(max_new_tokens=4, ignore_eos=True))[0].token_ids)
        == 4
    )
    with pytest.raises(ServerError, match="the model supports 512 tokens"):
        LLM(str(tmp_path), load_format="dummy", device="cpu", max_req_total_len=513)


def test_a_model_without_references_is_freed_at_once(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", max_total_token_num=512)
    llm.generate([PROMPTS[0]], GenerationParams.of(max_new_tokens=2))
    kv_buffer = weakref.ref(llm.worker.model.mem_manager.buffers[0])

    del llm  # without waiting for the garbage collector: a GPU's memory is needed for the next model

    assert kv_buffer() is None


def test_a_pool_that_holds_no_whole_request_is_refused_with_the_number_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.common.device.cpu.free_ram", lambda: 100_000)  # the model takes 256 bytes a token

    with pytest.raises(ServerError, match=r"holds 97 tokens of KV, fewer than one request of 128; set .* to 97"):
        LLM(str(folder), device="cpu")

    assert LLM(str(folder), device="cpu", max_req_total_len=97).worker.max_total_token_num == 97


@pytest.mark.gpu
def test_the_kv_pool_of_a_gpu_comes_from_its_free_memory(folder: Path) -> None:
    free, _ = torch.cuda.mem_get_info()

    llm = LLM(str(folder), device="cuda", mem_fraction=0.5, running_max_req_size=8)

    assert llm.worker.max_total_token_num > 8 * llm.worker.max_req_total_len  # the prefix cache uses the rest
    assert torch.cuda.mem_get_info()[0] > free * 0.4


def test_a_call_without_params_uses_the_sampling_parameters_of_the_model(hf: Any, tmp_path: Path) -> None:
    hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "repetition_penalty": 1.3}))
    options: dict[str, Any] = {"device": "cpu", "data_type": "float32", "max_total_token_num": 512}
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm, plain = LLM(str(tmp_path), **options), LLM(str(tmp_path), generation_config="none", **options)

    by_default = llm.generate([PROMPTS[0]], max_new_tokens=20, ignore_eos=True)[0]

    given = GenerationParams.of(max_new_tokens=20, ignore_eos=True, temperature=0, repetition_penalty=1.3)
    assert by_default.token_ids == plain.generate([PROMPTS[0]], given)[0].token_ids
    assert llm.get_default_sampling_params() == GenerationParams.of(temperature=0, repetition_penalty=1.3)
    assert plain.get_default_sampling_params() == GenerationParams()
