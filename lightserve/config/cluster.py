"""Options of several engines behind one port, and of engines on several machines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from lightserve.config.addresses import MAX_ENGINES, check_address, check_addresses, check_kv_address
from lightserve.config.option import FlagGroup, check_options, option
from lightserve.errors import OptionError

Role = Literal["normal", "prefill", "decode", "both"]
KvTransport = Literal["sockets", "nixl"]
ROLES = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Options of several engines behind one port."""

    dp: int = option(
        1,
        "number of engines, each with the whole model on devices of its own",
        "data_parallel_size",
        "dp_size",
        group=FlagGroup.COMMON,
        at_least=1,
        at_most=MAX_ENGINES,
    )
    cluster_policy: str = option(
        "prefix",
        "which engine gets a request, with --dp or --engines",
        "dp_policy",
        group=FlagGroup.PARALLEL,
        choices_from="lightserve.cluster.routing:POLICIES",
    )
    engines: list[str] = option(
        [],
        "addresses of engines on other machines that compute for this server, tcp://HOST:PORT, separated by commas; "
        "needs --cluster_keys, but no device and no weights",
        group=FlagGroup.PARALLEL,
    )
    engines_file: str | None = option(
        None,
        "instead of --engines: file with one address per line, which is read again when it changes; an engine whose "
        "line is removed finishes its requests and gets no new ones",
        group=FlagGroup.PARALLEL,
    )
    listen: str | None = option(
        None,
        "be an engine without HTTP: the address where servers with --engines connect, such as tcp://10.0.0.2:9000; "
        "needs --cluster_keys",
        group=FlagGroup.PARALLEL,
    )
    cluster_keys: str | None = option(
        None,
        "folder with the keys of engines, gateways and nodes; `lightserve cluster keygen DIR` makes them",
        group=FlagGroup.PARALLEL,
    )
    roles: list[str] = option(
        [],
        "with --dp: what each engine is for, such as prefill,decode,decode; a prefill engine computes prompts and "
        "sends their KV to decode engines, which generate; both does that and generates too",
        group=FlagGroup.PARALLEL,
    )
    role: Role = option(
        "normal",
        "with --listen: what this engine is for, as in --roles; normal: it neither sends nor receives KV",
        "run_mode",
        group=FlagGroup.PARALLEL,
    )
    kv_listen: str | None = option(
        None,
        "with --role decode: the address where prefill engines send KV, tcp://HOST:PORT or unix:///PATH; further "
        "ranks listen on the ports after it; default: the port after that of --listen; each node has its own",
        group=FlagGroup.PARALLEL,
    )
    cluster_tls: bool = option(
        False,
        "with --role: encrypt the KV that engines send each other; all of them need the same kv.pem in --cluster_keys",
        group=FlagGroup.PARALLEL,
    )
    kv_transport: KvTransport = option(
        "sockets",
        "how KV gets from engine to engine: through sockets, or read by NIXL (package nixl), with RDMA where there is "
        "some; the same on all engines",
        "disaggregation_transfer_backend",
        group=FlagGroup.PARALLEL,
    )
    min_remote_prefill_tokens: int = option(
        256,
        "a decode engine computes a prompt itself if fewer of its tokens are missing there",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )
    nnodes: int = option(
        1,
        "number of machines that share the engines of --dp, or the ranks of --tp and --pp; start the server on each of "
        "them with the same flags and its own --node_rank; needs --master_addr and --cluster_keys",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )
    node_rank: int = option(
        0,
        "which of --nnodes this machine is; 0 has HTTP and the router, the others only ranks",
        group=FlagGroup.PARALLEL,
    )
    master_addr: str | None = option(
        None,
        "address of node 0, which the other nodes connect to; the ranks use its network",
        "nccl_host",
        group=FlagGroup.PARALLEL,
    )
    master_port: int = option(28765, "port of node 0 for the other nodes", "nccl_port", group=FlagGroup.PARALLEL)
    node_timeout: float = option(
        600.0,
        "seconds that nodes wait for each other, at the start and after a fault",
        group=FlagGroup.PARALLEL,
        at_least=1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_nodes()
        self._check_remote()
        self._check_roles()

    def _check_roles(self) -> None:
        roles = self.engine_roles
        if self.kv_listen is not None:
            if self.role != "decode":
                raise OptionError(f"kv_listen={self.kv_listen}: only an engine with --role decode receives KV")
            check_kv_address(self.kv_listen)
        if not roles:
            return
        if unknown := next((role for role in roles if role not in ROLES), None):
            raise OptionError(f"roles: {unknown!r} is none; a role is one of {', '.join(ROLES)}")
        if len(roles) != self.dp:
            raise OptionError(f"roles={','.join(roles)}: {len(roles)} roles for the {self.dp} engines of --dp")
        if missing := missing_role(roles):
            raise OptionError(
                f"roles={','.join(roles)}: no engine is {missing}, so no KV would be sent; leave out --roles"
            )

    @property
    def engine_roles(self) -> list[str]:
        """Of the engines of --dp; empty: normal."""
        return [role.strip() for text in self.roles for role in text.split(",") if role.strip()]

    @property
    def is_disaggregated(self) -> bool:
        """Whether engines of this server have roles."""
        return bool(self.roles) or self.role != "normal"

    def role_of(self, engine: int) -> str:
        """Of an engine of this server, by its number."""
        return self.engine_roles[engine] if self.roles else self.role

    def _check_remote(self) -> None:
        flags = [f"--{name}" for name in ("engines", "engines_file", "listen") if getattr(self, name)]
        if self.cluster_keys is not None and not flags and self.nnodes == 1:
            raise OptionError(
                "cluster_keys: there is no link to another machine; set --engines, --listen or --nnodes too"
            )
        for flag in flags:
            if self.cluster_keys is None:
                raise OptionError(f"{flag} needs --cluster_keys DIR; `lightserve cluster keygen DIR` makes the keys")
        self._check_addresses()

    def _check_addresses(self) -> None:
        addresses = self.engine_addresses
        if self.engines and not addresses:
            raise OptionError("engines: name at least one address, such as tcp://10.0.0.2:9000")
        if self.listen:
            check_address("listen=", self.listen)
        check_addresses("engines", addresses)

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise OptionError(f"node_rank={self.node_rank}: must be between 0 and {self.nnodes - 1} (--nnodes)")
        if self.nnodes == 1:
            return
        if self.master_addr is None:
            raise OptionError(f"nnodes={self.nnodes} needs --master_addr, the address of node 0")
        if self.cluster_keys is None:
            raise OptionError(
                f"nnodes={self.nnodes} needs --cluster_keys DIR; `lightserve cluster keygen DIR` makes the keys"
            )
        if not 0 < self.master_port < 65536:
            raise OptionError(f"master_port={self.master_port}: must be between 1 and 65535")

    @property
    def engine_addresses(self) -> list[str]:
        return [address.strip() for text in self.engines for address in text.split(",") if address.strip()]

    @property
    def num_engines(self) -> int:
        """Engines behind the dispatcher from the start; 1: there is no dispatcher, unless the engine is remote."""
        return 0 if self.engines_file is not None else len(self.engine_addresses) or self.dp

    @property
    def is_gateway(self) -> bool:
        """Whether the engines are on other machines."""
        return bool(self.engines) or self.engines_file is not None

    @property
    def has_dispatcher(self) -> bool:
        return self.dp > 1 or self.is_gateway


def missing_role(roles: Collection[str]) -> str | None:
    """What engines with these roles lack to send each other KV."""
    if "decode" not in roles:
        return "decode"
    return None if {"prefill", "both"} & set(roles) else "prefill or both"
