"""One optimizer step: in micro-batches, equally many on every rank, never by a NaN."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_rl.aggregations import Totals
from lit_rl.algorithms.free_memory import return_free_memory
from lit_rl.algorithms.non_finite import finite_on_all_ranks, save_minibatch
from lit_rl.algorithms.out_of_memory import with_less_memory
from lit_rl.algorithms.rl_module import RLModule
from lit_rl.functional import maximum_over_ranks, sum_over_ranks
from lit_rl.types import Experience, ModelOutput, Update


class UpdatingModule(RLModule):
    """A policy whose weights are moved by the rows of an experience. Loops are subclasses.

    Args:
        skip_zero_advantages: leave rows without advantage out of the passes of the update. They
            still count in every denominator, so the gradient is the same; metrics of the update
            cover the other rows only. Needs a loss without KL and entropy.
        max_skipped_updates: updates in a row whose loss or gradient is not finite at which the run
            ends, with the rows of the last of them in its folder. Such an update takes no optimizer
            step, and the metric `skipped_updates` counts it.
        module: the arguments of `RLModule`.
    """

    def __init__(
        self, skip_zero_advantages: bool = False, max_skipped_updates: int = 3, **module: Any
    ) -> None:
        super().__init__(**module)
        self.skip_zero_advantages = skip_zero_advantages
        self.max_skipped_updates = max_skipped_updates
        self.skipped_updates = 0
        self.skipped_in_a_row = 0

    @property
    def resting_groups(self) -> frozenset[str]:
        """Names of the parameter groups that the optimizer leaves as they are at the moment."""
        return frozenset()

    @abstractmethod
    def forward_pass(self, experience: Experience) -> ModelOutput:
        """Return what the models say of a micro-batch, with gradient."""

    @abstractmethod
    def loss(
        self, output: ModelOutput, experience: Experience, totals: Totals
    ) -> Float[Tensor, ""]:
        """Return this part of the loss of an optimizer step; parts of one step add up."""

    def update(self, experience: Experience, rows: Tensor, index: int) -> Update:
        """Take one optimizer step on the given rows, in micro-batches."""
        minibatch = experience.select(rows.to(experience.mask.device))
        totals = Totals(*sum_over_ranks(torch.stack(Totals.of(minibatch.mask))))
        acts = minibatch.advantages.ne(0) if self.skip_zero_advantages else minibatch.mask
        minibatch = minibatch.select(acts.any(1).nonzero()[:, 0])
        loss, passes = with_less_memory(
            lambda groups: self.backward_passes(minibatch, groups, experience, totals),
            groups=lambda: self.micro_batch_rows(minibatch) if len(minibatch) else [],
            split=lambda count: self.split_micro_batches(minibatch, count),
            alone=not self.parallelism.is_parallel,
        )
        counts = bool(totals.tokens)
        finite = finite_on_all_ranks(loss)
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)  # there is one
        grad_norms = self.parallelism.step(
            optimizer,
            max_grad_norm=self.max_grad_norm,
            resting=self.resting_groups,
            counts=counts and finite,
        )
        finite = finite and all(map(math.isfinite, grad_norms.values()))
        if counts and finite:
            self.scheduler.step()
        self.count_skipped(finite, minibatch, index)
        return Update(passes=passes, loss=loss, grad_norms=grad_norms, index=index)

    def backward_passes(
        self,
        minibatch: Experience,
        groups: Sequence[Tensor],
        experience: Experience,
        totals: Totals,
    ) -> tuple[Float[Tensor, ""], tuple[tuple[Experience, ModelOutput], ...]]:
        """Add up the gradient over micro-batches; return the loss, and rows with outputs.

        Args:
            minibatch: the rows of this rank that are trained on, maybe none.
            groups: those of each micro-batch.
            experience: all rows of this rank.
            totals: the denominators of the loss.
        """
        loss, passes = torch.zeros((), device=self.device), []
        micro_batches = self.even_micro_batches(minibatch, groups, experience)
        for number, (micro_batch, weight) in enumerate(micro_batches, start=1):
            output = self.parallelism.run(self.forward_pass, micro_batch)
            part = weight * self.loss(output, micro_batch, totals)
            with self.parallelism.accumulate(last=number == len(micro_batches)):
                # Data parallel strategies average over ranks what the totals make a sum.
                self.manual_backward(part * self.trainer.world_size)
            loss += part.detach()
            if weight:
                passes.append((micro_batch, output.map_tensors(Tensor.detach)))
        return loss, tuple(passes)

    def split_micro_batches(self, minibatch: Experience, count: int) -> None:
        """Halve the budget of tokens until rows form more than `count` micro-batches."""
        self.raw_optimizer.zero_grad(set_to_none=True)
        before = self.micro_batch_tokens
        while len(self.micro_batch_rows(minibatch)) <= count:
            self.micro_batch_tokens //= 2
        return_free_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rank_zero_warn(
            f"memory ran out in iteration {self.iteration + 1}: micro_batch_tokens is "
            f"{self.micro_batch_tokens} instead of {before} from here on, and the minibatch is "
            "repeated. The results are the same"
        )

    def even_micro_batches(
        self, minibatch: Experience, groups: Sequence[Tensor], experience: Experience
    ) -> list[tuple[Experience, float]]:
        """Return micro-batches with their weights in the loss, equally many on every rank.

        A rank that has fewer of its own, or none, runs the others with a row of weight 0.

        Args:
            minibatch: the rows of this rank that are trained on, maybe none.
            groups: those of each micro-batch.
            experience: all rows of this rank.
        """
        number = maximum_over_ranks(torch.tensor([len(groups), 1], device=self.device)).max()
        shortest = experience.select(experience.mask.sum(1).argmin()[None]).trimmed()
        missing = int(number) - len(groups)
        return [(minibatch.select(group).trimmed(), 1.0) for group in groups] + [
            (shortest, 0.0)
        ] * missing

    def count_skipped(self, finite: bool, minibatch: Experience, index: int) -> None:
        """Count an optimizer step that was skipped, on all ranks together.

        Raises:
            FloatingPointError: if it is the last of `max_skipped_updates` in a row.
        """
        self.skipped_updates += int(not finite)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == self.max_skipped_updates:
            where = f"iteration{self.iteration + 1}-update{index + 1}"
            path = save_minibatch(self.trainer, minibatch, where)
            raise FloatingPointError(
                f"loss or gradient were not finite in {self.skipped_in_a_row} updates in a row, "
                f"the last update {index + 1} of iteration {self.iteration + 1}; its rows are in "
                f"{path}. The weights are untouched by these updates. Look at the rows and at the "
                "metrics of the iterations before, or lower the learning rate"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store how many updates were skipped."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lit_rl"]["skipped_updates"] = self.skipped_updates
        checkpoint["lit_rl"]["skipped_in_a_row"] = self.skipped_in_a_row

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting what was skipped."""
        super().on_load_checkpoint(checkpoint)
        self.skipped_updates = checkpoint["lit_rl"].get("skipped_updates", 0)
        self.skipped_in_a_row = checkpoint["lit_rl"].get("skipped_in_a_row", 0)
