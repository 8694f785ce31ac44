"""Several gateways use the same request ids. An engine adds the session, which is the connection to one gateway.

    of a gateway    HTTP process (bits 48 to 62)                        count (bits 0 to 47)
    of an engine    session (bits 48 to 62)    HTTP process (40 to 47)  count (bits 0 to 39)

Sessions are counted, so an id that was used in one is not used again in the next one.
"""

from __future__ import annotations

from lightserve.messages.int_arrays import Int64Array
from lightserve.messages.request import HTTP_PROCESS_BITS, REQ_ID_BITS

COUNT_BITS = REQ_ID_BITS - HTTP_PROCESS_BITS
MAX_SESSIONS = 1 << 15  # then their numbers are used again
_COUNT_MASK = (1 << COUNT_BITS) - 1
_PROCESS_MASK = (1 << HTTP_PROCESS_BITS) - 1


def engine_id(session: int, gateway_id: int) -> int:
    process, count = gateway_id >> REQ_ID_BITS, gateway_id & ((1 << REQ_ID_BITS) - 1)
    if not (0 <= process <= _PROCESS_MASK and count <= _COUNT_MASK):
        raise ValueError(f"request id {gateway_id} is out of range")
    return session << REQ_ID_BITS | process << COUNT_BITS | count


def gateway_id(of_engine: int) -> int:
    return (of_engine >> COUNT_BITS & _PROCESS_MASK) << REQ_ID_BITS | of_engine & _COUNT_MASK


def gateway_ids(of_engine: Int64Array) -> Int64Array:
    return (of_engine >> COUNT_BITS & _PROCESS_MASK) << REQ_ID_BITS | of_engine & _COUNT_MASK


def session_of(of_engine: int) -> int:
    return of_engine >> REQ_ID_BITS
