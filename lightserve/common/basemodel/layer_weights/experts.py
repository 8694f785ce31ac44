"""Mixtures of experts: how the ranks split the experts, and the feed-forward that they make with a router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.expert_rows import ExpertRows
from lightserve.common.basemodel.layer_weights.ffn import DenseFfnWeight, FfnWeight, dense_ffn_weight
from lightserve.common.basemodel.layer_weights.linears import Block, ReplicatedWeight
from lightserve.common.basemodel.layer_weights.weight import MethodWeight, Weight, WeightContext, WeightGroup
from lightserve.common.basemodel.moe import MoeSpec
from lightserve.common.basemodel.spec import LayerSpec
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.parallel import Parallel
from lightserve.common.quantization import ExpertsMethod, ExpertsSpec, are_alike
from lightserve.errors import ModelFilesError, ServerError

# of a layer: what its experts compute between their linears
GATED_ACTIVATIONS: dict[str, ops.ExpertActivation] = {"silu": ops.GatedSilu(), "gelu_tanh": ops.GATED_GELU_TANH}
PLAIN_ACTIVATIONS: dict[str, ops.ExpertActivation] = {"relu2": ops.Relu2()}
ALIGNED_ROWS = 8  # of a router: cuBLAS is slow if the rows of its result are not multiples of 16 bytes


class ExpertsWeight(MethodWeight):
    """The experts of a layer. Every rank has a part of each, or, with expert parallel, some of them as a whole."""

    method: ExpertsMethod

    def __init__(self, spec: LayerSpec, moe: MoeSpec, context: WeightContext) -> None:
        total = moe.num_experts + moe.num_shared
        experts, units = _split(total, moe.intermediate_size, context.parallel)
        self._first, self._holds_all = experts.start, experts == slice(0, total)
        self.method = context.experts_method(
            ExpertsSpec(
                prefix=f"{spec.prefix}.{moe.names.experts}",
                num_experts=moe.num_experts,
                hidden_size=moe.latent_size or spec.hidden_size,
                width=moe.intermediate_size,
                expert_range=experts,
                units=units,
                layout=moe.layout,
                names=moe.names.expert,
                num_shared=moe.num_shared,
                shared_prefix=f"{spec.prefix}.{moe.names.shared}",
                has_bias=moe.experts_bias,
                adds_bias=units.start == 0,
                activation=moe.activation,
            )
        )
        self._num_own = experts.stop - experts.start

    def partial_forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the sum over experts and ranks."""
        return self.method.forward(x, ids if self._holds_all else self._own_ids(ids), weights)

    def _own_ids(self, ids: Tensor) -> Tensor:
        """The ids among this rank's experts; ``NO_EXPERT`` for those of other ranks."""
        local_ids: Tensor = ids - self._first
        return local_ids.masked_fill((local_ids < 0) | (local_ids >= self._num_own), ops.NO_EXPERT)


class ScoreBiasWeight(Weight):
    """The bias of the experts' scores, in float32 on every rank."""

    def __init__(self, name: str, num_experts: int, context: WeightContext) -> None:
        self._name = name
        self.tensor = torch.empty(num_experts, dtype=torch.float32, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._name, tuple(self.tensor.shape), self.tensor)


class LatentWeight(WeightGroup):
    """The linears before and behind experts that are narrower than the hidden states. Every rank has both."""

    def __init__(self, spec: LayerSpec, moe: MoeSpec, context: WeightContext) -> None:
        at, names, hidden, latent = spec.prefix, moe.names, spec.hidden_size, moe.latent_size
        self.in_proj = ReplicatedWeight([Block(f"{at}.{names.latent_in}", latent)], hidden, context)
        self.out_proj = ReplicatedWeight([Block(f"{at}.{names.latent_out}", hidden)], latent, context)


class MoeFfnWeight(FfnWeight):
    """A router, experts, and perhaps shared experts, which every token uses."""

    has_experts = True

    def __init__(self, spec: LayerSpec, moe: MoeSpec, context: WeightContext) -> None:
        moe = _with_shared_apart(spec, _with_activation(spec, moe), context)
        at, names, hidden = spec.prefix, moe.names, spec.hidden_size
        if spec.names.down_norm is not None:
            raise ModelFilesError(f"{spec.config.model_type}: experts with a norm before down are not supported")
        self._tp = context.tp
        self._route = _route_spec(moe)
        self._is_router_float32, self._scales_input = moe.is_router_float32, moe.scales_input
        self._num_logits = moe.num_experts + moe.gates_an_expert
        self.router = ReplicatedWeight(_router(at, moe), hidden, context, bias=moe.router_bias, is_router=True)
        score_bias = f"{at}.{names.score_bias}"
        self.score_bias = ScoreBiasWeight(score_bias, moe.num_experts, context) if moe.has_score_bias else None
        self.experts = ExpertsWeight(spec, moe, context)
        is_beside = moe.shared_size > 0 and not moe.num_shared
        self.shared = dense_ffn_weight(_shared_spec(spec, moe), context) if is_beside else None
        gate = [Block(f"{at}.{names.shared_gate}", 1)] if moe.has_shared_gate and is_beside else []
        self.shared_gate = ReplicatedWeight(gate, hidden, context, is_router=True) if gate else None
        self.latent = LatentWeight(spec, moe, context) if moe.latent_size else None

    def forward(self, x: Tensor, rows: ExpertRows | None) -> Tensor:
        out = self._routed(x, None) if rows is None else rows.scatter(self._routed(rows.gather(x), rows), len(x))
        if self.shared is not None:
            self._add_shared(out, x, self.shared)
        return self._tp.all_reduce(out)

    def _routed(self, x: Tensor, rows: ExpertRows | None) -> Tensor:
        """What the experts of this rank add."""
        logits = self.router.mm_float32(x) if self._is_router_float32 else self.router.mm(x)
        bias = None if self.score_bias is None else self.score_bias.tensor
        ids, weights = self._choose(logits[:, : self._num_logits], bias, rows)
        if self._scales_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if self.latent is None:
            return self.experts.partial_forward(x, ids, weights)
        computed = self.experts.partial_forward(self.latent.in_proj.mm(x), ids, weights)
        return self.latent.out_proj.mm(computed)  # of each rank's part: it has no bias

    def _choose(self, logits: Tensor, bias: Tensor | None, rows: ExpertRows | None) -> tuple[Tensor, Tensor]:
        """As ``ops.route``."""
        ids, weights = ops.route(logits, self._route, bias, None if rows is None else rows.is_padding)
        if rows is not None and rows.writer is not None:
            rows.writer.write(ids[:, : self._route.top_k])
        return ids, weights

    def _add_shared(self, out: Tensor, x: Tensor, shared: DenseFfnWeight) -> None:
        """What the shared experts compute, without the parts of other ranks."""
        if self.shared_gate is None:
            out += shared.partial_forward(x)
        else:
            ops.add_gated(out, shared.partial_forward(x), self.shared_gate.mm(x))


