"""A micro-batch that needs too much memory is split, and its minibatch is repeated exactly."""

from functools import partial

import pytest
import torch

from lit_rl.algorithms.old_log_probs import CurrentLogProbs
from lit_rl.algorithms.out_of_memory import is_out_of_memory
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


class Accelerator:
    """Refuses passes over more than some tokens, padding included, but not the first pass."""

    def __init__(self, module, most_tokens, error):
        self.forward_pass, self.most_tokens, self.error = module.forward_pass, most_tokens, error
        self.tokens = []

    def __call__(self, experience):
        self.tokens.append(experience.prompt_ids.numel() + experience.response_ids.numel())
        if self.tokens[-1] > self.most_tokens and len(self.tokens) > 1:
            raise self.error
        return self.forward_pass(experience)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
]


@pytest.fixture
def run(algorithm, fit, weights):
    """Train two iterations of one minibatch of 24 rows of up to 8 tokens."""

    def run(most_tokens=None, error=ERRORS[0], **settings):
        module = algorithm(
            reward=PythonFunction(num_fives),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            layout="padded",
            # Others are computed within the budget, too, and differ in their last bits.
            old_log_probs=CurrentLogProbs(),
            **settings,
        )
        device = None
        if most_tokens is not None:
            device = Accelerator(module, most_tokens, error)
            module.forward_pass = device
        fit(module, iterations=2)
        return module, weights(module), device

    return run


@pytest.mark.parametrize("error", ERRORS)
def test_the_minibatch_is_repeated_with_half_the_tokens(run, error):
    """96 tokens fit once, then only 48: the run is that of a budget of 48 from the start.

    The first pass succeeds and leaves its gradient; the second fails. Both are repeated, so were
    the gradient left, the rows of the first would count twice.
    """
    with pytest.warns(UserWarning, match=r"memory ran out in iteration 1: .* is 48 instead of 96"):
        split, moved, device = run(48, error, micro_batch_tokens=96)
    assert split.micro_batch_tokens == 48
    assert max(device.tokens[:2]) > 48
    assert max(device.tokens[2:]) <= 48
    _, right, _ = run(micro_batch_tokens=48)
    assert torch.equal(moved, right)


def test_a_budget_far_above_the_rows_is_halved_until_they_part(run):
    """24 rows of 8 tokens are 192: of 16384, the first halves change nothing."""
    with pytest.warns(UserWarning, match="instead of 16384") as warned:
        split, _, device = run(96, micro_batch_tokens=16384)
    assert split.micro_batch_tokens < 192
    assert sum("memory ran out" in str(w.message) for w in warned) <= 2
    assert max(device.tokens[4:]) <= 96


def test_a_single_row_that_does_not_fit_is_the_error_itself(run):
    with (
        pytest.warns(UserWarning, match="memory ran out"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        run(0, micro_batch_tokens=16)


def test_another_error_is_raised_at_once(run):
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(48, RuntimeError("shapes differ"), micro_batch_tokens=96)


def test_what_accelerators_and_the_cpu_say():
    assert all(is_out_of_memory(error) for error in ERRORS)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
