"""The KL between two policies at each response token, summed over the whole vocabulary."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.functional.log_probs import Head


def vocabulary_kl(
    old_hidden: Float[Tensor, "rollouts tokens hidden"],
    old_head: Head,
    hidden: Float[Tensor, "rollouts tokens hidden"],
    head: Head,
    *,
    mask: Bool[Tensor, "rollouts tokens"],
    temperature: float,
    chunk_tokens: int = 512,
) -> Float[Tensor, "rollouts tokens"]:
    """KL_t = sum_v p_old_t(v) * (log p_old_t(v) - log p_t(v)).

    p_t = softmax(head(hidden_t) / temperature), in float32 whatever the dtype of the model (float64
    stays float64). Exact, unlike the estimates of `lit_rl.functional.kl`, which see the sampled
    token alone.

    The old policy is a constant. First and second derivative in the current one are right; where
    the two policies are one, the first is 0 and the second the Fisher information matrix.

    Without gradient no more logits exist at once than those of one chunk; with gradient the graph
    holds those of all tokens.

    Args:
        old_hidden: the state of the old policy that predicts each response token.
        old_head: from its hidden states [any, hidden] to finite logits [any, vocab].
        hidden: the state of the current policy that predicts each response token.
        head: from its hidden states to finite logits.
        mask: True where a token counts.
        temperature: the sampling temperature, above 0.
        chunk_tokens: tokens whose logits are made at once, at least 1.

    Returns:
        Nats per token, at least 0 up to rounding; 0, and without gradient, where the mask is False.

    Raises:
        ValueError: if `temperature` is not above 0.

    Example:
        >>> old, new = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 0.0]]])
        >>> identity = torch.nn.Identity()
        >>> vocabulary_kl(
        ...     old, identity, new, identity, mask=torch.tensor([[True]]), temperature=1.0
        ... )
        tensor([[0.1109]])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, for example 1.0, not {temperature}")

    def chunk(
        old_states: Float[Tensor, "chunk hidden"], states: Float[Tensor, "chunk hidden"]
    ) -> Float[Tensor, " chunk"]:
        with torch.no_grad():
            old_log_probs = _log_probs(old_head(old_states), temperature)
        log_probs = _log_probs(head(states), temperature)
        return (old_log_probs.exp() * (old_log_probs - log_probs)).sum(dim=-1)

    old_chunks, chunks = (h[mask].split(chunk_tokens) for h in (old_hidden, hidden))
    values = torch.cat([chunk(old, now) for old, now in zip(old_chunks, chunks, strict=True)])
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    precise = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(precise) / temperature).log_softmax(dim=-1)
