"""The configuration of a server: the options of all its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightserve.config.cluster import ClusterConfig
from lightserve.config.combinations import Setup, check_combinations
from lightserve.config.http import HttpConfig
from lightserve.config.launch import LaunchConfig
from lightserve.config.router import RouterConfig
from lightserve.config.worker import WorkerConfig
from lightserve.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    worker: WorkerConfig
    router: RouterConfig
    http: HttpConfig
    launch: LaunchConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        check_combinations(Setup(self))
        self._check_nodes()

    def _check_nodes(self) -> None:
        nodes, ranks = self.cluster.nnodes, self.worker.num_ranks
        if ranks % nodes:
            raise OptionError(
                f"nnodes={nodes}: it does not divide the {ranks} ranks of --tp {self.worker.tp} --pp {self.worker.pp}"
            )

    @property
    def num_cpu_parts(self) -> int:
        """Engines, attention groups and stages that compute at the same time, and share a CPU's cores and RAM."""
        return self.cluster.dp * -(-self.worker.num_groups * self.worker.pp // self.cluster.nnodes)

    @property
    def ranks_per_node(self) -> int:
        """A node has consecutive ranks, so the ranks of a pipeline stage are on one node if they fit."""
        return self.worker.num_ranks // self.cluster.nnodes

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def is_other_node(self) -> bool:
        """Whether this machine has only ranks of a server on another one."""
        return self.cluster.node_rank > 0
