"""What a CPU does faster than the ops' definitions, by torch and numpy. Importing this registers the backend "cpu"."""

from lightserve.common.cpu_kernel import (
    activation,
    attention,
    choose,
    cut_logits,
    fixed_order,
    linear,
    mask_logits,
    norm,
    rotary,
)

__all__ = ["activation", "attention", "choose", "cut_logits", "fixed_order", "linear", "mask_logits", "norm", "rotary"]
