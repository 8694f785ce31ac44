"""Ops that are faster on a CPU than their definitions. Importing this registers two backends.

"cpu" computes with torch and numpy, "cpu_native" with the C library in ``csrc``, if it was built.
"""

from lightserve.common.cpu_kernel import (
    activation,
    attention,
    batch_invariant,
    experts,
    latent_attention,
    linear,
    mask_logits,
    native,
    norm,
    packed_weight,
    rotary,
    sample,
    top_k_top_p_min_p,
)

__all__ = [
    "activation",
    "attention",
    "batch_invariant",
    "experts",
    "latent_attention",
    "linear",
    "mask_logits",
    "native",
    "norm",
    "packed_weight",
    "rotary",
    "sample",
    "top_k_top_p_min_p",
]
