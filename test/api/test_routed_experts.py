"""Which experts tokens were routed to, as the server returns them, against transformers on a tiny model."""

from __future__ import annotations

import io
import json
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from test.api.server import ServerProcess, running_server
from test.api.test_restart import kill_worker
from test.pooling.files import VOCAB_SIZE, word_tokenizer

pytestmark = pytest.mark.slow

Ids = npt.NDArray[np.integer]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
TOP_K = 3
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
PROMPT = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(40)]
OTHER = [*PROMPT[:30], 4, 5, 6]  # begins as PROMPT does
FLAGS: tuple[str, ...] = (
    "--device",
    "cpu",
    "--data_type",
    "float32",
    "--max_total_token_num",
    "2048",
    "--max_req_total_len",
    "400",
)
FLAGS += ("--enable_rl", "--enable_return_routed_experts")


def qwen3_moe() -> Any:
    """Its first layer has no experts."""
    config = Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=16, num_experts_per_tok=TOP_K, norm_topk_prob=True, mlp_only_layers=[0],
        decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def many_experts() -> Any:
    """More than a byte can name."""
    config = Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=300, num_experts_per_tok=TOP_K, norm_topk_prob=True, mlp_only_layers=[0],
        decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> Any:
    """Experts in groups, and a shared one that every token uses."""
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    shape = SHAPE | {"num_key_value_heads": 4}
    config = DeepseekV3Config(
        **shape, **latent, n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=TOP_K, n_group=4, topk_group=2,
        first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


class Tiny:
    """A model in a folder, and what transformers routes."""

    def __init__(self, folder: Path, make: Any) -> None:
        torch.manual_seed(3)
        self.model = make().float().eval()
        for parameter in self.model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
        self.model.save_pretrained(folder)
        word_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))

    def routed(self, ids: list[int]) -> list[list[set[int]]]:
        """Of each token but the last, for each layer with experts."""
        chosen: list[torch.Tensor] = []

        def record(module: Any, args: Any, out: Any) -> None:
            chosen.append(indices_of(out))

        hooks = [router(layer.mlp).register_forward_hook(record) for layer in self.model.model.layers[1:]]
        with torch.inference_mode():
            self.model(torch.tensor([ids[:-1]]))
        for hook in hooks:
            hook.remove()
        return [[set(of_layer[token].tolist()) for of_layer in chosen] for token in range(len(ids) - 1)]


def router(mlp: Any) -> Any:
    return mlp.gate


def indices_of(out: Any) -> Any:
    """The ids among what a router returns: the only whole numbers."""
    parts = out if isinstance(out, tuple) else (out,)
    for part in parts:
        if not part.is_floating_point():
            return part
    raise AssertionError("the router of transformers returns no ids")


@pytest.fixture(
    scope="module",
    params=[
        (qwen3_moe, ("--tp", "2", "--ep", "2", "--enable_dp_attention", "--speculative_config", DRAFTS)),
        pytest.param((qwen3_moe, ("--tp", "2")), marks=pytest.mark.long),
        pytest.param((many_experts, ("--pp", "3", "--speculative_config", DRAFTS)), marks=pytest.mark.long),
        pytest.param((deepseek_v3, ()), marks=pytest.mark.long),
    ],
    ids=["qwen3_moe in groups, drafts", "qwen3_moe tp 2", "300 experts pp 3, drafts", "deepseek_v3"],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    make, ranks = request.param
    root = tmp_path_factory.mktemp("experts")
    tiny = Tiny(root / "model", make)
    with running_server(root / "log", "--model_dir", str(root / "model"), *FLAGS, *ranks) as server:
        yield server, tiny


def generate(server: ServerProcess, prompt: list[int], tokens: int, **fields: Any) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    status, reply = server.post("/generate", body | fields)
    assert status == 200, reply
    return reply


def decoded(reply: Any) -> Ids:
    """As AReaL and slime read it: [tokens, layers, top_k]."""
    flat = np.frombuffer(b64decode(reply["meta_info"]["routed_experts"]), dtype=np.int32)
    return flat.reshape(-1, SHAPE["num_hidden_layers"], TOP_K)


def assert_routed(rows: Ids, expected: list[list[set[int]]]) -> None:
    assert [[set(of_layer) for of_layer in row] for row in rows.tolist()] == expected


def test_experts_of_prompt_and_output_are_those_of_transformers(served: Any) -> None:
    server, tiny = served

    reply = generate(server, PROMPT, 12)

    rows = decoded(reply)
    assert not rows[:, 0].any()  # the layer without experts
    assert len(rows) == len(PROMPT) + 12 - 1
    assert_routed(rows[:, 1:], tiny.routed(PROMPT + reply["output_ids"]))


def test_tokens_of_a_cached_prefix_have_their_experts(served: Any) -> None:
    server, tiny = served
    generate(server, PROMPT, 2)

    reply = generate(server, OTHER, 5)

    assert reply["meta_info"]["cached_tokens"] >= 30
    assert_routed(decoded(reply)[:, 1:], tiny.routed(OTHER + reply["output_ids"]))
    rest = generate(server, OTHER, 5, routed_experts_start_len=20)
    assert np.array_equal(decoded(rest), decoded(reply)[20:])


def events_of(response: Any) -> Iterator[Any]:
    return (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))


