"""`lightserve parity`: the same prompts through this engine and through transformers."""
