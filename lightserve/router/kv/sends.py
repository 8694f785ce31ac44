"""KV that this engine sends to others: they want the prompts of some requests computed here."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvTarget
from lightserve.messages.step import KvSend
from lightserve.router.kv.group_pools import KvGroupPools
from lightserve.router.kv.source import Activity, KvTransfers, StepPart
from lightserve.router.observability.stats import Figures
from lightserve.router.req import Req


@dataclass(slots=True)
class PendingSend:
    req: Req
    target: KvTarget
    num_blocks: int  # of its prompt that were sent, or are not needed


class KvSends(StepPart):
    """A request with ``target`` sends every block of its prompt with the step that computes it."""

    def __init__(self, groups: KvGroupPools) -> None:
        self._groups = groups
        self.num_sent = 0  # tokens
        self._pending: dict[int, PendingSend] = {}  # by request

    def __len__(self) -> int:
        return len(self._pending)

    def on_admitted(self, req: Req) -> None:
        if req.target is not None and req.req_id not in self._pending:
            self._pending[req.req_id] = PendingSend(req, req.target, req.target.first_block)

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        for pending in self._pending.values():
            transfers.sends += self._next_send(pending)

    def drop(self, req: Req) -> None:
        self._pending.pop(req.req_id, None)

    def clear(self) -> None:
        """All requests are dropped."""
        self._pending.clear()

    def figures(self) -> Figures:
        return {"kv_transfer_sent_tokens_total": self.num_sent}

    def _next_send(self, pending: PendingSend) -> list[KvSend]:
        """The blocks that are planned and not sent yet."""
        req, target, begin = pending.req, pending.target, pending.num_blocks
        end = min(req.planned_len, len(req.prompt_ids)) // BLOCK_TOKENS
        if end <= begin:
            return []
        pending.num_blocks = end
        slots = req.slots[begin * BLOCK_TOKENS : end * BLOCK_TOKENS].copy()
        self.num_sent += len(slots)
        send = KvSend(target.transfer_id, target.addresses, begin - target.first_block, slots)
        return [send, *(self._sends_of_groups(req, target) if end * BLOCK_TOKENS == len(req.prompt_ids) else ())]

    def _sends_of_groups(self, req: Req, target: KvTarget) -> list[KvSend]:
        """What each KV group needs to continue the prompt, all of which is planned."""
        slots = [group.sent_slots(req, len(req.prompt_ids)) for group in self._groups]
        return [
            KvSend(target.transfer_id, target.addresses, 0, of_group, pool=number)
            for number, of_group in enumerate(slots, 1)
        ]
