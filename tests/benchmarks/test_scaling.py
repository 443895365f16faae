"""What scaling.py says of curves that are known."""

import pytest

from scaling import Curve, Point


def test_the_exponent_of_a_power_law_is_found_and_a_constant_lowers_it():
    sizes = (2, 4, 8, 16, 32)
    curve = Curve(
        "group_size",
        [Point(group_size=size) for size in sizes],
        [{"update": 0.5 * size**1.5, "generate": 10.0 + size} for size in sizes],
    )
    exponent, factor = curve.power_law("update")
    assert (exponent, factor) == pytest.approx((1.5, 0.5))
    # By hand, of 26 = 10 + 16 and 42 = 10 + 32: log2(42 / 26) = 0.69, and less further below.
    assert curve.power_law("generate")[0] < curve.power_law("generate", last=2)[0]
    assert curve.power_law("generate", last=2)[0] == pytest.approx(0.6919, abs=1e-4)


def test_the_weights_of_the_layers_are_counted():
    point = Point(hidden_size=64, vocabulary=100)
    model = point.source().model(seed=0)
    outside = 100 * 64 + 64 * (2 * 4 + 1)  # embeddings, which are also the head, and norms
    assert sum(p.numel() for p in model.parameters()) == point.layer_parameters + outside
