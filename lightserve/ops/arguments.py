"""What kernels ask of the arguments of aten."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

WITHOUT_MEMORY = [torch._C.DispatchKey.Python, torch._C.DispatchKey.Functionalize]  # of tensors that torch traces


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether torch records these tensors, for a backward pass or beside the forward pass."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def have_memory(*tensors: Tensor) -> bool:
    """Whether kernels can read them, and nothing records what they are called with. Below autograd that is certain."""
    if torch._C._len_torch_dispatch_stack():
        return False
    keys = [torch._C._dispatch_keys(tensor) for tensor in tensors]
    return not any(each.has(key) for each in keys for key in WITHOUT_MEMORY)