def test_a_request_that_computes_its_tokens_again_returns_the_experts_of_each_once(served: Any) -> None:
    server, tiny = served
    sampling = {"max_new_tokens": 250, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        events = events_of(response)
        first = next(events)

        assert server.post("/pause?mode=keep&clear_cache=true", {})[0] == 200
        assert server.post("/resume", {})[0] == 200

        *_, last = events
    assert "routed_experts" not in first["meta_info"]  # they come at the end
    server.wait_for_log("generation is paused (mode keep): 1 requests stay")
    assert len(last["output_ids"]) == 250
    assert_routed(decoded(last)[:, 1:], tiny.routed(PROMPT + last["output_ids"]))


def test_several_choices_have_the_experts_of_their_tokens(served: Any) -> None:
    server, tiny = served
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True, "n": 2}

    several = generate(server, PROMPT, 6, sampling_params=sampling, return_logprob=True)

    assert several[0]["output_ids"] != several[1]["output_ids"]
    for reply in several:
        assert_routed(decoded(reply)[:, 1:], tiny.routed(PROMPT + reply["output_ids"]))


def test_vllms_endpoint_has_a_file_of_numpy_with_the_layers_that_have_experts(served: Any) -> None:
    server, tiny = served
    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling}

    status, reply = server.post("/inference/v1/generate", body | {"routed_experts_prompt_start": 7})

    assert status == 200, reply
    [choice] = reply["choices"]
    rows = np.load(io.BytesIO(b64decode(choice["routed_experts"])))
    assert rows.dtype == (np.uint8 if experts_of(tiny) <= 256 else np.uint16)
    assert rows.shape == (len(PROMPT) + 4 - 1 - 7, SHAPE["num_hidden_layers"] - 1, TOP_K)
    assert_routed(rows, tiny.routed(PROMPT + choice["token_ids"])[7:])
    _, without = server.post("/inference/v1/generate", body | {"return_routed_experts": False})
    assert "routed_experts" not in without["choices"][0]


def experts_of(tiny: Tiny) -> int:
    config = tiny.model.config
    count: int = getattr(config, "num_experts", None) or config.n_routed_experts
    return count


def test_accepted_drafts_have_their_experts(served: Any) -> None:
    server, tiny = served
    if "spec_decode_num_accepted_tokens_total" not in server.metrics():
        pytest.skip("this server has no drafts")
    before = server.metrics()["spec_decode_num_accepted_tokens_total"]

    replies = [generate(server, PROMPT[:length], 120) for length in (3, 9, 20)]

    assert server.metrics()["spec_decode_num_accepted_tokens_total"] > before
    for length, reply in zip((3, 9, 20), replies, strict=True):
        assert_routed(decoded(reply)[:, 1:], tiny.routed(PROMPT[:length] + reply["output_ids"]))


@pytest.mark.long  # three workers; test_cpu_kv.py has the choices of blocks
def test_kv_of_other_engines_and_of_tiers_comes_with_the_experts_of_its_tokens(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path / "model", qwen3_moe)
    prompts = [[(11 * i + 5 * number) % (VOCAB_SIZE - 3) + 3 for i in range(300)] for number in range(12)]
    roles = ("--dp", "2", "--roles", "prefill,decode", "--min_remote_prefill_tokens", "64")
    tiers = ("--kv_ram_gb", "0.05", "--kv_disk_gb", "0.1", "--kv_disk_dir", str(tmp_path / "kv"))
    with running_server(tmp_path / "log", "--model_dir", str(tmp_path / "model"), *FLAGS, *roles, *tiers) as server:

        def ask_all() -> None:
            for prompt in prompts:
                reply = generate(server, prompt, 3)
                assert_routed(decoded(reply)[:, 1:], tiny.routed(prompt + reply["output_ids"]))

        ask_all()
        assert server.settled_metrics()["kv_transfer_received_tokens_total"] >= 64 * len(prompts)
        for _ in range(20):  # on a loaded machine loads may be late
            if server.settled_metrics()["kv_tier_hits_total/ram"] >= 256:
                break
            ask_all()
        kill_worker(server, "ls-worker-1")
        ask_all()

        metrics = server.settled_metrics()
        assert metrics["kv_tier_hits_total/ram"] >= 256
        assert metrics["kv_transfer_recomputed_tokens_total"] == 0


def test_only_who_asks_gets_them(served: Any) -> None:
    server, _ = served

    reply = generate(server, PROMPT, 3, return_routed_experts=False)

    assert "routed_experts" not in reply["meta_info"]
    with urllib.request.urlopen(f"{server.url}/server_info") as info:
        assert json.load(info)["enable_return_routed_experts"] is True
