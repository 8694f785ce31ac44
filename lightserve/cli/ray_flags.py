"""The flags that all commands of a Ray cluster have."""

from __future__ import annotations

import argparse


def add_cluster_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--name", default="lightserve", metavar="TEXT", help="of the deployment")
    parser.add_argument(
        *("--ray_address", "--ray-address"),
        default="auto",
        metavar="HOST:PORT",
        help="of the Ray cluster; auto: $RAY_ADDRESS, or the one that runs on this machine",
    )
