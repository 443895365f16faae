"""The policy: log-probs and entropy of given responses under a Hugging Face causal LM."""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.functional.log_probs import token_log_probs, token_log_probs_and_entropy
from lit_rl.functional.vocabulary_kl import vocabulary_kl
from lit_rl.models.adapters import copy_on_base
from lit_rl.models.base import context_limit
from lit_rl.models.checkpointing import enable_gradient_checkpointing
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.response_states import ResponseReader, padded_states
from lit_rl.types import PolicyOutput, Sequences

LOGITS_AT_ONCE = 2**24
"""Numbers in the table of logits that a pass over responses makes at a time: 64 MiB of float32."""


class Policy(ResponseReader):
    """A causal language model that scores responses and is sampled from.

    Args:
        model: any Hugging Face causal language model whose logits are a linear function of the
            base model's last hidden states, followed by the scale or soft cap that its config
            names. The constructor compares with the model's own logits on a tiny input.

    Attributes:
        model: the Hugging Face model.
        layout: how passes over responses are laid out, see `response_states`.
        scores_in_step: whether the head runs as often on every rank, see
            `token_log_probs_and_entropy`.
        fits_group_cache: whether the cache of `CachedGenerator` samples from this policy; None as
            long as nobody has compared.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.layout = "packed" if self.can_pack else "padded"
        self.scores_in_step = False
        self.fits_group_cache: bool | None = None
        if model.device.type != "meta":
            self.verify_head()

    def forward(
        self, sequences: Sequences, *, temperature: float, entropy_gradient: bool = True
    ) -> PolicyOutput:
        """Return log-probs and entropy of the response tokens.

        Only the logits of response positions are computed, a chunk at a time.

        Args:
            sequences: prompts with responses. The mask of a row is True up to its last counting
                token and False behind it, or False throughout; a response token is attended to
                where it is True.
            temperature: sampling temperature by which logits are divided, above 0.
            entropy_gradient: whether the entropy has a gradient.

        Returns:
            Log-probs and entropy in nats, zero where the mask is False.
        """
        return self.score(
            self.states(sequences),
            sequences,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )

    def score(
        self,
        states: Float[Tensor, "rollouts tokens hidden"],
        sequences: Sequences,
        *,
        temperature: float,
        entropy_gradient: bool = True,
    ) -> PolicyOutput:
        """Return log-probs and entropy of the response tokens from `states`.

        Args:
            states: the state before each response token.
            sequences: the same prompts with responses.
            temperature: sampling temperature by which logits are divided, above 0.
            entropy_gradient: whether the entropy has a gradient.
        """
        log_probs, entropy = token_log_probs_and_entropy(
            states,
            self.head,
            sequences.response_ids,
            mask=sequences.mask,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            chunk_tokens=self.chunk_tokens,
            chunks_of_all_ranks=self.scores_in_step,
        )
        return PolicyOutput(log_probs=log_probs, entropy=entropy)

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequences, *, temperature: float
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return the log-probs of `forward` alone, without gradient and for less work.

        Args:
            sequences: prompts with responses, as for `forward`.
            temperature: sampling temperature by which logits are divided, above 0.
        """
        return token_log_probs(
            self.states(sequences),
            self.head,
            sequences.response_ids,
            mask=sequences.mask,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            chunks_of_all_ranks=self.scores_in_step,
        )

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits a pass over responses makes at a time."""
        return max(1, LOGITS_AT_ONCE // self.vocabulary_size)

    def kl_from(
        self,
        old: "Policy",
        old_states: Float[Tensor, "rollouts tokens hidden"],
        states: Float[Tensor, "rollouts tokens hidden"],
        mask: Bool[Tensor, "rollouts tokens"],
        *,
        temperature: float,
    ) -> Float[Tensor, "rollouts tokens"]:
        """Return KL(old || this policy) at each response token, over the whole vocabulary.

        The old policy is a constant, even where it is this one; see `vocabulary_kl`.

        Args:
            old: a policy with the same vocabulary.
            old_states: its states before each response token.
            states: those of this policy.
            mask: True where a response token counts.
            temperature: sampling temperature by which logits are divided, above 0.

        Returns:
            Nats per token, zero where the mask is False.
        """
        return vocabulary_kl(
            old_states.detach(),
            old.head,
            states,
            self.head,
            mask=mask,
            temperature=temperature,
        )

    def head(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return the logits of hidden states, as the architecture makes them."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config(decoder=True)
        for name, change in LOGIT_CHANGES.items():
            if (value := getattr(config, name, None)) is not None:
                logits = change(logits, value)
        return logits

    def verify_head(self) -> None:
        """Compare `head` with the model's own logits on a tiny input.

        Raises:
            ValueError: if they differ: the architecture does something else with its logits.
        """
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        ids = torch.arange(min(4, embeddings.num_embeddings), device=self.model.device)[None]
        with torch.no_grad(), evaluation_mode(self):
            mask = torch.ones_like(ids, dtype=torch.bool)
            logits = self.head(padded_states(self.base_model, ids, mask))
            expected = self.model(input_ids=ids, use_cache=False).logits
        tolerance = 8 * torch.finfo(logits.dtype).eps * float(expected.abs().max())
        difference = float((logits - expected).abs().max())
        if not difference <= tolerance:
            raise ValueError(
                f"the logits of {type(self.model).__name__} are not its output embeddings applied "
                f"to the last hidden states, with the changes {sorted(LOGIT_CHANGES)} that its "
                f"config names: they differ by {difference:.3g}. lit_rl cannot train this "
                "architecture; Llama, Qwen, Gemma, GPT-2, Cohere and Granite are among those it can"
            )

    @property
    def base_model(self) -> PreTrainedModel:
        """The model without its head."""
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        size: int = self.model.config.get_text_config(decoder=True).hidden_size
        return size

    @property
    def vocabulary_size(self) -> int:
        """Tokens that the head gives a logit."""
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    @property
    def max_context_tokens(self) -> int | None:
        """Tokens of prompt and response together that the model has positions for; None: any."""
        return context_limit(self.model.config)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a response: all that the model's generation config names."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the layers' activations in the backward pass of training mode."""
        enable_gradient_checkpointing(self.model)


def _scaled(logits: Tensor, scale: float) -> Tensor:
    return logits * scale


def _divided(logits: Tensor, scaling: float) -> Tensor:
    return logits / scaling


def _soft_capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


# What architectures do with their logits, by the config field that holds the number.
LOGIT_CHANGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "logit_scale": _scaled,  # Cohere
    "logits_scaling": _divided,  # Granite
    "final_logit_softcapping": _soft_capped,  # Gemma 2 and 3
}


def frozen_copy(policy: Policy) -> Policy:
    """Return a deep copy of `policy` that nothing trains: no gradients, evaluation mode.

    It stays what the policy was: the two share no tensor but the base beneath an adapter, which
    nothing trains.
    """
    return copy_on_base(policy).requires_grad_(False).eval()
