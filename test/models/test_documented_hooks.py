"""Every hook of docs/adding_a_model.md runs in a model that overrides it, also where a fused op would replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightserve.common import basemodel as bm
from lightserve.model_files.pooling import PoolingConfig
from lightserve.models.registry import get_model_class
from test.documented_hooks import Hook, documented_hooks, uncalled_hooks
from test.models.architectures.case import SMALL, Case, Tiny, build
from test.models.architectures.cases import CASES
from test.models.session import Session
from test.models.tiny import ONE_RANK, model_args

NOT_RECURRENT = "without recurrent layers"
NOT_DRAFTING = "without drafts of mtp"
NO_HEAD_NORMS = "without rope or without qk_norm=QkNorm.HEAD"
ENCODER = PoolingConfig("embed", "mean", SMALL["hidden_size"], is_causal=False)


class Family(NamedTuple):
    case: Case
    rows: tuple[str, ...] = ()  # of the page's table of hooks that are not called
    pooling: PoolingConfig | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return (NOT_DRAFTING, *self.rows)


FAMILIES = {
    "llama": Family(CASES["llama"], (NOT_RECURRENT, NO_HEAD_NORMS)),
    "qwen3": Family(CASES["qwen3"], (NOT_RECURRENT,)),
    "qwen3_moe": Family(CASES["qwen3_moe"], (NOT_RECURRENT,)),
    "deepseek_v3": Family(CASES["deepseek_v3"], (NOT_RECURRENT, "with latent attention")),
    "qwen3_next": Family(CASES["qwen3_next"]),
    "falcon_h1": Family(CASES["falcon_h1-norm"], ("with a mixer beside attention", NO_HEAD_NORMS)),
    "gemma3_text": Family(CASES["gemma3_text"], (NOT_RECURRENT,)),
    "bloom": Family(CASES["bloom"], (NOT_RECURRENT, NO_HEAD_NORMS)),
    "phi": Family(CASES["phi"], (NOT_RECURRENT, "with is_parallel", NO_HEAD_NORMS)),
    "olmo2": Family(CASES["olmo2"], (NOT_RECURRENT, "without norms before the halves", NO_HEAD_NORMS)),
    "bert": Family(
        Case("bert", {**SMALL, "num_key_value_heads": None}),
        (NOT_RECURRENT, "with is_post_norm", "that are not causal", "without a head for text"),
        ENCODER,
    ),
}
PARTS = {
    bm.TransformerLayerInferTpl: "transformer_layer_infer_class",
    bm.DecoderLayerInferTpl: "transformer_layer_infer_class",
    bm.PreLayerInferTpl: "pre_layer_infer_class",
    bm.PostLayerInferTpl: "post_layer_infer_class",
    bm.InferStateInfo: "infer_state_class",
    bm.DecoderLayerWeight: "transformer_weight_class",
}
WHEN_BUILT = (bm.LoadableModel, bm.TpPartBaseModel, bm.DecoderLayerWeight)
PREFILL, MIXED, DECODE = {0: [5, 17, 3, 99, 42]}, {0: [7], 1: [64, 2, 130]}, {0: [8], 1: [9]}
ONLY_IN = {"_context_attention_kernel": (True, True, False), "_token_attention_kernel": (False, False, True)}

Change = Callable[[Any, Any, tuple[Any, ...]], Any]  # of self, what the hook returned, and its arguments


@cache
def tiny_of(name: str) -> Tiny:
    return build(FAMILIES[name].case)


def build_overriding(name: str, hook: Hook | None, calls: list[str], change: Change) -> bm.TpPartBaseModel:
    """The model of a family; a subclass of the class with the hook overrides it."""
    tiny = tiny_of(name)
    args = replace(model_args(tiny.config_json, tiny.checkpoint(), ONE_RANK), pooling=FAMILIES[name].pooling)
    model_class = get_model_class(args.config.model_type)
    if hook is None:
        return model_class(args)
    if issubclass(bm.TpPartBaseModel, hook.owner):
        derived = overriding(model_class, hook.name, calls, change)
    else:
        part = PARTS[hook.owner]
        overridden = overriding(getattr(model_class, part), hook.name, calls, change)
        derived = type("Model", (model_class,), {part: overridden})
    model: bm.TpPartBaseModel = derived(args)
    return model


def overriding(base: type, hook: str, calls: list[str], change: Change) -> Any:
    def override(self: Any, *args: Any) -> Any:
        calls.append(hook)
        return change(self, getattr(super(derived, self), hook)(*args), args)

    derived = type("Overriding", (base,), {hook: override})
    return derived


def run(model: bm.TpPartBaseModel) -> Iterator[Tensor]:
    """The results of a prefill, a mixed and a decode step. A model without a KV cache has only prompts."""
    session = Session(model)
    for new_tokens in (PREFILL, MIXED, DECODE) if model.has_kv else (PREFILL,):
        step = session.input_of(new_tokens)
        if not model.has_kv:  # the slot of a token is its row in the step
            step.attn.req_to_token[0, : len(step.input_ids)] = torch.arange(len(step.input_ids))
        hidden = model.hidden_states(step)
        yield model.logits(hidden) if model.spec.has_lm_head else model.final_states(hidden)


def unchanged(self: Any, returned: Any, args: tuple[Any, ...]) -> Any:
    return returned


@cache
def plain_results(name: str) -> list[Tensor]:
    return list(run(build_overriding(name, None, [], unchanged)))


def called_hooks() -> list[Any]:
    """A family, and a hook that its models call."""
    uncalled = uncalled_hooks()
    return [
        pytest.param(name, hook, id=f"{name}-{hook.name}")
        for name, family in FAMILIES.items()
        for hook in documented_hooks()
        if not any(hook.name in uncalled[kind] for kind in family.kinds)
    ]


def test_the_page_lists_the_hooks_that_a_family_does_not_call() -> None:
    uncalled = uncalled_hooks()

    assert uncalled.keys() == {kind for family in FAMILIES.values() for kind in family.kinds}
    for name, family in FAMILIES.items():
        for hook in documented_hooks():
            if any(hook.name in uncalled[kind] for kind in family.kinds):
                calls: list[str] = []
                list(run(build_overriding(name, hook, calls, unchanged)))
                assert calls == [], f"{name} calls {hook.name}"


@pytest.mark.parametrize(("name", "hook"), called_hooks())
def test_an_overridden_hook_runs_in_every_step(name: str, hook: Hook) -> None:
    calls: list[str] = []
    results, counts = [], []

    model = build_overriding(name, hook, calls, unchanged)
    when_built = len(calls)
    for result in run(model):
        results.append(result)
        counts.append(len(calls))

    if hook.owner in WHEN_BUILT:
        assert when_built > 0
    else:
        ran = [after > before for before, after in zip([when_built, *counts], counts, strict=False)]
        assert ran == list(ONLY_IN.get(hook.name, (True, True, True)))[: len(ran)]
    torch.testing.assert_close(results, plain_results(name))


def reverse(self: Any, returned: Any, args: tuple[Any, ...]) -> Any:
    """Reverse the numbers of each row or head that a hook returns, or changes in place."""
    match returned:
        case Tensor():
            return returned.flip(-1)
        case (q, cache_kv):
            return q, cache_kv.flip(-1)
    q = args[0]
    q.copy_(q.flip(-1))
    return None


def start_residual(self: Any, returned: None, args: tuple[Any, ...]) -> None:
    model, input_ids = args
    self.residual = torch.arange(float(model.config.hidden_size)).repeat(len(input_ids), 1)


def sharpen_attention(self: Any, returned: None, args: tuple[Any, ...]) -> None:
    self.attn_options = replace(self.attn_options, scale=2 * self.attn_options.scale)


def double_tensors(self: Any, returned: Iterator[bm.CheckpointTensor], args: tuple[Any, ...]) -> Any:
    return (one._replace(tensor=2 * one.tensor) for one in returned)


CHANGES: dict[str, Change] = {
    hook.name: reverse for hook in documented_hooks() if hook.owner not in (*WHEN_BUILT, bm.InferStateInfo)
}
CHANGES |= {
    "layer_spec": lambda self, spec, args: replace(spec, scale=2 * spec.scale),
    "model_spec": lambda self, spec, args: replace(spec, logit_scale=2 * spec.logit_scale),
    "adapt_checkpoint": double_tensors,
    "init_some_extra_state": start_residual,
    "_init_attention": sharpen_attention,
    "process_weights_after_loading": sharpen_attention,
}
NOT_OF_ENCODERS = ("model_spec", "init_some_extra_state")  # no logits, and no residual


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        one
        for one in called_hooks()
        if one.values[1].name in CHANGES and not (one.values[0] == "bert" and one.values[1].name in NOT_OF_ENCODERS)
    ],
)
def test_what_an_overridden_hook_returns_shows_in_the_result(name: str, hook: Hook) -> None:
    model = build_overriding(name, hook, [], CHANGES[hook.name])

    results = list(run(model))

    assert not torch.equal(torch.cat(results), torch.cat(plain_results(name)))


def run_with_layers(layer_class: Any) -> None:
    model = build_overriding("qwen3", None, [], unchanged)
    model.layers_infer = [layer_class(spec, model.tp) for spec in model.layer_specs]
    list(run(model))


class Raises:
    def _norm_qk(self, *args: Any) -> None:
        raise RuntimeError("the hook ran")


def test_a_hook_that_a_mixin_overrides_runs() -> None:
    with pytest.raises(RuntimeError, match="the hook ran"):
        run_with_layers(type("Mixed", (Raises, bm.DecoderLayerInferTpl), {}))


def test_a_fused_hook_beside_the_override_of_what_it_replaces_runs() -> None:
    class Fused(Raises, bm.DecoderLayerInferTpl[bm.DecoderLayerWeight]):
        pass

    class FusedAgain(Fused):
        def _fused_norm_rotate(self, *args: Any) -> None:
            super()._fused_norm_rotate(*args)

    run_with_layers(FusedAgain)
