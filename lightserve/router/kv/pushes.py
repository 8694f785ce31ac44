"""KV that this engine sends to others: they want the prompts of some requests computed here."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvTarget
from lightserve.messages.step import KvPush
from lightserve.router.kv.source import Activity, KvTransfers, StepPart
from lightserve.router.observability.stats import RouterMetrics
from lightserve.router.req import Req


@dataclass(slots=True)
class Pushing:
    req: Req
    target: KvTarget
    num_blocks: int  # of its prompt that were sent, or are not needed


class KvPushes(StepPart):
    """A request with ``target`` sends every block of its prompt with the step that computes it."""

    def __init__(self) -> None:
        self.num_pushed = 0  # tokens
        self._pushing: dict[int, Pushing] = {}  # by request

    def __len__(self) -> int:
        return len(self._pushing)

    def on_admitted(self, req: Req) -> None:
        if req.target is not None and req.req_id not in self._pushing:
            self._pushing[req.req_id] = Pushing(req, req.target, req.target.first_block)

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        for pushing in self._pushing.values():
            transfers.pushes += self._next_push(pushing)

    def drop(self, req: Req) -> None:
        self._pushing.pop(req.req_id, None)

    def clear(self) -> None:
        """All requests are dropped."""
        self._pushing.clear()

    def report(self, metrics: RouterMetrics) -> None:
        metrics.values["kv_split_sent_tokens_total"] = self.num_pushed

    def _next_push(self, pushing: Pushing) -> list[KvPush]:
        """The blocks that are planned and not sent yet."""
        req, target, begin = pushing.req, pushing.target, pushing.num_blocks
        end = min(req.planned_len, len(req.prompt_ids)) // BLOCK_TOKENS
        if end <= begin:
            return []
        pushing.num_blocks = end
        slots = req.slots[begin * BLOCK_TOKENS : end * BLOCK_TOKENS].copy()
        self.num_pushed += len(slots)
        return [KvPush(target.ticket, target.addresses, begin - target.first_block, slots)]
