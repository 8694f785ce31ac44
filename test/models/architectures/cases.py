"""Every architecture in the shapes in which its knobs show. Windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures import dense_a, latent, llama_like, moe

CASES = dense_a.CASES | latent.CASES | llama_like.CASES | moe.CASES
