"""Which weights an engine serves: their version, where they came from, and what keeps them from being used."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from lightserve.messages.rl import WeightsState
from lightserve.router.req import Req

SALT, SALT_END = "weights ", "\n"


@dataclass
class ServedWeights:
    version: str = "default"
    generation: int = 0  # how often they were replaced
    source: str = ""
    problem: str = ""  # why no text can be generated
    salt: str = field(default="", init=False)  # of the cached prefixes that were computed with them

    def replaced(self, source: str, version: str | None) -> None:
        """All weights are new. Prefixes of before are not found any more, here and in tiers of other processes."""
        self.generation += 1
        self.source, self.problem = source, ""
        self.version = version if version is not None else self.version
        self.salt = f"{SALT}{secrets.token_hex(8)}{SALT_END}"

    def rename(self, req: Req) -> None:
        """The KV of a request will be computed with these weights: it has none now."""
        rest = req.salt.partition(SALT_END)[2] if req.salt.startswith(SALT) else req.salt
        req.salt = self.salt + rest
        req.kv_keys, req.block_hashes = [], req.block_hashes[:0]

    def state(self) -> WeightsState:
        return WeightsState(self.version, self.generation, self.source, self.problem)
