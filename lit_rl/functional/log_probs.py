"""From hidden states to the log-prob and the entropy of each response token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lit_rl.functional.ranks import maximum_over_ranks

Head = Callable[[Tensor], Tensor]


def response_hidden(
    hidden: Float[Tensor, "rollouts positions hidden"], num_tokens: int
) -> Float[Tensor, "rollouts tokens hidden"]:
    """hidden[:, positions - num_tokens - 1 : positions - 1]: the states that predict the response.

    The next-token shift: a state predicts the token after it, so the first response token is
    predicted at the last prompt position, and the state of the last response token predicts nothing
    that was sampled. This is the only place that shifts.

    Args:
        hidden: states of the prompt's positions, then of the response's.
        num_tokens: width of the response, in tokens.

    Returns:
        Column t predicts response token t.

    Raises:
        ValueError: if no prompt position stands before the response.

    Example:
        >>> prompt_and_response = torch.arange(5.0).reshape(1, 5, 1)
        >>> response_hidden(prompt_and_response, num_tokens=2).flatten()
        tensor([2., 3.])
    """
    positions = hidden.shape[1]
    if not 0 <= num_tokens < positions:
        raise ValueError(
            f"{num_tokens} response tokens need at least {num_tokens + 1} positions, because the "
            f"first is predicted by the last prompt position; got {positions}"
        )
    return hidden[:, positions - num_tokens - 1 : positions - 1]


def token_log_probs_and_entropy(
    hidden: Float[Tensor, "rollouts tokens hidden"],
    head: Head,
    targets: Int[Tensor, "rollouts tokens"],
    *,
    mask: Bool[Tensor, "rollouts tokens"],
    temperature: float,
    entropy_gradient: bool = True,
    chunk_tokens: int = 512,
    chunks_of_all_ranks: bool = False,
) -> tuple[Float[Tensor, "rollouts tokens"], Float[Tensor, "rollouts tokens"]]:
    """log_probs_t = log p_t(targets_t) and entropy_t = -sum_v p_t(v) log p_t(v).

    p_t = softmax(head(hidden_t) / temperature), in float32 whatever the dtype of the model (float64
    stays float64): the distribution that the token was drawn from.

    At no time, neither forward nor backward, do more logits exist than those of one chunk. Only the
    positions that count are gathered, the head is applied to `chunk_tokens` of them at a time, and
    backward computes each chunk but the last again instead of keeping it.

    Args:
        hidden: the state that predicts each response token, see `response_hidden`.
        head: from hidden states [any, hidden] to finite logits [any, vocab]; deterministic, as it
            runs twice.
        targets: the response tokens; anything where the mask is False.
        mask: True where a token counts.
        temperature: the sampling temperature, above 0.
        entropy_gradient: whether the entropy has a gradient, which takes one more table of logits
            in backward.
        chunk_tokens: tokens whose logits may exist at once, at least 1. More of them need more
            memory; fewer add up the gradient of the head's weights more often.
        chunks_of_all_ranks: whether the head runs as often on every rank, on nothing where a rank
            has fewer tokens than another: for heads whose weights the ranks put together in step.
            Every rank has to make the call.

    Returns:
        Log-probs (at most 0) and entropy (between 0 and log(vocab)), in nats; 0, and without
        gradient, where the mask is False.

    Raises:
        ValueError: if `temperature` is not above 0.

    Example:
        >>> logits = torch.tensor([[[1.0, 0.0], [7.0, 7.0]]])
        >>> log_probs, entropy = token_log_probs_and_entropy(
        ...     logits, torch.nn.Identity(), targets=torch.tensor([[0, 1]]),
        ...     mask=torch.tensor([[True, True]]), temperature=0.5,
        ... )
        >>> log_probs
        tensor([[-0.1269, -0.6931]])
        >>> entropy
        tensor([[0.3653, 0.6931]])
    """
    _check_temperature(temperature)
    *earlier, last = _chunks(hidden, targets, mask, chunk_tokens, chunks_of_all_ranks)
    chunk = partial(_chunk, head=head, temperature=temperature, entropy_gradient=entropy_gradient)
    results = [_recomputed(chunk, *part) for part in earlier]
    # Backward begins with the last chunk: computing it again would save no memory.
    results.append(chunk(*last))
    log_probs, entropy = (torch.cat(column) for column in zip(*results, strict=True))
    return _scattered(log_probs, mask), _scattered(entropy, mask)


@torch.no_grad()
def token_log_probs(
    hidden: Float[Tensor, "rollouts tokens hidden"],
    head: Head,
    targets: Int[Tensor, "rollouts tokens"],
    *,
    mask: Bool[Tensor, "rollouts tokens"],
    temperature: float,
    chunk_tokens: int = 512,
    chunks_of_all_ranks: bool = False,
) -> Float[Tensor, "rollouts tokens"]:
    """Return the log-probs of `token_log_probs_and_entropy`, without gradient and for less work.

    The arguments are the same.

    Raises:
        ValueError: if `temperature` is not above 0.
    """
    _check_temperature(temperature)
    chunks = _chunks(hidden, targets, mask, chunk_tokens, chunks_of_all_ranks)
    parts = [
        _of_targets(_logits(part, head, temperature).log_softmax(dim=-1), ids)
        for part, ids in chunks
    ]
    return _scattered(torch.cat(parts), mask)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, for example 1.0, not {temperature}: "
            "a greedy choice has no distribution to learn from"
        )


def _chunks(
    hidden: Float[Tensor, "rollouts tokens hidden"],
    targets: Int[Tensor, "rollouts tokens"],
    mask: Bool[Tensor, "rollouts tokens"],
    chunk_tokens: int,
    chunks_of_all_ranks: bool,
) -> list[tuple[Float[Tensor, "chunk hidden"], Int[Tensor, " chunk"]]]:
    """Return the states and targets of the tokens that count, a chunk at a time; one at least."""
    counted, ids = hidden[mask], targets[mask].long()
    pieces: int | list[int] = chunk_tokens
    if chunks_of_all_ranks:
        own = torch.tensor([-(-len(ids) // chunk_tokens), 1], device=ids.device)
        number = int(maximum_over_ranks(own).max())
        pieces = [max(0, min(chunk_tokens, len(ids) - n * chunk_tokens)) for n in range(number)]
    return [*zip(counted.split(pieces), ids.split(pieces), strict=True)]


def _recomputed(
    chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return chunk(hidden, targets)
    log_probs, entropy = checkpoint(
        chunk, hidden, targets, use_reentrant=False, preserve_rng_state=False
    )
    return log_probs, entropy


def _chunk(
    hidden: Float[Tensor, "chunk hidden"],
    targets: Int[Tensor, " chunk"],
    head: Head,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Float[Tensor, " chunk"], Float[Tensor, " chunk"]]:
    logits = _logits(hidden, head, temperature)
    if entropy_gradient:
        log_probs, entropy = _LogProbAndEntropy.apply(logits, targets)
    else:
        log_probs, entropy = _LogProb.apply(logits, targets)
    return log_probs, entropy


def _logits(
    hidden: Float[Tensor, "chunk hidden"], head: Head, temperature: float
) -> Float[Tensor, "chunk vocab"]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def _of_targets(
    values: Float[Tensor, "chunk vocab"], targets: Int[Tensor, " chunk"]
) -> Float[Tensor, " chunk"]:
    return values.gather(-1, targets[:, None]).squeeze(-1)


class _LogProb(torch.autograd.Function):
    """Log-prob of a token, with a gradient, and entropy, without, from logits z, p = softmax(z).

    d log p(a) / dz_v = [v = a] - p_v. Backward keeps one table of the vocabulary, p, and turns it
    into the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "chunk vocab"], targets: Int[Tensor, " chunk"]
    ) -> tuple[Float[Tensor, " chunk"], Float[Tensor, " chunk"]]:
        vocab_log_probs = logits.log_softmax(dim=-1)
        del logits
        log_probs = _of_targets(vocab_log_probs, targets)
        probs = vocab_log_probs.exp()
        entropy = -vocab_log_probs.mul_(probs).sum(dim=-1)
        ctx.save_for_backward(probs, targets)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, _: Any) -> tuple[Tensor, None]:
        probs, targets = ctx.saved_tensors
        gradient = probs.mul_(-of_log_probs[:, None])
        return gradient.scatter_add_(-1, targets[:, None], of_log_probs[:, None]), None


