"""A loss or gradient that is not finite takes no step, is counted, and ends a run that is ill."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from lit_rl.algorithms import PPO
from lit_rl.callbacks import RLCallback
from lit_rl.policy_losses import ClippedSurrogate
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives


class Broken(ClippedSurrogate):
    """A loss that is not finite in the passes of some numbers, from 0."""

    def __init__(self, *passes, value=float("nan"), where="loss"):
        super().__init__()
        vars(self).update(passes=set(passes), value=value, where=where, count=0)

    def __call__(self, log_probs, experience):
        loss = super().__call__(log_probs, experience)
        if self.count in self.passes:
            if self.where == "gradient":
                log_probs.register_hook(lambda gradient: gradient * self.value)
            else:
                loss = loss * self.value
        vars(self)["count"] = self.count + 1
        return loss


class Weights(RLCallback):
    def __init__(self):
        self.weights, self.skipped = [], []

    def on_rollout(self, trainer, module, scored, experience):
        self.note(module)

    def on_minibatch(self, trainer, module, update):
        self.note(module)
        self.skipped.append(module.skipped_updates)

    def note(self, module):
        self.weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]).clone())


@pytest.fixture
def build(algorithm):
    return partial(
        algorithm,
        reward=PythonFunction(num_fives),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        num_minibatches=2,
    )


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_step_is_skipped_and_counted_and_the_next_is_taken(build, fit, value, where):
    """Updates 0, 1, 3 of two iterations are taken, update 2 is not; one pass each."""
    seen = Weights()
    module = build(policy_loss=Broken(2, value=value, where=where))
    trainer = fit(module, iterations=2, callbacks=[seen])
    # Before, after 0, after 1, before 2, after 2, after 3.
    moved = [not torch.equal(a, b) for a, b in pairwise(seen.weights)]
    assert moved == [True, True, False, False, True]
    assert seen.skipped == [0, 0, 1, 1]
    assert trainer.callback_metrics["skipped_updates"] == 1
    assert all(weights.isfinite().all() for weights in seen.weights)
    for state in trainer.optimizers[0].state.values():
        assert state["exp_avg"].isfinite().all()
        assert state["step"] == 3


def test_the_step_after_a_skipped_one_is_that_of_a_run_without_it(build, fit, weights):
    """No gradient of a skipped minibatch is left: with SGD the rest is the step of the other."""
    runs = []
    for broken in (0, None):
        module = build(policy_loss=Broken(broken), optimizer=partial(torch.optim.SGD, lr=0.5))
        module.configure_model()
        dealt = module.minibatches
        if broken is None:  # the second minibatch alone
            module.minibatches = lambda epoch, dealt=dealt: dealt(epoch)[1:]
        fit(module, iterations=1)
        assert module.skipped_updates == (broken is not None)
        runs.append(weights(module))
    assert torch.equal(*runs)


def test_the_run_ends_after_some_in_a_row_with_the_rows_and_no_weight_touched(build, fit, tmp_path):
    seen = Weights()
    module = build(policy_loss=Broken(*range(1, 9)), max_skipped_updates=3)
    message = r"not finite in 3 updates in a row, the last update 2 of iteration 2; .*\.pt"
    with pytest.raises(FloatingPointError, match=message):
        fit(module, iterations=6, callbacks=[seen])
    assert torch.equal(seen.weights[1], seen.weights[-1])
    (file,) = tmp_path.glob("non-finite-iteration2-update2-rank0.pt")
    rows = torch.load(file, weights_only=True)
    # 6 prompts x 4 responses in two minibatches are 12 rows.
    assert len(rows["response_ids"]) == len(rows["advantages"]) == 12
    assert rows["mask"].any(1).all()


def test_a_finite_update_between_begins_the_count_anew(build, fit):
    module = build(policy_loss=Broken(0, 1, 3, 4, 6), max_skipped_updates=3)
    fit(module, iterations=4)
    assert (module.skipped_updates, module.skipped_in_a_row) == (5, 0)


def test_the_counts_are_resumed(build, fit, tmp_path):
    fit(build(policy_loss=Broken(0, 1)), iterations=1).save_checkpoint(tmp_path / "one.ckpt")
    resumed = build(policy_loss=Broken(0))
    with pytest.raises(FloatingPointError, match="the last update 1 of iteration 2"):
        fit(resumed, iterations=2, ckpt_path=tmp_path / "one.ckpt")
    assert resumed.skipped_updates == 3


def test_a_critic_that_is_not_finite_leaves_the_actor_alone_too(build, fit):
    seen = Weights()
    module = build(kind=PPO, kl_coef=0.0)
    critic_loss = module.critic_loss
    module.critic_loss = lambda *arguments: critic_loss(*arguments) * float("nan")
    with pytest.raises(FloatingPointError):
        fit(module, iterations=2, callbacks=[seen])
    assert torch.equal(seen.weights[0], seen.weights[-1])


def test_weights_that_are_not_finite_reach_no_checkpoint(build, fit, tmp_path):
    path = tmp_path / "one.ckpt"
    module = build()
    trainer = fit(module, iterations=1)
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    with torch.no_grad():
        next(module.policy.parameters()).view(-1)[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"the weights policy\.model\..* are not finite"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == before


def test_fewer_than_one_is_refused(build):
    with pytest.raises(ValueError, match="max_skipped_updates is 0, must be at least 1"):
        build(max_skipped_updates=0)
