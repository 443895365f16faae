"""How many prompts, responses and optimizer steps an iteration and a run have."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True)
class BatchLedger:
    """The counts of a run, from which all others follow.

    Attributes:
        prompts: prompts per iteration, on all ranks.
        group_size: responses per prompt.
        epochs: passes over the responses of an iteration.
        minibatches: optimizer steps per pass.
        ranks: processes that share the prompts.
        longest_row: most tokens of a prompt and its response together.
        micro_batch_tokens: tokens of one forward and backward pass.
        iterations: of the whole run; None for a run without end.
        rounds: most rounds of sampling in an iteration.
    """

    prompts: int
    group_size: int
    epochs: int
    minibatches: int
    ranks: int
    longest_row: int
    micro_batch_tokens: int
    iterations: int | None = None
    rounds: int = 1

    @property
    def responses(self) -> int:
        """Responses per iteration that are trained on, on all ranks."""
        return self.prompts * self.group_size

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration."""
        return self.epochs * self.minibatches

    @property
    def most_micro_batches(self) -> int:
        """Passes of one rank that an optimizer step takes at most, if all rows are the longest.

        As many rows share a pass as the budget of tokens holds, but at least one.
        """
        rows = ceil(self.responses / self.minibatches / self.ranks)
        return ceil(rows / max(1, self.micro_batch_tokens // self.longest_row))

    def lines(self) -> dict[str, str]:
        """Return the ledger as text, per iteration, per rank and in all."""
        refill = f", sampled in up to {self.rounds} rounds" if self.rounds > 1 else ""
        per_step = self.responses // self.minibatches
        passes = self.most_micro_batches
        micro_batches = f"{passes} micro-batch{'es' * (passes > 1)}"
        lines = {
            "iteration": (
                f"{self.prompts:,} prompts x {self.group_size:,} = {self.responses:,} responses"
                f"{refill} -> {self.epochs} epochs x {self.minibatches} minibatches of "
                f"{per_step:,} = {self.steps} optimizer steps"
            ),
            "rank": (
                f"{self.ranks} x {self.prompts // self.ranks:,} prompts, "
                f"{self.responses // self.ranks:,} responses; an optimizer step in at most "
                f"{micro_batches} of {self.micro_batch_tokens:,} tokens"
            ),
        }
        if self.iterations is not None:
            lines["run"] = (
                f"{self.iterations:,} iterations = {self.iterations * self.responses:,} responses "
                f"trained on, {self.iterations * self.steps:,} optimizer steps"
            )
        return lines
