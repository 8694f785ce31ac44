"""LoRA adapters of all engines: an operator's command goes to every engine, and to those that join later.

An engine has the adapters of its --lora_modules and --lora_dir. What operators have loaded and unloaded while it ran is
kept here, because an engine that is replaced begins without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lightserve.cluster.engine import Engine
from lightserve.messages.output import AdapterCard, AdapterReply
from lightserve.messages.request import NOBODY, AdapterQuery, LoadAdapter, UnloadAdapter
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

NO_ENGINE = "no engine runs now; retry later"


class ClusterAdapters:
    def __init__(self, engines: Iterable[Engine]) -> None:
        """``engines``: those that run now, whenever it is iterated."""
        self._engines = engines
        self._commands: dict[str, LoadAdapter | UnloadAdapter] = {}  # the last one that all engines obeyed, by name
        self._unequal: set[str] = set()  # names that were logged

    def restore(self, engine: Engine) -> None:
        """The engine has joined: it gets what operators have changed."""
        for command in self._commands.values():
            engine.link.send(command)

    def joined(self, query: AdapterQuery, replies: Mapping[int, AdapterReply]) -> AdapterReply:
        """The reply to the client, from those of the engines by number."""
        if not replies:
            return AdapterReply(query.query_id, 503, NO_ENGINE)
        failed = {number: reply for number, reply in replies.items() if reply.status != 200}
        if isinstance(query, LoadAdapter):
            self._settle_load(query, replies.keys() - failed.keys(), is_loaded=not failed)
        elif isinstance(query, UnloadAdapter) and len(failed) < len(replies):
            self._commands[query.name] = UnloadAdapter(NOBODY, query.name)
        is_for_all = isinstance(query, LoadAdapter)  # other commands succeed where the adapter is
        if failed and (is_for_all or len(failed) == len(replies)):
            first, reply = min(failed.items())
            shown = reply.message if len(failed) == len(replies) else f"engine {first}: {reply.message}"
            return AdapterReply(query.query_id, reply.status, shown)
        cards = {card.name: card for reply in replies.values() for card in reply.adapters}
        return AdapterReply(query.query_id, adapters=_sorted_as_first(cards, replies))

    def _settle_load(self, query: LoadAdapter, succeeded: Iterable[int], is_loaded: bool) -> None:
        """If an engine could not load it, the others go back to what the name stood for before."""
        if is_loaded:
            self._commands[query.name] = msgspec.structs.replace(
                query, query_id=NOBODY, replaces=True, is_restored=True
            )
            return
        before = self._commands.get(query.name, UnloadAdapter(NOBODY, query.name))
        numbers = set(succeeded)
        for engine in self._engines:
            if engine.number in numbers:
                engine.link.send(before)

    def check_equal(self, engine: Engine) -> None:
        """Requests that move go on with the same text only if a name stands for the same files in all engines."""
        for name, digest in engine.adapter_digests.items():
            for compared in self._engines:
                if compared.adapter_digests.get(name, digest) != digest and name not in self._unequal:
                    self._unequal.add(name)
                    logger.warning(
                        "the adapter %r has other files in engine %d than in engine %d: give all engines the same",
                        name,
                        engine.number,
                        compared.number,
                    )


def _sorted_as_first(cards: dict[str, AdapterCard], replies: Mapping[int, AdapterReply]) -> list[AdapterCard]:
    """In the order of the engines' numbers, each adapter once."""
    names = dict.fromkeys(card.name for number in sorted(replies) for card in replies[number].adapters)
    return [cards[name] for name in names]
