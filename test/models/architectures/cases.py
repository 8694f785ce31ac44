"""Every architecture in the shapes in which its knobs show. Windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures import dense_b, llama_like

CASES = {**llama_like.CASES, **dense_b.CASES}
