"""The critic: a number for the state before each response token."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from lit_rl.models.adapters import adapter_layers, copy_on_base
from lit_rl.models.base import DTYPES, warn_of_vanishing_updates
from lit_rl.models.checkpointing import enable_gradient_checkpointing
from lit_rl.models.dropout import switch_off_dropout
from lit_rl.models.policy import Policy
from lit_rl.models.response_states import ResponseReader


class Values(NamedTuple):
    """What a critic says of a batch of responses, in reward units.

    Attributes:
        values: of the state before each token; zero where the mask is False.
        end_values: of the state behind the last token that counts; of the prompt where none does.
    """

    values: Float[Tensor, "rollouts tokens"]
    end_values: Float[Tensor, " rollouts"]


class Critic(ResponseReader):
    """A scalar head on hidden states: those of a backbone of its own, or those of the policy.

    The head starts at zero, so every value is 0 before the first step. It computes in float32
    whatever the precision of the backbone.

    Args:
        hidden_size: width of the hidden states.
        backbone: a Hugging Face base model; None: the head reads the policy's hidden states, and
            the gradient of the value loss reaches the policy's weights.

    Attributes:
        layout: how passes over responses are laid out, as in `Policy`.
        backbone: the base model, or None.
        head: from hidden states to values.
    """

    def __init__(self, hidden_size: int, backbone: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        if backbone is not None and self.can_pack:
            self.layout = "packed"
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, states: Float[Tensor, "rollouts tokens hidden"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the values of the states before each response token; zero where they don't count.

        Args:
            states: those states, of the backbone; of the policy where there is none.
            mask: True where a response token counts.
        """
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.to(self.head.weight.dtype))[..., 0]
        return torch.where(mask, values, 0.0)

    def with_end_values(
        self, states: Float[Tensor, "rollouts states hidden"], mask: Bool[Tensor, "rollouts tokens"]
    ) -> Values:
        """Return the values of the states before and behind the response tokens.

        Args:
            states: the states before each response token, and one more column, see `states`.
            mask: True where a response token counts.
        """
        columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        end = (mask * columns).amax(dim=1)
        rows = torch.arange(len(end), device=mask.device)
        end_values = self(states[rows, end][:, None], torch.ones_like(mask[:, :1]))[:, 0]
        return Values(values=self(states[:, :-1], mask), end_values=end_values)

    @property
    def base_model(self) -> PreTrainedModel:
        """The backbone, of a critic that has one."""
        assert self.backbone is not None
        return self.backbone

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the backbone's activations in the backward pass of training mode."""
        if self.backbone is not None:
            enable_gradient_checkpointing(self.backbone)


class CriticSource(ABC):
    """Where the critic of a run comes from."""

    @abstractmethod
    def critic(self, policy: Policy, tokenizer: Tokenizer) -> Critic:
        """Return a new critic in training mode, beside the policy as it is before training.

        Args:
            policy: the policy that it will judge.
            tokenizer: the policy's tokenizer.
        """


@dataclass(frozen=True)
class PolicyBackbone(CriticSource):
    """A backbone of its own that starts with the policy's weights.

    Where the policy has an adapter, so has the critic, an own one upon the same base.
    """

    def critic(self, policy: Policy, tokenizer: Tokenizer) -> Critic:
        """Return a critic that shares nothing with the policy but the base beneath an adapter."""
        backbone = copy_on_base(policy.base_model)
        if not adapter_layers(backbone):
            backbone.requires_grad_(True)
        return Critic(policy.hidden_size, backbone)


@dataclass(frozen=True)
class SharedTrunk(CriticSource):
    """A head on the policy's own hidden states: no second model, and one pass for both."""

    def critic(self, policy: Policy, tokenizer: Tokenizer) -> Critic:
        """Return a critic without a backbone."""
        return Critic(policy.hidden_size)


@dataclass(frozen=True)
class PretrainedBackbone(CriticSource):
    """A backbone of its own from another checkpoint: a causal model's or a reward model's.

    Args:
        name: name on the Hugging Face hub, or path of a folder; its vocabulary must be that of the
            policy. Whatever head it has is replaced.
        revision: branch, tag or commit on the hub; None: its main branch.
        dtype: number format of the weights: "float32", or "bfloat16" at half the memory, in which
            small updates vanish (a warning says so).
        dropout: False builds the backbone with all its dropout probabilities at 0.
    """

    name: str
    revision: str | None = None
    dtype: str = "float32"
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPES)}")

    def critic(self, policy: Policy, tokenizer: Tokenizer) -> Critic:
        """Return a critic with the checkpoint's backbone.

        Raises:
            ValueError: if there is no such checkpoint, if it lacks weights of the backbone, or if
                its tokens are not those of the policy.
        """
        try:
            config = AutoConfig.from_pretrained(self.name, revision=self.revision)
            own = AutoTokenizer.from_pretrained(self.name, revision=self.revision)
            if not self.dropout:
                switch_off_dropout(config)
            backbone, report = AutoModel.from_pretrained(
                self.name,
                revision=self.revision,
                config=config,
                dtype=DTYPES[self.dtype],
                output_loading_info=True,
            )
        except OSError as error:
            raise ValueError(
                f"no critic to load at {self.name!r}: neither a folder with a model and its "
                f"tokenizer, nor a repository that the Hugging Face hub gives: {error}"
            ) from error
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"the tokens of the critic {self.name!r} are not those of the policy "
                f"({len(own)} and {len(tokenizer)}): it would read other text. Use a checkpoint of "
                "the same family, or lit_rl.models.PolicyBackbone"
            )
        if report["missing_keys"]:
            raise ValueError(
                f"the checkpoint {self.name!r} lacks {len(report['missing_keys'])} weights of its "
                f"backbone, such as {min(report['missing_keys'])}; they would stay random"
            )
        warn_of_vanishing_updates(self.dtype)
        size = config.get_text_config(decoder=True).hidden_size
        return Critic(size, backbone.train())