class _LogProbAndEntropy(torch.autograd.Function):
    """Log-prob of a token and entropy, both with a gradient, from logits z, with p = softmax(z).

    d log p(a) / dz_v = [v = a] - p_v and dH / dz_v = -p_v (log p_v + H). Backward keeps one table
    of the vocabulary, the log-probs, and makes one more: autograd would make two or three.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "chunk vocab"], targets: Int[Tensor, " chunk"]
    ) -> tuple[Float[Tensor, " chunk"], Float[Tensor, " chunk"]]:
        vocab_log_probs = logits.log_softmax(dim=-1)
        del logits
        log_probs = _of_targets(vocab_log_probs, targets)
        entropy = -vocab_log_probs.exp().mul_(vocab_log_probs).sum(dim=-1)
        ctx.save_for_backward(vocab_log_probs, targets, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        vocab_log_probs, targets, entropy = ctx.saved_tensors
        if of_log_probs is None and of_entropy is None:
            return None, None
        gradient = vocab_log_probs.exp()
        if of_entropy is not None:
            weights = (vocab_log_probs + entropy[:, None]).mul_(of_entropy[:, None])
            if of_log_probs is not None:
                weights.add_(of_log_probs[:, None])
            gradient.mul_(weights.neg_())
        elif of_log_probs is not None:
            gradient.mul_(-of_log_probs[:, None])
        if of_log_probs is not None:
            gradient.scatter_add_(-1, targets[:, None], of_log_probs[:, None])
        return gradient, None


def _scattered(
    values: Float[Tensor, " counted"], mask: Bool[Tensor, "rollouts tokens"]
) -> Float[Tensor, "rollouts tokens"]:
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
