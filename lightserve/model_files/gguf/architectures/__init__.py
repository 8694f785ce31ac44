"""The architectures of GGUF files that can be served.

A new one needs an entry in the module of its family, and one in gguf_pre_tokenizers.PRE_TOKENIZERS if its tokenizer
splits text in a way of its own.
"""

from __future__ import annotations

from lightserve.model_files.gguf.architectures import (
    delta,
    encoders,
    experts,
    gemma4,
    gpt,
    latent,
    llama4,
    llama_like,
    mamba,
    norms,
    short_conv,
    since_2025,
    step35,
)
from lightserve.model_files.gguf.architectures.architecture import Form, GgufArchitecture, Join, JoinedTensor, RowOrder
from lightserve.model_files.gguf.fields import unsupported
from lightserve.model_files.gguf.header import GgufHeader

__all__ = ["ARCHITECTURES", "Form", "GgufArchitecture", "Join", "JoinedTensor", "RowOrder", "architecture_of"]

# by general.architecture: the models that have this name in GGUF files
ARCHITECTURES: dict[str, tuple[GgufArchitecture, ...]] = {
    **llama_like.ARCHITECTURES,
    **norms.ARCHITECTURES,
    **gemma4.ARCHITECTURES,
    **gpt.ARCHITECTURES,
    **experts.ARCHITECTURES,
    **latent.ARCHITECTURES,
    **llama4.ARCHITECTURES,
    **since_2025.ARCHITECTURES,
    **step35.ARCHITECTURES,
    **delta.ARCHITECTURES,
    **mamba.ARCHITECTURES,
    **short_conv.ARCHITECTURES,
    **encoders.ARCHITECTURES,
    "llama": (experts.MIXTRAL, *llama_like.ARCHITECTURES["llama"]),
}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    name = header.architecture
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise unsupported(header, f"architecture {name!r} is not supported; supported: {supported}")
    candidates = [architecture for architecture in ARCHITECTURES[name] if architecture.applies(header)]
    return candidates[0]
