"""The matrix products that an iteration cannot do without, and how fast this machine does them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from compare.workloads import Workload

BACKWARD = 2
"""A product of a weight and an input has two in the backward pass: one for each gradient."""


@dataclass(frozen=True)
class Products:
    """The matrices of a model of the Llama kind.

    Attributes:
        linear: inputs and outputs of each linear layer, without the head.
        head: inputs and outputs of the head, the vocabulary.
        attention: numbers in the queries of one position, over all layers.
    """

    linear: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    attention: int

    @staticmethod
    def of(model: PreTrainedModel) -> "Products":
        head, config = model.get_output_embeddings(), model.config
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        return Products(
            linear=tuple((layer.in_features, layer.out_features) for layer in layers),
            head=(head.in_features, head.out_features),
            attention=config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )

    def forward(self, positions: int, pairs: int, logits: int) -> int:
        """Return the floating-point operations of a forward pass, 2 per multiplication.

        Args:
            positions: tokens that the layers read.
            pairs: queries with a key that each of them attends to, itself included.
            logits: positions of which the distribution is needed.
        """
        linear = positions * sum(inputs * outputs for inputs, outputs in self.linear)
        attention = 2 * pairs * self.attention  # scores, and the sum of the values
        return 2 * (linear + attention + logits * self.head[0] * self.head[1])


def forward_operations(
    products: Products, workload: Workload, lengths: Sequence[int], *, head: bool = True
) -> int:
    """Return the operations of one pass over prompts and responses, each prompt read once.

    The last token of a response predicts nothing and is not read. The distribution of the first
    one is the same for the whole group.

    Args:
        products: the model's matrices.
        workload: the work.
        lengths: tokens of each response.
        head: whether distributions are needed; a critic needs none.
    """
    prompt = workload.prompt_tokens
    read = [length - 1 for length in lengths]
    pairs = workload.num_prompts * prompt * (prompt + 1) // 2
    pairs += sum(number * prompt + number * (number + 1) // 2 for number in read)
    return products.forward(
        positions=workload.num_prompts * prompt + sum(read),
        pairs=pairs,
        logits=head * (workload.num_prompts + sum(read)),
    )


def iteration_operations(
    products: Products, workload: Workload, lengths: Sequence[int]
) -> dict[str, int]:
    """Return the operations of each stage of an iteration.

    Sampling reads and decodes all positions once, the reference scores them, and the update is a
    forward and a backward pass. A critic adds its values and its update.
    """
    policy = forward_operations(products, workload, lengths)
    critic = 0
    if workload.algorithm == "PPO":
        critic = forward_operations(products, workload, lengths, head=False)
    return {
        "generate": policy,
        "log_probs": policy + critic,
        "update": (1 + BACKWARD) * (policy + critic),
    }


def operations_per_second(products: Products, rows: int = 4096, repeats: int = 5) -> float:
    """Return the rate of float32 products of the layers' shapes with many rows.

    Each shape is timed by itself, the fastest of some repeats, and counts as often as it occurs.

    Args:
        products: the model's matrices.
        rows: positions in one product.
        repeats: products per shape.
    """
    operations, seconds = 0, 0.0
    for (inputs, outputs), number in Counter(products.linear).items():
        layer, states = nn.Linear(inputs, outputs, bias=False), torch.randn(rows, inputs)
        operations += number * 2 * rows * inputs * outputs
        seconds += number * min(_seconds(layer, states) for _ in range(repeats))
    return operations / seconds


@torch.no_grad()
def _seconds(layer: nn.Linear, states: torch.Tensor) -> float:
    begin = perf_counter()
    layer(states)
    return perf_counter() - begin
