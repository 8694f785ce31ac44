"""The id of an NCCL communicator, as a trainer stores it: a pickle of a ctypes struct of 128 bytes.

A pickle may run any code, so this one is never loaded: its instructions are listed, and the bytes are among them.
"""

from __future__ import annotations

from pickletools import genops

from lightserve.errors import InvalidRequestError

UNIQUE_ID_BYTES = 128
UNIQUE_ID_KEY = "broadcast_from/0/0"  # of the first object that rank 0 broadcasts to the others
MAX_STORED_BYTES = 4096
STRUCT_NAMES = {"_ctypes", "_unpickle", "ncclUniqueId"}  # the struct's class, and what makes it of a state


def read_unique_id(stored: bytes) -> bytes:
    """The 128 bytes. Raises InvalidRequestError for anything else."""
    try:
        if len(stored) > MAX_STORED_BYTES:
            raise ValueError(f"it has {len(stored)} bytes, the limit is {MAX_STORED_BYTES}")
        arguments = [argument for _, argument, _ in genops(stored)]
    except Exception as error:  # damaged bytes raise almost any of them
        raise _wrong(str(error)) from error
    names = {word for argument in arguments if isinstance(argument, str) for word in argument.split()}
    contents = [argument for argument in arguments if isinstance(argument, bytes)]
    if not names >= STRUCT_NAMES or len(contents) != 1:
        raise _wrong("it is no ncclUniqueId")
    if len(contents[0]) != UNIQUE_ID_BYTES:
        raise _wrong(f"it has {len(contents[0])} bytes instead of {UNIQUE_ID_BYTES}")
    return contents[0]


def _wrong(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the trainer's store has no NCCL unique id under {UNIQUE_ID_KEY}: {reason}")
