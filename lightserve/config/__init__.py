"""The server's configuration, frozen. The command line takes its flags, defaults and help from these fields."""

from lightserve.config.addresses import check_addresses
from lightserve.config.cluster import ROLES, ClusterConfig, KvTransport, Role, missing_role
from lightserve.config.http import HttpConfig
from lightserve.config.launch import LaunchConfig
from lightserve.config.router import MAX_DEBUG_REQUESTS, RouterConfig
from lightserve.config.server import ServerConfig
from lightserve.config.worker import KvDtype, WorkerConfig

__all__ = [
    "MAX_DEBUG_REQUESTS",
    "ROLES",
    "ClusterConfig",
    "HttpConfig",
    "KvDtype",
    "KvTransport",
    "LaunchConfig",
    "Role",
    "RouterConfig",
    "ServerConfig",
    "WorkerConfig",
    "check_addresses",
    "missing_role",
]
