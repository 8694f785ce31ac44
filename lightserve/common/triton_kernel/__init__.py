"""Triton implementations of the ops, by family. Importing this package registers them as backend "triton"."""

from lightserve.common import ops
from lightserve.common.triton_kernel._gpu import use_profile

__all__ = ["use_profile"]

ops.import_implementations(__name__, __path__)
