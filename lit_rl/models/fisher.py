"""The Fisher information matrix of a policy, by its products with vectors."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_rl.functional import sum_over_ranks
from lit_rl.models.policy import Policy
from lit_rl.types import Sequences

DIFFERENTIABLE_TWICE = (None, "eager", "sdpa")
"""Values of `attn_implementation` that have a second derivative."""


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, in the order of a flat vector of them."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def flat(tensors: Iterable[Tensor]) -> Float[Tensor, " weights"]:
    """Return the entries of tensors as one vector, with gradient where they have one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign(parameters: Sequence[nn.Parameter], vector: Float[Tensor, " weights"]) -> None:
    """Write a vector of `flat` into the parameters.

    Its entries are copied: parameters that share the storage of one vector cannot be exported.
    """
    pieces = vector.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.copy_(piece.view_as(parameter))


def flat_gradient(
    value: Float[Tensor, ""], parameters: Sequence[nn.Parameter], *, differentiable: bool = False
) -> Float[Tensor, " weights"]:
    """Return the gradient of a number as one vector; zero where it does not depend on a parameter.

    Nothing is written to `parameter.grad`, so no data parallel wrapper notices.

    Args:
        value: the number.
        parameters: what it is a function of.
        differentiable: whether the gradient is to be differentiated in turn.
    """
    gradients = torch.autograd.grad(
        value, parameters, create_graph=differentiable, allow_unused=True, materialize_grads=True
    )
    return flat(gradients)


def fisher_product(
    policy: Policy,
    micro_batches: Sequence[Sequences],
    vector: Float[Tensor, " weights"],
    *,
    temperature: float,
) -> Float[Tensor, " weights"]:
    """F v, where F is the mean over tokens of the Hessian of KL(old || policy) at old = policy.

    The KL is taken over the whole vocabulary at every response token, at the sampling temperature;
    its Hessian where the two are one is the Fisher information matrix, J^T (diag(p) - p p^T) J per
    token with J the derivative of the logits over temperature. TRPO, arXiv:1502.05477, appendix C.

    Exact, by differentiating the gradient. Without any token it is 0. Every rank has to call it,
    with rows or without.

    The logits of the response tokens of one micro-batch, and their derivatives, exist at once:
    smaller micro-batches need less memory.

    Args:
        policy: in float32, with the plain attention of torch (see `plain_attention`).
        micro_batches: the responses of this rank.
        vector: v, as long as the trained parameters of the policy together.
        temperature: sampling temperature by which logits are divided, above 0.

    Returns:
        Nats per token over the square of the unit of a weight, times v; the same on all ranks.
    """
    parameters = trained_parameters(policy)
    product, num_tokens = torch.zeros_like(vector), vector.new_zeros(())
    for batch in micro_batches:
        states = policy.states(batch)
        kl = policy.kl_from(policy, states, states, batch.mask, temperature=temperature)
        gradient = flat_gradient(kl.sum(), parameters, differentiable=True)
        product += flat_gradient(gradient @ vector, parameters)
        num_tokens += batch.mask.sum()
    return sum_over_ranks(product) / sum_over_ranks(num_tokens).clamp(min=1)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention be computed by matrix products: the fused kernels have no second derivative.

    Needs memory in the square of the number of positions.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield
