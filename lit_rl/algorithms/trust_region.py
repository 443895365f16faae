"""What a step in a trust region asks a policy: loss, gradient, curvature, and the KL of a move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lit_rl.aggregations import Totals
from lit_rl.functional import sum_over_ranks
from lit_rl.functional.trust_region import LineSearchStep, backtracking_line_search
from lit_rl.models import Policy, frozen_copy
from lit_rl.models.fisher import (
    assign,
    fisher_product,
    flat,
    flat_gradient,
    trained_parameters,
)
from lit_rl.types import Experience, PolicyOutput

Loss = Callable[[PolicyOutput, Experience, Totals], Tensor]


@dataclass(frozen=True)
class TrustRegion:
    """A policy with the rows of one update. All results are sums over micro-batches and ranks.

    To be used within `lit_rl.models.fisher.plain_attention`, on all ranks together.

    Args:
        policy: the policy that is moved.
        micro_batches: the rows of this rank, maybe none.
        totals: what the rows of all ranks count.
        fisher_micro_batches: those of them of which the Fisher information is taken.
        temperature: the sampling temperature.
        loss: from a pass over a micro-batch to its part of the loss.
    """

    policy: Policy
    micro_batches: Sequence[Experience]
    totals: Totals
    fisher_micro_batches: Sequence[Experience]
    temperature: float
    loss: Loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What a step moves."""
        return trained_parameters(self.policy)

    def loss_and_gradient(self) -> tuple[float, Float[Tensor, " weights"]]:
        """Return the loss of the policy as it stands, and its gradient."""
        gradient = torch.zeros_like(flat(self.parameters))
        loss = gradient.new_zeros(())
        for part in self.micro_batches:
            value = self.loss(self._output(self.policy.states(part), part), part, self.totals)
            loss += value.detach()
            gradient += flat_gradient(value, self.parameters)
        return float(sum_over_ranks(loss)), sum_over_ranks(gradient)

    def fisher_product(self, vector: Float[Tensor, " weights"]) -> Float[Tensor, " weights"]:
        """Return the Fisher information, as a mean over tokens, times a vector."""
        return fisher_product(
            self.policy, self.fisher_micro_batches, vector, temperature=self.temperature
        )

    @torch.no_grad()
    def loss_and_kl(self, old: Policy) -> tuple[float, float]:
        """Return the loss of the policy as it stands, and mean KL(old || policy) per token."""
        sums = torch.zeros(2, device=self.totals.tokens.device)
        for part in self.micro_batches:
            states = self.policy.states(part)
            loss = self.loss(self._output(states, part), part, self.totals)
            kl = self.policy.kl_from(
                old, old.states(part), states, part.mask, temperature=self.temperature
            )
            sums += torch.stack([loss, kl.sum() / self.totals.tokens])
        loss_sum, kl_mean = sum_over_ranks(sums).tolist()
        return loss_sum, kl_mean

    def search(
        self,
        step: Float[Tensor, " weights"],
        *,
        loss: float,
        expected_improvement: float,
        max_kl: float,
        accept_ratio: float,
        backtrack_coef: float,
        max_steps: int,
    ) -> LineSearchStep:
        """Move the policy by the accepted fraction of a step; see `backtracking_line_search`.

        Where no fraction is accepted, the policy is left as it stands, bit for bit. Every rank
        decides by the same numbers.

        Args:
            step: the full step.
            loss: of the policy as it stands.
            expected_improvement: as of `backtracking_line_search`.
            max_kl: the same.
            accept_ratio: the same.
            backtrack_coef: the same.
            max_steps: the same.
        """
        old, origin = frozen_copy(self.policy), flat(self.parameters).detach()

        def measure(fraction: float) -> tuple[float, float]:
            assign(self.parameters, origin + fraction * step)
            new_loss, kl = self.loss_and_kl(old)
            return loss - new_loss, kl

        accepted = backtracking_line_search(
            measure,
            expected_improvement=expected_improvement,
            max_kl=max_kl,
            accept_ratio=accept_ratio,
            backtrack_coef=backtrack_coef,
            max_steps=max_steps,
        )
        if not accepted.fraction:
            assign(self.parameters, origin)
        return accepted

    def _output(self, states: Tensor, part: Experience) -> PolicyOutput:
        return self.policy.score(states, part, temperature=self.temperature)
