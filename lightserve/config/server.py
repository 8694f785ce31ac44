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
        if self.has_divided_engines and ranks % nodes:
            engines = f", nor --dp {self.cluster.dp}" if self.cluster.dp > 1 else ""
            raise OptionError(
                f"nnodes={nodes}: it does not divide the {ranks} ranks of --tp {self.worker.tp} --pp {self.worker.pp}"
                f"{engines}"
            )

    @property
    def has_divided_engines(self) -> bool:
        """Whether each engine has ranks on all nodes. Otherwise each node has as many whole engines as the others."""
        return self.cluster.dp % self.cluster.nnodes > 0

    @property
    def engines_per_node(self) -> int:
        """Whole ones, or parts."""
        return self.cluster.dp if self.has_divided_engines else self.cluster.dp // self.cluster.nnodes

    @property
    def num_cpu_parts(self) -> int:
        """Engines, attention groups and stages that compute at the same time, and share a CPU's cores and RAM."""
        of_engine = self.worker.num_groups * self.worker.pp
        return self.engines_per_node * (-(-of_engine // self.cluster.nnodes) if self.has_divided_engines else of_engine)

    @property
    def ranks_per_node(self) -> int:
        """Of an engine. A node has consecutive ranks, so those of a pipeline stage are on one node if they fit."""
        return self.worker.num_ranks // (self.cluster.nnodes if self.has_divided_engines else 1)

    def node_of(self, rank: int, engine: int = 0) -> int:
        return rank // self.ranks_per_node if self.has_divided_engines else engine // self.engines_per_node

    @property
    def is_other_node(self) -> bool:
        """Whether this machine has only ranks of a server on another one."""
        return self.cluster.node_rank > 0
