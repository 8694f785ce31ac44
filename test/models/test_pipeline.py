"""Pipeline stages give the logits of one rank, bit by bit, and its experts. Each loads only its own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.common import cpu_kernel, ops  # noqa: F401  registers its backend
from lightserve.common.basemodel import CheckpointTensor, LogitRows, TpPartBaseModel
from lightserve.common.basemodel.pipeline import layers_of_stage
from lightserve.common.parallel import Parallel, ParallelSizes, RankGroup, connect_ranks
from lightserve.models.registry import get_model_class, read_model_config
from test.models.architectures.case import MAX_LEN, Case, Tiny, build
from test.models.architectures.cases import CASES
from test.models.architectures.moe import QWEN
from test.models.session import Session
from test.models.tiny import model_args
from test.ranks import run_ranks

FIRST = [(37 * i + i * i // 7) % 131 for i in range(50)]
OTHER = [(11 * i + 3) % 131 for i in range(40)]
QUANTIZED = "llama"  # also computed with weights that are quantised while they are loaded
# tied heads, windows in some layers, layers of other shapes or halves, learned positions, parallel halves, norms behind
# halves, latents, experts beside dense layers, states, heads of two sizes
KINDS = ["gemma2", "cohere2", "gpt2", "falcon-7b", "olmo2", "nemotron-nas", "deepseek_v3", "qwen3_moe-dense", "gpt_oss"]
KINDS += ["qwen3_next", "nemotron_h", "falcon_h1", "kimi_linear-table", "gemma4_text-experts"]
ALL = [name for name, case in CASES.items() if case.divides_among_stages]
# the first layer of three has no experts; more of them than a byte can name
ROUTED = {
    name: Case("qwen3_moe", QWEN | {"num_experts": n, "mlp_only_layers": [0]})
    for name, n in (("few", 10), ("many", 300))
}


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    ops.use_backend("cpu")
    yield
    ops.use_backend(ops.REFERENCE)


def _build(tiny: Tiny, parallel: Parallel, quantization: Any = None, **fields: Any) -> TpPartBaseModel:
    metadata = [one._replace(tensor=one.tensor.to("meta")) for one in tiny.checkpoint()]
    args = model_args(tiny.config_json, tiny.checkpoint(), parallel.tp)
    config = read_model_config(tiny.config_json, None, quantization)
    args = replace(
        args, config=config, parallel=parallel, tensor_metadata=metadata, max_req_total_len=MAX_LEN, **fields
    )
    return get_model_class(config.model_type)(args)


class StageSession(Session):
    """The last stage returns logits, the others no rows. Beside them it keeps the states that a draft head reads."""

    def __init__(self, model: TpPartBaseModel) -> None:
        super().__init__(model)
        self.aux: list[Tensor] = []
        model.keep_states_after((0, model.config.num_layers // 2, 1, model.config.num_layers, 1))

    def step(self, new_tokens: dict[int, list[int]], *, logit_rows: LogitRows | Tensor = LogitRows.LAST) -> Tensor:
        hidden = self.model.hidden_states(self.input_of(new_tokens, logit_rows))
        if self.model.pp.is_last:
            self.aux += [states.flatten().clone() for states in hidden.aux]
            return self.model.logits(hidden)
        self.model.send_to_next_stage(hidden)
        return torch.empty(0)


def _logits(model: TpPartBaseModel) -> Tensor:
    """Of a prompt in chunks beside another, of a request that shares the first chunk, and of decode steps.

    Behind them are the hidden states that a draft head would read.
    """
    session = StageSession(model)
    parts = [session.step({0: FIRST[:20]}, logit_rows=LogitRows.ALL)]
    parts.append(session.step({1: OTHER, 0: FIRST[20:]}, logit_rows=LogitRows.ALL))
    session.share_prefix(0, 2, length=20)
    parts.append(session.step({2: OTHER}, logit_rows=LogitRows.ALL))
    parts += [session.step({0: [5 + i], 1: [6 + i], 2: [7 + i]}) for i in range(3)]
    model.hidden_state_link.wait_sent()
    return torch.cat([*[part.flatten() for part in parts], *session.aux])


def run_rank(rank: int, sizes: ParallelSizes, folder: str) -> None:
    torch.set_num_threads(1)
    ops.use_backend("cpu")
    parallel = connect_ranks(rank, sizes, f"file://{folder}/store", "gloo")
    for path in sorted(Path(folder).glob("*.model")):
        tiny, quantization = Tiny(None, *torch.load(path, weights_only=True)), path.name.partition("@")[2][:-6] or None
        logits = _logits(_build(tiny, parallel, quantization))
        if parallel.pp.is_last:
            torch.save(logits, f"{path}.{parallel.tp.rank}")
    dist.destroy_process_group()


def save_models(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Write models for the ranks, and return their logits on one rank."""
    expected = {}
    for name in names:
        case, _, quantization = name.partition("@")
        tiny = build(CASES[case])
        torch.save((tiny.config_json, tiny.tensors), folder / f"{name}.model")
        expected[name] = _logits(_build(tiny, Parallel(), quantization or None))
    return expected


