"""The policy and its reference: built, placed by the strategy, and their passes."""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, get_args

import lightning as L
import torch
from jaxtyping import Float, Int
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rl.algorithms.minibatches import micro_batch_rows
from lit_rl.functional import fingerprint, minimum_over_ranks
from lit_rl.generation import CachedGenerator, Generator, SamplingSettings
from lit_rl.models import Adapter, CausalLMSource, Policy, evaluation_mode, frozen_copy
from lit_rl.models.adapters import (
    base_fingerprint,
    base_names,
    base_parameters,
    put_on_base,
    switch_adapter,
)
from lit_rl.models.flex_packing import flex_refusal
from lit_rl.models.response_states import Layout, ResponseReader, packing_fits
from lit_rl.strategies import Parallelism, parallelism_of
from lit_rl.types import PolicyOutput, Prompts, Rollout, Sequences

T = TypeVar("T")

PLAINER: dict[Layout, Layout] = {"packed_flex": "packed", "packed": "padded"}
"""What takes the place of a layout that an architecture does not fit."""


class PolicyModule(L.LightningModule):
    """A policy that answers prompts and reads responses, and the frozen reference to it.

    Args:
        source: where the model and its tokenizer come from.
        sampling: how responses are drawn.
        generator: what draws them.
        adapter: what is trained upon the frozen weights of the model; None: the weights themselves.
        micro_batch_tokens: tokens of one forward and backward pass, prompts and padding included;
            bounds the memory and changes no result.
        layout: how the rows of a pass lie in memory. `packed`: all tokens form one row without
            padding, in which a prompt stands once for all its responses: the same numbers for less
            work. `packed_flex`: the attention of that row is computed by torch's flex attention,
            compiled in the first passes; for a CUDA device. `padded`: each row has the same width.
            A comparison on the first rollouts falls back to the next plainer layout, with a
            warning, for an architecture that does not fit.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        activation_offload: keep activations, or those that checkpointing keeps, in host memory
            until the backward pass; for an accelerator.
        seed: seeds weights, shuffling and sampling; the CLI passes `seed_everything`.

    Raises:
        ValueError: for a pass of no token, a layout that does not exist, and weights in 4 bits
            without an adapter.
    """

    def __init__(
        self,
        source: CausalLMSource,
        sampling: SamplingSettings = SamplingSettings(),
        generator: Generator = CachedGenerator(),
        adapter: Adapter | None = None,
        micro_batch_tokens: int = 16384,
        layout: Layout = "packed",
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source = source
        self.sampling = sampling
        self.generator = generator
        self.adapter = adapter
        self.micro_batch_tokens = micro_batch_tokens
        self.layout = layout
        self.packing_verified = False
        self.gradient_checkpointing = gradient_checkpointing
        self.activation_offload = activation_offload
        self.seed = seed
        self.parallelism = Parallelism()
        self.policy: Policy
        # In a list, so that it is no submodule: neither in the checkpoint nor in the optimizer.
        self._reference: list[Policy] | None = None
        self.reference_fingerprint: str | None = None
        if micro_batch_tokens < 1:
            raise ValueError(
                f"micro_batch_tokens is {micro_batch_tokens}, must be at least 1, such as 16384"
            )
        if layout not in get_args(Layout):
            known = ", ".join(get_args(Layout))
            raise ValueError(f"layout {layout!r} is unknown; choose one of {known}")
        if source.quantized and adapter is None:
            raise ValueError(
                "source.load_in_4bit freezes the weights: train an adapter upon them, such as "
                "--config configs/model/lora.yaml, or use load_in_4bit false"
            )

    @property
    @abstractmethod
    def uses_reference(self) -> bool:
        """Whether something needs the frozen reference."""

    @property
    def reference(self) -> Policy | None:
        """The frozen reference, if something needs it."""
        return self._reference[0] if self._reference else None

    @property
    def is_for_training(self) -> bool:
        """Whether the models are to be trained, not only to answer held-out prompts."""
        return self._trainer is None or self.trainer.state.fn == TrainerFn.FITTING

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return self.source.tokenizer()

    @property
    def max_context_tokens(self) -> int | None:
        """Tokens that the model can read, prompt and response together; None if unlimited."""
        return self.source.max_context_tokens()

    def setup(self, stage: str) -> None:
        """Take the strategy, and refuse what does not go with the device."""
        self.take_strategy()
        # A strategy that loads weights itself finds those of the critic, which answers do not need.
        self.strict_loading = stage == "fit" or not self.parallelism.saves_weights_itself
        if self.source.quantized and self.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "source.load_in_4bit needs an accelerator: on some CPUs bitsandbytes rearranges "
                "the weights while it samples, with which training then goes wrong. Use "
                "--model.source.load_in_4bit false, or --trainer.accelerator gpu"
            )
        if self.activation_offload and self.trainer.strategy.root_device.type == "cpu":
            raise ValueError(
                "activation_offload moves activations from an accelerator to host memory, and this "
                "run has no accelerator: use --model.gradient_checkpointing true to save memory, "
                "or --trainer.accelerator gpu"
            )
        if self.layout == "packed_flex" and self.trainer.strategy.root_device.type != "cuda":
            raise ValueError(
                "layout packed_flex has a backward pass on CUDA devices only: use "
                "--model.layout packed, or --trainer.accelerator gpu"
            )
        if refusal := self.generator.refusal(self.trainer.strategy.root_device):
            raise ValueError(refusal)

    def take_strategy(self) -> None:
        """Take what the strategy of the trainer asks for.

        Raises:
            ValueError: for a model that the strategy cannot put into shards, and for one that is
                in shards already.
        """
        if self.parallelism.strategy is not self.trainer.strategy:
            self.parallelism.check_free()
            self.parallelism = parallelism_of(self.trainer.strategy)
        if self.source.quantized and not self.parallelism.weights_are_whole:
            raise ValueError(
                "source.load_in_4bit makes weights that cannot be put into shards: use "
                "--trainer.strategy ddp, or --model.source.load_in_4bit false"
            )

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`: an engine around this module calls it for a pass."""
        return function(*arguments)

    def configure_model(self) -> None:
        """Build the models and put them where the strategy keeps them."""
        with self.parallelism.building():
            self.build_models()
            self.save_memory()
            self.lay_out(self.layout)
            if self.adapter is not None and not self.parallelism.weights_are_whole:
                _ = self.base_fingerprint  # as long as the base is whole
            if self._reference:
                reference = self._reference[0]
                self.take_fingerprint(reference)
                self._reference = [self.parallelism.placed_reference(reference, self.policy)]
            self.parallelism.place(self.learners)

    def build_models(self) -> None:
        """Build the policy; to train it, also the reference where a KL term needs one."""
        initial: Policy | None = None
        if not hasattr(self, "policy"):
            initial = self.policy = self.parallelism.of_rank_0(self.initial_policy)
        if self.is_for_training and self._reference is None:
            initial = initial or self.parallelism.of_rank_0(self.initial_policy)
            self._reference = [self.reference_to(initial)] if self.uses_reference else []

    def take_fingerprint(self, reference: Policy) -> None:
        """Keep a hash of what the reference does not share with the policy, before it is placed.

        One that is the base beneath an adapter has none: the base is compared by itself.
        """
        is_base = self.adapter is not None and self.adapter.starts_at_base
        if self.reference_fingerprint is None and not is_base:
            shared = set(self.policy.parameters())
            own = {name: p for name, p in reference.named_parameters() if p not in shared}
            self.reference_fingerprint = self.parallelism.of_rank_0(lambda: fingerprint(own))

    def initial_policy(self) -> Policy:
        """Return a new policy, as it is before training."""
        model = self.source.model(self.seed, frozen=self.adapter is not None)
        if self.adapter is not None:
            self.adapter.inject(model, self.seed)
        return Policy(model)

    def reference_to(self, initial: Policy) -> Policy:
        """Return the frozen reference that is the initial policy, upon the base of the policy."""
        reference = frozen_copy(initial)
        if self.adapter is not None:
            put_on_base(reference, base_names(self.policy, base_parameters(self.policy)))
            if self.adapter.starts_at_base:
                switch_adapter(reference, on=False)
        return reference

    @property
    def learners(self) -> list[ResponseReader]:
        """The models that are trained."""
        return [self.policy]

    @property
    def readers(self) -> list[ResponseReader]:
        """The models that read responses."""
        return [self.policy, *(self._reference or [])]

    def save_memory(self) -> None:
        """Let models that are trained keep fewer activations, if the settings say so."""
        for learner in self.learners:
            learner.offloads = self.activation_offload
            if self.gradient_checkpointing and not learner.recomputes:
                learner.enable_gradient_checkpointing()
                learner.recomputes = True

    def lay_out(self, layout: Layout) -> None:
        """Lay the passes of every model out in one way, padded where one cannot be packed.

        Raises:
            ValueError: where flex attention cannot compute them.
        """
        can_pack = all(reader.can_pack for reader in self.readers)
        if layout == "packed_flex":
            if not can_pack:
                raise ValueError(
                    f"{type(self.policy.model).__name__} cannot be told positions, so that its "
                    "passes are padded: use --model.layout padded in place of packed_flex"
                )
            for reader in self.readers:
                if refusal := flex_refusal(reader.base_model.config):
                    raise ValueError(refusal)
        self.layout = layout if can_pack else "padded"
        for reader in self.readers:
            reader.layout = self.layout

    def verify_packing(self, sequences: Sequences) -> None:
        """Once per process, compare packed and padded passes of every model on some of the rows.

        Where they differ, on any rank, the next plainer layout is used from here on.
        """
        if self.layout in PLAINER and not self.packing_verified:
            count = len(sequences)
            rows = torch.tensor(sorted({0, min(1, count - 1), max(count - 2, 0), count - 1}))
            part = sequences.select(rows.to(self.device)).trimmed()
            while (plainer := PLAINER.get(self.layout)) and not self._packed_fits(part):
                warnings.warn(
                    f"{self.layout} and padded passes of {type(self.policy.model).__name__} "
                    f"differ: its passes are {plainer} from here on, which takes longer. layout: "
                    f"{plainer} says so from the start",
                    stacklevel=2,
                )
                self.lay_out(plainer)
        self.packing_verified = True

    def _packed_fits(self, part: Sequences) -> bool:
        """Return whether packed passes of every model are the padded ones, on every rank."""
        fits = [self._packing_fits(reader, part) for reader in self.readers]
        return bool(minimum_over_ranks(torch.tensor(float(all(fits)), device=self.device)))

    def _packing_fits(self, reader: ResponseReader, part: Sequences) -> bool:
        with self.parallelism.whole(reader) as model:
            return packing_fits(model, part)

    def on_fit_start(self) -> None:
        """Move the reference, which is no submodule, to the device."""
        if self.uses_reference and self.reference is None:
            raise ValueError(
                "a callback needs the reference, but the models were built without it: give the "
                "callbacks to the trainer that trains this module first"
            )
        if self.reference is not None:
            self.reference.to(self.device)

    @property
    def base_weights(self) -> dict[str, nn.Parameter]:
        """The frozen weights beneath the adapters, by their names in the whole module."""
        return base_names(self, base_parameters(self.policy))

    @cached_property
    def base_fingerprint(self) -> str:
        """A hash of the frozen weights beneath the adapters."""
        return self.parallelism.of_rank_0(lambda: base_fingerprint(self.policy))

    def sample(
        self,
        prompts: Prompts,
        sampling: SamplingSettings,
        *,
        group_size: int,
        seed: tuple[int, ...],
    ) -> Rollout:
        """Answer prompts with the policy; rows of one seed, row id and number are the same."""
        with self.parallelism.whole(self.policy) as policy:
            return self.generator(
                policy, self.tokenizer, prompts, sampling, group_size=group_size, seed=seed
            )

    def micro_batch_rows(self, sequences: Sequences) -> list[Int[Tensor, " selected"]]:
        """Group the rows that share a forward pass, within the budget of tokens."""
        return micro_batch_rows(sequences, self.micro_batch_tokens, packs=self.policy.packs)

    def output_under(self, policy: Policy, sequences: Sequences) -> PolicyOutput:
        """Return log-probs and entropy of all responses under a policy in evaluation mode."""

        def read(model: Policy, part: Sequences) -> tuple[Tensor, Tensor]:
            output = model(part, temperature=self.sampling.temperature)
            return output.log_probs, output.entropy

        log_probs, entropy = self._in_micro_batches(policy, sequences, read)
        return PolicyOutput(log_probs=log_probs, entropy=entropy)

    def log_probs_under(
        self, policy: Policy, sequences: Sequences
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the log-probs of all responses under a policy in evaluation mode."""

        def read(model: Policy, part: Sequences) -> tuple[Tensor]:
            return (model.log_probs(part, temperature=self.sampling.temperature),)

        (log_probs,) = self._in_micro_batches(policy, sequences, read)
        return log_probs

    @torch.no_grad()
    def _in_micro_batches(
        self,
        policy: Policy,
        sequences: Sequences,
        read: Callable[[Policy, Sequences], tuple[Tensor, ...]],
    ) -> list[Float[Tensor, "rollouts tokens"]]:
        """Return what a policy in evaluation mode says of all responses; 0 where the mask is."""
        with self.parallelism.whole(policy) as model, evaluation_mode(model):
            groups = self.micro_batch_rows(sequences)
            parts = [read(model, sequences.select(rows).trimmed()) for rows in groups]
        columns = []
        for values in zip(*parts, strict=True):
            column = values[0].new_zeros(sequences.mask.shape)
            for rows, part in zip(groups, values, strict=True):
                column[rows, : part.shape[1]] = part
            columns.append(column)
        return columns
