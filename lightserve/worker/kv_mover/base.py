"""What carries blocks of KV between workers of different engines.

``sockets.py`` is the mover for TCP and unix sockets. One for RDMA (NIXL, Mooncake) would register the memory of the
blocks and write to it directly: it is a class with these methods, which ``make_kv_split`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Frame(NamedTuple):
    """Some blocks of a ticket, which are sent at once."""

    ticket: int
    first: int  # number of the first block among those of the ticket
    num_blocks: int


class Outgoing(NamedTuple):
    """A frame with the memory of its blocks."""

    frame: Frame
    blocks: Sequence[memoryview]
    wait: Callable[[], None]  # until the blocks have their content
    done: Callable[[], None]  # the memory may be used again; called once, whether the frame was sent or not


class Incoming(NamedTuple):
    """Memory for the blocks of a frame that comes."""

    blocks: Sequence[memoryview]
    end: Callable[[bool], None]  # called once; True: the blocks have their content


class KvSink(Protocol):
    """Takes what a mover receives. Called by several threads."""

    def begin(self, frame: Frame) -> Incoming | None:
        """None: nobody waits for this frame, so it is dropped."""


class KvMover(Protocol):
    def listen(self, address: str, sink: KvSink) -> None:
        """Receive frames there from now on, in threads of its own."""

    def push(self, address: str, outgoing: Outgoing) -> None:
        """Send a frame. Never blocks. A frame that cannot be sent is lost: who waits for it has a deadline."""

    def close(self) -> None: ...
