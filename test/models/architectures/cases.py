"""Every architecture in the shapes in which its knobs show. Windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures import latent, llama_like, moe

CASES = latent.CASES | llama_like.CASES | moe.CASES
