"""Every architecture in the shapes in which its knobs show. Windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures import (
    dense_a,
    dense_b,
    dense_c,
    gemma4,
    hybrid,
    latent,
    llama4,
    llama_like,
    moe,
    moe_b,
    step,
    vision_language,
)

MODULES = dense_a, dense_b, dense_c, gemma4, hybrid, latent, llama4, llama_like, moe, moe_b, step, vision_language
CASES = {name: case for module in MODULES for name, case in module.CASES.items()}
