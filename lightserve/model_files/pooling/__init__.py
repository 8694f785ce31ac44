"""What a model computes instead of text: embeddings, or scores of a head. No torch."""

from lightserve.model_files.pooling.config import PoolingConfig, Task, read_pooling

__all__ = ["PoolingConfig", "Task", "read_pooling"]