@pytest.mark.tp
@pytest.mark.slow
@pytest.mark.parametrize("names", [KINDS, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_two_stages_give_the_logits_of_one_rank(names: list[str], tmp_path: Path) -> None:
    """Many architectures in one test, because the processes take longer to start than to compute."""
    expected = save_models(tmp_path, [*names, f"{QUANTIZED}@int8"])

    run_ranks(run_rank, 2, ParallelSizes(pp=2), str(tmp_path))

    found = {name: torch.load(tmp_path / f"{name}.model.0", weights_only=True) for name in expected}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.tp
@pytest.mark.slow
def test_stages_of_two_ranks_give_the_logits_of_one_rank(tmp_path: Path) -> None:
    (expected,) = save_models(tmp_path, [QUANTIZED]).values()

    run_ranks(run_rank, 4, ParallelSizes(tp=2, pp=2), str(tmp_path))

    for rank in range(2):
        found = torch.load(tmp_path / f"{QUANTIZED}.model.{rank}", weights_only=True)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def _routed_experts(tiny: Tiny, parallel: Parallel) -> Tensor:
    """By KV slot, after the steps of ``_logits``."""
    model = _build(tiny, parallel, keeps_routed_experts=True)
    _logits(model)
    assert model.routed_experts is not None
    return model.routed_experts.table


def run_routing_rank(rank: int, sizes: ParallelSizes, folder: str) -> None:
    torch.set_num_threads(1)
    ops.use_backend("cpu")
    parallel = connect_ranks(rank, sizes, f"file://{folder}/store", "gloo")
    for name in ROUTED:
        tiny = Tiny(None, *torch.load(f"{folder}/{name}.model", weights_only=True))
        experts = _routed_experts(tiny, parallel)
        if parallel.pp.is_last:
            torch.save(experts, f"{folder}/{name}.experts")
    dist.destroy_process_group()


@pytest.mark.tp
@pytest.mark.slow
def test_the_last_stage_knows_the_experts_of_all_layers(tmp_path: Path) -> None:
    expected = {}
    for name, case in ROUTED.items():
        tiny = build(case)
        torch.save((tiny.config_json, tiny.tensors), tmp_path / f"{name}.model")
        expected[name] = _routed_experts(tiny, Parallel())

    run_ranks(run_routing_rank, 3, ParallelSizes(pp=3), str(tmp_path))

    for name, of_one_rank in expected.items():
        assert of_one_rank.shape[1] == 2
        assert torch.equal(torch.load(tmp_path / f"{name}.experts", weights_only=True), of_one_rank)


def test_layers_divide_into_contiguous_parts() -> None:
    parts = [layers_of_stage(7, RankGroup(rank, 3)) for rank in range(3)]

    assert parts == [range(3), range(3, 5), range(5, 7)]


def _piece_names(model: TpPartBaseModel) -> set[str]:
    layers = (model.pre_post_weight, *model.layer_weights)
    return {piece.name for layer in layers for piece in layer.pieces()}


def test_a_stage_loads_no_weights_of_other_stages() -> None:
    tiny = build(CASES[QUANTIZED])
    read: list[str] = []

    class Recorded(Tiny):
        def checkpoint(self) -> Iterator[CheckpointTensor]:
            for one in super().checkpoint():
                read.append(one.name)
                yield one

    stages = [_build(Recorded(None, tiny.config_json, tiny.tensors), Parallel(pp=RankGroup(i, 2))) for i in range(2)]
    first, last = map(_piece_names, stages)

    assert first | last == _piece_names(_build(tiny, Parallel()))
    assert not first & last
    assert [[layer.layer_num for layer in stage.layers_infer] for stage in stages] == [[0, 1], [2]]
    assert [stage.kv_layout.num_layers for stage in stages] == [2, 1]


def test_the_last_stage_has_the_embedding_too_if_the_head_is_tied_to_it() -> None:
    tiny = build(CASES["gemma2"])
    first, last = (_piece_names(_build(tiny, Parallel(pp=RankGroup(i, 2)))) for i in range(2))

    assert first & last == {"model.embed_tokens.weight"}
