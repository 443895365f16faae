"""A hash of weights sees their names, shapes, formats and every bit."""

import hashlib

import pytest
import torch

from lit_rl.functional import fingerprint


def test_hash_is_that_of_name_shape_format_and_bytes():
    """By hand: 1.0 and -2.0 in float32, little-endian."""
    text = b"weight (2,) torch.float32" + bytes.fromhex("0000803f000000c0")
    weights = {"weight": torch.tensor([1.0, -2.0])}
    assert fingerprint(weights) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"bias": torch.zeros(4)},
        {"weight": torch.zeros(2, 2)},
        {"weight": torch.zeros(8, dtype=torch.bfloat16)},
        {"weight": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"weight": torch.zeros(4), "bias": torch.zeros(0)},
    ],
    ids=["name", "shape", "format", "one bit", "another tensor"],
)
def test_weights_that_differ_have_another_hash(other):
    assert fingerprint(other) != fingerprint({"weight": torch.zeros(4)})


def test_layout_in_memory_does_not_count():
    weight = torch.arange(6.0).reshape(2, 3)
    transposed = weight.T.contiguous().T
    assert fingerprint({"weight": transposed}) == fingerprint({"weight": weight})
