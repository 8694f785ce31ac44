"""LoRA adapters as PEFT stores them: what a folder says, checked before any tensor is read. No torch."""
