"""The name of a replica's actor tells what it is: a controller that is restarted finds nothing else."""

from __future__ import annotations

from lightserve.ray.messages import NORMAL


def replica_name(role: str, version: int, number: int) -> str:
    of_role = "" if role == NORMAL else f"{role}-"
    return f"replica-{of_role}v{version}.{number}"


def parse_replica_name(name: str) -> tuple[str, int, int]:
    """Role, version and number. The name may begin with that of the deployment."""
    *_, role, numbers = name.rpartition("/")[2].split("-")
    version, number = numbers.removeprefix("v").split(".")
    return NORMAL if role == "replica" else role, int(version), int(number)
