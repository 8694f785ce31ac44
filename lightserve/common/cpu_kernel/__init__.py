"""What a CPU does faster than the ops' definitions, in plain torch. Importing this registers the backend "cpu"."""

from lightserve.common.cpu_kernel import activation, attention, linear, norm, rotary

__all__ = ["activation", "attention", "linear", "norm", "rotary"]
