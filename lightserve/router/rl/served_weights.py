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
    model_problem: str = ""  # why no text can be generated with the weights of the model
    draft_source: str = ""  # of the weights of what drafts, as ``source``
    half_drafts: str = ""  # why what drafts has weights that are partly new
    draft_problem: str = ""  # why what drafts has older weights than the last update gave it; texts are right
    salt: str = field(default="", init=False)  # of the cached prefixes that were computed with them

    @property
    def problem(self) -> str:
        """Why no text can be generated."""
        return self.model_problem or self.half_drafts

    def replaced(self, source: str, version: str | None) -> None:
        """All weights are new. Prefixes of before are not found any more, here and in tiers of other processes."""
        self.generation += 1
        self.source, self.model_problem = source, ""
        self.version = version if version is not None else self.version
        self.salt = f"{SALT}{secrets.token_hex(8)}{SALT_END}"

    def drafts_replaced(self, source: str) -> None:
        self.draft_source, self.half_drafts, self.draft_problem = source, "", ""

    def drafts_lost(self, problem: str) -> None:
        """What drafts has the weights that it was started with."""
        self.draft_source, self.half_drafts, self.draft_problem = "", "", problem

    def rename(self, req: Req) -> None:
        """The KV of a request will be computed with these weights: it has none now."""
        rest = req.salt.partition(SALT_END)[2] if req.salt.startswith(SALT) else req.salt
        req.salt = self.salt + rest
        req.kv_keys, req.block_hashes = [], req.block_hashes[:0]

    def state(self) -> WeightsState:
        return WeightsState(
            self.version,
            self.generation,
            self.source,
            self.problem,
            draft_source=self.draft_source,
            draft_problem=self.draft_problem,
        )
