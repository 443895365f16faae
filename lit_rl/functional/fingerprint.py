"""A hash that tells weights apart."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a hash (SHA-256) of the name, shape, format and bytes of each of some tensors.

    Args:
        weights: by name; their order counts.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> fingerprint({"weight": torch.zeros(2)}) == fingerprint({"weight": torch.ones(2)})
        False
    """
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
