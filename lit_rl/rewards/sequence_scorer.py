"""Scores of token sequences under a Hugging Face sequence-classification model, in batches."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

# How far a score in a padded batch may lie from the same text's score alone, relative to the larger
# of 1 and that score. Rounding stays below; a model that reads padding does not.
_TOLERANCES = {torch.float32: 0.01, torch.bfloat16: 0.25}


class SequenceScorer:
    """A frozen sequence-classification model that scores a batch as it scores single rows.

    Rows are padded on the right, whatever the tokenizer does: there no token's position changes,
    and no token of a causal model sees the padding. A causal model reads its score at the last
    token that is not padding. Where its config names no padding, that is any token in which no row
    of the batch ends.

    Args:
        model: the model, whose config this object may change.
        label: which of its outputs is the score.
        batch_tokens: tokens of one forward pass, padding included.
    """

    def __init__(self, model: PreTrainedModel, label: int, batch_tokens: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.label = label
        self.batch_tokens = batch_tokens
        self._config = model.config.get_text_config()
        self._config.use_cache = False
        self._pad_id: int | None = getattr(self._config, "pad_token_id", None)
        self._padding_is_checked = False

    @property
    def max_tokens(self) -> int | None:
        """Positions that the model has; None: any number."""
        limit: int | None = getattr(self._config, "max_position_embeddings", None)
        return None if limit == -1 else limit  # XLNet says -1

    def __call__(self, rows: Sequence[list[int]], device: torch.device) -> list[float]:
        """Return the score of each row of token ids; a row has at least one.

        Args:
            rows: token ids.
            device: where the model is moved and run.

        Raises:
            ValueError: if padding changes the score of a row.
        """
        scores = [0.0] * len(rows)
        # Also within a validation step or under the autocast of the policy.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            self.model.to(device)
            for batch in self._batches([len(row) for row in rows]):
                batch_rows = [rows[number] for number in batch]
                batch_scores = self._forward(batch_rows)
                self._check_padding(batch_rows, batch_scores)
                for number, score in zip(batch, batch_scores, strict=True):
                    scores[number] = score
        return scores

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Yield numbers of rows of similar length."""
        most = self._config.vocab_size - 1  # so that there is a token in which no row ends
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lengths.__getitem__):
            tokens = (len(batch) + 1) * lengths[number]
            if batch and (tokens > self.batch_tokens or len(batch) == most):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _forward(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        pad_id = self._pad_id
        if pad_id is None:
            ends = {row[-1] for row in rows}
            pad_id = next(token for token in range(self._config.vocab_size) if token not in ends)
            self._config.pad_token_id = pad_id
        padding = [width - len(row) for row in rows]
        ids = [row + [pad_id] * count for row, count in zip(rows, padding, strict=True)]
        mask = [[1] * len(row) + [0] * count for row, count in zip(rows, padding, strict=True)]
        device = self.model.device
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
        ).logits
        scores: list[float] = logits[:, self.label].float().tolist()
        return scores

    def _check_padding(self, rows: list[list[int]], scores: list[float]) -> None:
        """Compare the shortest row of the first padded batch with itself alone."""
        if self._padding_is_checked or len(rows[0]) == len(rows[-1]):
            return
        alone = self._forward(rows[:1])[0]
        difference = abs(scores[0] - alone)
        if difference > _TOLERANCES[self.model.dtype] * max(1.0, abs(alone)):
            raise ValueError(
                f"{type(self.model).__name__} scores a text {alone:.6g} alone and {scores[0]:.6g} "
                "beside a longer one: it reads the padding. With batch_tokens 1 every text is "
                "scored alone"
            )
        self._padding_is_checked = True
