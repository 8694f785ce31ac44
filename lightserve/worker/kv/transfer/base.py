"""What carries blocks of KV between workers of different engines.

``sockets.py`` is the transfer backend for TCP and unix sockets. With a ``ReadableMemory`` (``transport.py``) as in
``nixl.py``, the receiver reads the blocks of its frames from the memory of the sender, by RDMA where there is some.
Another transfer backend is a class with these methods, which ``make_kv_transfer`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Frame(NamedTuple):
    """Some blocks of a transfer, which are sent at once."""

    transfer_id: int
    first: int  # number of the first block among those of the transfer that are of this pool
    num_blocks: int
    pool: int = 0  # 0: of all tokens; those of KV groups follow, and then the pools of every cut: see rank_heads.py


class FrameSize(NamedTuple):
    """Of the frames with blocks of one pool."""

    block_bytes: int
    max_blocks: int


class Outgoing(NamedTuple):
    """A frame with the memory of its blocks."""

    frame: Frame
    blocks: Sequence[memoryview]
    wait: Callable[[], None]  # until the blocks have their content
    done: Callable[[bool], None]  # the memory may be used again; called once; True: the frame was sent


class Incoming(NamedTuple):
    """Memory for the blocks of a frame that comes."""

    blocks: Sequence[memoryview]
    end: Callable[[bool], None]  # called once; True: the blocks have their content


class KvSink(Protocol):
    """Takes what a transfer backend receives. Called by several threads."""

    def begin(self, frame: Frame) -> Incoming | None:
        """None: nobody waits for this frame, so it is dropped."""


class KvTransferBackend(Protocol):
    def register(self, chunks: Sequence[Tensor]) -> None:
        """All blocks are in these chunks of host memory. It is called once, before anything else."""

    def listen(self, address: str, sink: KvSink) -> None:
        """Receive frames there from now on, in threads of its own."""

    def push(self, address: str, outgoing: Outgoing) -> None:
        """Send a frame. Never blocks. A frame that cannot be sent is lost: who waits for it has a deadline."""

    def close(self) -> None: ...
