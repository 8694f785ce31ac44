"""The former place of ``LLM``: use ``from lightserve import LLM``."""

from lightserve.offline.llm import LLM

__all__ = ["LLM"]
