"""Ops that are faster on a CPU than their definitions, by torch and numpy. Importing this registers backend "cpu"."""

from lightserve.common.cpu_kernel import (
    activation,
    attention,
    batch_invariant,
    experts,
    latent_attention,
    linear,
    mask_logits,
    norm,
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
    "norm",
    "rotary",
    "sample",
    "top_k_top_p_min_p",
]
