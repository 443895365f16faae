"""Activations wait for the backward pass in the memory of the host."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


def offloaded_activations(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which what backward needs is kept in host memory, weights excepted.

    Each tensor goes to the host when the forward pass has made it and comes back when the backward
    pass asks for it: the accelerator holds those of one layer at a time, and the copies take time.
    Gradients are the same, bit for bit.

    Args:
        model: its weights stay where they are.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor
        # Pinned memory is copied without a detour.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor)

    def back(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host = kept
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(to_host, back)
