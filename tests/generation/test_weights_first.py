"""The order of the products of sampling: the same numbers, by other calls."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.generation import CachedGenerator, SamplingSettings, TransformersGenerator
from lit_rl.generation import weights_first as module
from lit_rl.generation.weights_first import weights_first
from lit_rl.models import Policy


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 1)


class Products(TorchDispatchMode):
    """Keeps the shapes of the first factor of every product of two matrices."""

    def __init__(self):
        super().__init__()
        self.firsts = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.firsts.append(tuple(args[0].shape))
        if function is torch.ops.aten.addmm.default:
            self.firsts.append(tuple(args[1].shape))
        return function(*args, **(kwargs or {}))


def layer_of(weight, bias=None, kind=nn.Linear):
    layer = kind(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    return layer


WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
BIAS = torch.tensor([0.5, 0.0, -1.0])
STATES = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, -1.0]]])
# By hand: the columns of the weight, their sum, and twice the first less the second.
PRODUCTS = torch.tensor(
    [[[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]], [[3.0, 7.0, 11.0], [0.0, 2.0, 4.0]]]
)  # fmt: skip


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
@torch.no_grad()
def test_the_numbers_are_those_of_the_layer(bias):
    layer = layer_of(WEIGHT, bias)
    with weights_first(nn.Sequential(layer)), Products() as products:
        result = layer(STATES)
    assert torch.equal(result, PRODUCTS if bias is None else PRODUCTS + BIAS)
    assert result.is_contiguous()
    assert products.firsts == [(3, 2)]


@pytest.mark.parametrize(("rows", "first"), [(1, (1, 2)), (2, (3, 2)), (32, (3, 2)), (33, (33, 2))])
@torch.no_grad()
def test_the_order_is_another_for_few_rows_only(rows, first):
    layer = layer_of(WEIGHT)
    with weights_first(layer), Products() as products:
        layer(torch.ones(rows, 2))
    assert products.firsts == [first]


class Doubled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


@torch.no_grad()
def test_what_is_no_plain_product_of_float32_stays_as_it_is(monkeypatch):
    def states_first(layer):
        with weights_first(layer), Products() as products:
            layer(torch.ones(2, 2, dtype=layer.weight.dtype))
        return products.firsts == [(2, 2)]

    assert states_first(layer_of(WEIGHT, kind=Doubled))
    assert states_first(layer_of(WEIGHT.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert states_first(layer_of(WEIGHT))
    monkeypatch.setattr(module, "LARGE", 7)
    assert states_first(layer_of(WEIGHT))


def test_the_layers_are_as_before_also_behind_an_error():
    layer = layer_of(WEIGHT)
    before = dict(vars(layer))
    with weights_first(layer):
        assert vars(layer).keys() - before.keys() == {"forward"}
    assert vars(layer) == before
    with pytest.raises(RuntimeError, match="in between"), weights_first(layer):
        raise RuntimeError("in between")
    assert vars(layer) == before


def test_sampling_multiplies_so_and_draws_the_tokens_of_generate(source, prompts_of):
    """4 responses in step: all linear layers and the head have their weights first."""
    policy, tokenizer = Policy(source.model(0)), source.tokenizer()
    prompts = prompts_of([[1, 4, 13], [1, 4, 5, 6, 13]])
    sampling = SamplingSettings(max_new_tokens=2, min_new_tokens=2)
    policy.fits_group_cache = True  # its comparison would count as well
    with Products() as products:
        own = CachedGenerator()(policy, tokenizer, prompts, sampling, group_size=2, seed=(3,))
    plain = TransformersGenerator()(policy, tokenizer, prompts, sampling, group_size=2, seed=(3,))
    assert torch.equal(own.response_ids, plain.response_ids)
    weights = [
        tuple(part.weight.shape) for part in policy.model.modules() if isinstance(part, nn.Linear)
    ]
    # The pass over the prompts (8 rows, and 2 at the head), then that over the first tokens.
    assert sorted(products.firsts) == sorted(2 * weights)
