"""In which ways mixtures of experts differ. A layer with a ``MoeSpec`` has experts instead of one feed-forward."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightserve.common.ops import ExpertActivation, GatedSilu, RouteSpec
from lightserve.common.quantization import ExpertNames, ExpertsLayout
from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import EXPERT_COUNT_NAMES, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """The names of a layer's tensors in the checkpoint, without ``.weight`` and ``.bias``."""

    router: str = "mlp.gate"
    score_bias: str = "mlp.gate.e_score_correction_bias"  # the tensor itself
    experts: str = "mlp.experts"
    expert: ExpertNames = field(default_factory=ExpertNames)
    shared: str = "mlp.shared_experts"  # followed by the names of an expert
    shared_expert: ExpertNames | None = None  # those of shared experts, if they are others
    shared_gate_up: str | None = None  # one linear instead of two in the shared experts: all gates, then all ups
    shared_gate: str = "mlp.shared_expert_gate"
    latent_in: str = "mlp.fc1_latent_proj"
    latent_out: str = "mlp.fc2_latent_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The experts of one layer, and how each token chooses among them."""

    num_experts: int
    intermediate_size: int  # of each expert
    route: RouteSpec
    names: MoeNames = field(default_factory=MoeNames)
    layout: ExpertsLayout = ExpertsLayout.EACH
    activation: ExpertActivation = field(default_factory=GatedSilu)
    router_bias: bool = False
    is_router_float32: bool = False  # the model multiplies hidden states and router in float32
    has_score_bias: bool = False  # a bias that counts for the choice of experts, not for their weights
    experts_bias: bool = False
    latent_size: int = 0  # of what the experts read and compute, behind and before a linear; 0: the hidden size
    shared_size: int = 0  # of the shared experts together; 0: there are none
    has_shared_gate: bool = False  # what they compute is multiplied by sigmoid(gate(x))
    scales_input: bool = False  # the weight of the only expert of a token multiplies what the expert reads
    is_beside_ffn: bool = False  # the layer has its feed-forward too, and adds what both return
    has_shared_apart: bool = False  # they have another format or limit than the others, or adapters

    @property
    def num_shared(self) -> int:
        """How many experts of the others' size the shared experts are; 0: they are computed beside the others."""
        differ = self.has_shared_apart or self.names.shared_expert is not None
        is_alike = not (differ or self.latent_size) and self.layout is ExpertsLayout.EACH
        return self.shared_size // self.intermediate_size if is_alike and self._fits() else 0

    @property
    def gates_an_expert(self) -> bool:
        """Whether the router computes the gate of the shared expert, which is one of the experts."""
        return self.has_shared_gate and self.num_shared > 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Sizes that the ranks split."""
        return self.intermediate_size, *([self.shared_size] if self.shared_size else [])

    def num_weights(self, hidden_size: int) -> int:
        return self._weights_of(self.num_experts, hidden_size)

    def active_weights(self, hidden_size: int) -> int:
        """Of the experts of one token."""
        return self._weights_of(self.route.top_k, hidden_size)

    def _weights_of(self, experts: int, hidden_size: int) -> int:
        linears = self.activation.rows_per_unit + 1
        routed = experts * self.intermediate_size * linears * (self.latent_size or hidden_size)
        return routed + (linears * self.shared_size + 2 * self.latent_size) * hidden_size

    def _fits(self) -> bool:
        if not self.has_shared_gate:
            return self.shared_size % self.intermediate_size == 0
        # one expert more costs little, and saves five launches; a wide one is faster as a linear of its own
        return self.shared_size == self.intermediate_size and not self.router_bias


def num_experts_of(config: ModelConfig) -> int:
    return config.count(config.experts_name or EXPERT_COUNT_NAMES[0])


def top_k_of(config: ModelConfig) -> int:
    """How many experts a token chooses."""
    top_k, experts = config.count("num_experts_per_tok"), num_experts_of(config)
    if top_k > experts:
        raise ModelFilesError(
            f"config.json: num_experts_per_tok is {top_k}, but there are {experts} experts; correct it"
        )
    return top_k
