"""The files of a model: config, tokenizer, chat template, headers of weight files. Torch-free."""

from lightserve.model_files.source import ModelSource, resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelSource", "Tokenizer", "load_tokenizer", "resolve"]