def _with_activation(spec: LayerSpec, moe: MoeSpec) -> MoeSpec:
    """The layer's activation in its experts, unless the model gives them one of their own."""
    known, kind = (GATED_ACTIVATIONS, "experts") if spec.is_gated else (PLAIN_ACTIVATIONS, "experts without a gate")
    if spec.activation not in known:
        supported = ", ".join(known)
        raise ModelFilesError(f"config.json: {kind} with {spec.activation} are not supported; supported: {supported}")
    if moe.activation != ops.GatedSilu():
        return moe
    return replace(moe, activation=known[spec.activation])


def _route_spec(moe: MoeSpec) -> ops.RouteSpec:
    route = replace(moe.route, num_shared=moe.num_shared, gates_shared=moe.gates_an_expert)
    try:
        route.check(moe.num_experts)
    except ValueError as error:
        raise ModelFilesError(f"config.json: {error}; correct it") from error
    return route


def _split(num_experts: int, width: int, parallel: Parallel) -> tuple[slice, slice]:
    """The experts of this rank, and the units of each that it computes."""
    tp, ep, dp = parallel.tp, parallel.ep, parallel.dp
    if ep.size == 1 and dp.size == 1:
        return slice(0, num_experts), tp.part_of(width)
    num_ranks = dp.size * tp.size
    if ep.size != num_ranks:
        raise ServerError(f"{ep.size} ranks share the experts and {num_ranks} the layers; they must be the same ranks")
    first, end = (rank * num_experts // ep.size for rank in (ep.rank, ep.rank + 1))
    return slice(first, end), slice(0, width)


def _router(at: str, moe: MoeSpec) -> list[Block]:
    """Of the experts, and perhaps the gate of the shared one."""
    router = Block(f"{at}.{moe.names.router}", moe.num_experts)
    if not moe.gates_an_expert:
        return [router]
    padding = -(moe.num_experts + 1) % ALIGNED_ROWS
    return [router, Block(f"{at}.{moe.names.shared_gate}", 1, padding=padding)]


def _with_shared_apart(spec: LayerSpec, moe: MoeSpec, context: WeightContext) -> MoeSpec:
    """Shared experts that are quantised in another way than the others cannot be computed as some of them.

    With a gate, they take adapters if they are apart.
    """
    if not moe.num_shared:
        return moe
    if moe.has_shared_gate and not _can_join_gate(spec, moe, context):
        return replace(moe, has_shared_apart=True)
    routed, shared, linears = (
        f"{spec.prefix}.{moe.names.experts}.0",
        f"{spec.prefix}.{moe.names.shared}",
        moe.names.expert,
    )
    sizes = dict.fromkeys(linears.inputs(moe.activation), (spec.hidden_size,) * 2)
    sizes[linears.down] = (moe.intermediate_size, moe.shared_size)
    return replace(
        moe,
        has_shared_apart=not all(
            are_alike(spec.config.quantization, [(f"{routed}.{name}", routed_size), (f"{shared}.{name}", shared_size)])
            for name, (routed_size, shared_size) in sizes.items()
        ),
    )


def _can_join_gate(spec: LayerSpec, moe: MoeSpec, context: WeightContext) -> bool:
    linears = [(f"{spec.prefix}.{name}", spec.hidden_size) for name in (moe.names.router, moe.names.shared_gate)]
    return context.lora is None and are_alike(spec.config.quantization, linears)


def _shared_spec(spec: LayerSpec, moe: MoeSpec) -> LayerSpec:
    """The shared experts as a feed-forward of their own."""
    prefix, expert = moe.names.shared, moe.names.shared_expert or moe.names.expert
    names = replace(
        spec.names,
        gate=f"{prefix}.{expert.gate}",
        up=f"{prefix}.{expert.up}",
        gate_up=f"{prefix}.{moe.names.shared_gate_up}" if moe.names.shared_gate_up else None,
        down=f"{prefix}.{expert.down}",
    )
    return replace(spec, names=names, intermediate_size=moe.shared_size, moe=None)
