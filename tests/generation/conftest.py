import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.types import Prompts
from tiny_job import TWO_LAYERS, build_source


@pytest.fixture
def source():
    """A tiny random Llama over digits and ">": ids 0, 1, 2 are pad, begin, end; "0" is 3."""
    return build_source({"model_type": "llama", **TWO_LAYERS})


@pytest.fixture
def prompts_of():
    """`prompts_of(rows, pad_id=0, row_ids=None)`: prompts from lists of token ids."""

    def prompts(rows, pad_id=0, row_ids=None):
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        return Prompts(
            ids=torch.tensor(
                [[pad_id] * pad + list(row) for pad, row in zip(pads, rows, strict=True)]
            ),
            mask=torch.tensor(
                [[False] * pad + [True] * len(row) for pad, row in zip(pads, rows, strict=True)]
            ),
            texts=tuple(str(row) for row in rows),
            answers=tuple(f"answer {row}" for row in range(len(rows))),
            columns={"number": tuple(range(len(rows)))},
            row_ids=tuple(row_ids or range(len(rows))),
        )

    return prompts


@pytest.fixture
def markov():
    """`markov(logits)`: a model whose logits after token i are `logits[i]`, whatever came before.

    A Llama without layers: one-hot embeddings of norm 1, which the final norm multiplies by
    sqrt(vocab), and an output matrix of `logits` divided by that. Its end id is 2.
    """

    def model(logits: torch.Tensor) -> LlamaForCausalLM:
        size = len(logits)
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=4,
            num_hidden_layers=0,
            num_attention_heads=1,
            rms_norm_eps=0.0,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=None,
        )
        llama = LlamaForCausalLM(config)
        with torch.no_grad():
            llama.model.embed_tokens.weight.copy_(torch.eye(size))
            llama.lm_head.weight.copy_(logits.T / size**0.5)
        return llama

    return model


@pytest.fixture
def chain(markov):
    """`chain({5: 7, 7: 2})`: a model that says 7 after 5, 2 after 7, and 0 after all else."""

    def model(following: dict[int, int], size: int = 14) -> LlamaForCausalLM:
        logits = torch.zeros(size, size)
        for token in range(size):
            logits[token, following.get(token, 0)] = 100.0
        return markov(logits)

    return model
