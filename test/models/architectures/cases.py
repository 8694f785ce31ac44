"""Every architecture in the shapes in which its knobs show. Windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures import dense_a, dense_b, hybrid, latent, llama_like, moe, vision_language

CASES = (
    dense_a.CASES | dense_b.CASES | hybrid.CASES | latent.CASES | llama_like.CASES | moe.CASES | vision_language.CASES
)
