"""Runs that train an adapter: one base for every role, which nothing moves."""

from functools import partial

import lightning as L
import pytest
import torch

from acting import StopAfter
from lit_rl.algorithms import GRPO, PPO, TRPO
from lit_rl.callbacks import ReferenceSync, RLCallback
from lit_rl.models import (
    LoRA,
    PretrainedCausalLM,
    PretrainedLoRA,
    RandomCausalLM,
    SharedTrunk,
    save_pretrained,
)
from lit_rl.models.adapters import adapter_layers, base_parameters
from lit_rl.rewards import PythonFunction
from tiny_job import num_fives

LORA, DORA = LoRA(rank=4, alpha=8), LoRA(rank=4, alpha=8, use_dora=True)


@pytest.fixture
def adapted(algorithm):
    """An algorithm that trains an adapter on a reward with signal in almost every group."""
    return partial(
        algorithm,
        adapter=LORA,
        reward=PythonFunction(num_fives),
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        num_minibatches=2,
        kl_coef=0.05,
    )


def trained(module):
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


class Recorder(RLCallback):
    """What the rollouts say of policy and reference, and the adapter at the start."""

    def __init__(self):
        self.kls, self.ref_log_probs = [], []

    def on_train_start(self, trainer, module):
        self.start = trained(module)

    def on_rollout(self, trainer, module, scored, experience):
        self.experience = experience
        difference = (experience.old_log_probs - experience.ref_log_probs)[experience.mask]
        self.kls.append(float(difference.abs().max()))


@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize(
    ("kind", "settings"), [(GRPO, {}), (PPO, {}), (PPO, {"critic": SharedTrunk()})]
)
def test_training_moves_every_adapter_and_no_base(adapted, fit, kind, settings, adapter):
    module, recorder = adapted(kind, adapter=adapter, **settings), Recorder()
    trainer = fit(module, iterations=3, callbacks=[recorder])
    after = trained(module)
    for name, before in recorder.start.items():
        assert not torch.equal(after[name], before), name
        assert ".lora_" in name or name.startswith("critic.head."), name

    plain = module.source.model(module.seed)
    for ours, original in zip(base_parameters(module.policy), plain.parameters(), strict=True):
        assert torch.equal(ours, original)
    groups = trainer.optimizers[0].param_groups
    in_optimizer = {id(parameter) for group in groups for parameter in group["params"]}
    assert in_optimizer == {id(p) for p in module.parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_every_role_stands_upon_one_base(adapted, fit, kind):
    """The bytes of all parameters together: one model, and what the roles train."""
    module = adapted(kind)
    fit(module, iterations=1)
    roles = [module, module.reference]
    storages = {p.data_ptr(): p.nbytes for role in roles for p in role.parameters()}
    base = sum(p.nbytes for p in module.source.model(0).parameters())
    adapters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    of_reference = sum(p.nbytes for p in module.policy.parameters() if p.requires_grad)
    assert sum(storages.values()) == base + adapters + of_reference


@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
def test_the_reference_says_the_same_before_and_after_training(adapted, fit, adapter):
    module, recorder = adapted(adapter=adapter), Recorder()
    fit(module, iterations=4, callbacks=[recorder])
    assert module.reference is not module.policy
    assert all(layer.disable_adapters for layer in adapter_layers(module.reference).values())
    assert not any(parameter.requires_grad for parameter in module.reference.parameters())
    assert not any(part.training for part in module.reference.modules())
    fresh = adapted(adapter=None)  # the base by itself, of the same seed
    fresh.configure_model()
    experience = recorder.experience
    now, then = (
        module.output_under(policy, experience) for policy in (module.reference, fresh.policy)
    )
    assert torch.equal(now.log_probs, then.log_probs)
    assert not torch.equal(now.log_probs, module.output_under(module.policy, experience).log_probs)


@pytest.fixture
def sft(source, tmp_path):
    """The folder of an adapter that changes what the model says."""

    def write(adapter=LORA):
        model = source().model(0)
        adapter.inject(model, seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1
        folder = tmp_path / "sft"
        save_pretrained(model, source().tokenizer(), folder, adapter_only=True)
        return PretrainedLoRA(str(folder))

    return write


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("start", ["new", "sft"])
def test_the_kl_starts_at_zero_and_does_not_stay_there(
    adapted, fit, source, sft, start, kind, dtype, precision
):
    adapter = kind if start == "new" else sft(kind)
    module, recorder = adapted(adapter=adapter, source=source(dtype=dtype)), Recorder()
    fit(module, iterations=2, callbacks=[recorder], precision=precision)
    assert recorder.kls[0] == 0.0
    assert recorder.kls[1] > 0.0


def test_the_reference_of_a_run_from_an_adapter_is_that_adapter(adapted, fit, source, sft):
    adapter = sft()
    module, recorder = adapted(adapter=adapter), Recorder()
    fit(module, iterations=3, callbacks=[recorder])
    base, start = source().model(0), source().model(0)
    adapter.inject(start, seed=0)
    ids = torch.arange(8)[None]
    assert torch.equal(module.reference.model(ids).logits, start(ids).logits)
    assert not torch.equal(module.reference.model(ids).logits, base(ids).logits)


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(LORA, id="lora"),
        pytest.param(DORA, id="dora", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [(GRPO, []), (PPO, []), (GRPO, [partial(ReferenceSync, 2, weight=0.5)])],
)
def test_resumed_run_is_the_uninterrupted_one(adapted, fit, tmp_path, kind, callbacks, adapter):
    def run(**settings):
        module = adapted(kind, adapter=adapter)
        extra = settings.pop("callbacks", [])
        fit(module, iterations=6, callbacks=[*extra, *(make() for make in callbacks)], **settings)
        return module

    whole, path = run(), tmp_path / "stopped.ckpt"
    run(callbacks=[StopAfter(3, path)])
    resumed = run(ckpt_path=path)
    assert resumed.iteration == 6
    expected = trained(whole)
    assert len(expected) > 10
    for name, weight in trained(resumed).items():
        assert torch.equal(weight, expected[name]), name
    pairs = zip(resumed.reference.parameters(), whole.reference.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("callbacks", [[], [ReferenceSync(1)]])
def test_a_checkpoint_holds_adapters_and_heads_only(adapted, fit, tmp_path, callbacks):
    module = adapted(PPO)
    fit(module, iterations=1, callbacks=callbacks).save_checkpoint(tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(trained(module))
    if callbacks:
        assert checkpoint["lit_rl_reference"].keys() == {
            name.removeprefix("policy.") for name in trained(module) if name.startswith("policy.")
        }


@pytest.mark.parametrize("start", ["new", "sft"])
def test_a_policy_that_was_validated_first_is_trained_to_the_same(
    adapted, fit, data, sft, tmp_path, start
):
    """Its reference comes later than the policy, and stands upon the same base nonetheless."""
    adapter = LORA if start == "new" else sft()
    path, whole = tmp_path / "two.ckpt", adapted(adapter=adapter)
    fit(whole, iterations=4)
    fit(adapted(adapter=adapter), iterations=4, callbacks=[StopAfter(2, path)])

    module = adapted(adapter=adapter)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.validate(module, data(), ckpt_path=path, verbose=False)
    assert module.reference is None
    fit(module, iterations=4, ckpt_path=path)
    expected = trained(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in trained(module).items())
    base = base_parameters(module.policy)
    pairs = zip(base_parameters(module.reference), base, strict=True)
    assert all(ours is theirs for ours, theirs in pairs)


def test_an_adapter_upon_another_base_is_refused(adapted, fit, tmp_path):
    module = adapted()
    fit(module, iterations=1).save_checkpoint(tmp_path / "one.ckpt")
    other = adapted(seed=5)  # other random weights
    with pytest.raises(ValueError, match="not of an adapter upon the weights of RandomCausalLM"):
        fit(other, iterations=2, ckpt_path=tmp_path / "one.ckpt")


def test_a_checkpoint_of_whole_weights_is_refused_by_an_adapter(adapted, fit, tmp_path):
    fit(adapted(adapter=None), iterations=1).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match="leave the adapter out if it had none"):
        fit(adapted(), iterations=2, ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
def test_gradient_checkpointing_changes_no_bit(adapted, fit, adapter):
    """Policy and critic share a base; each is recomputed with its own adapter."""

    def weights(**settings):
        module = adapted(PPO, adapter=adapter, **settings)
        fit(module, iterations=2)
        return trained(module)

    plain, checkpointed = weights(), weights(gradient_checkpointing=True)
    assert all(torch.equal(checkpointed[name], weight) for name, weight in plain.items())


def test_a_synced_reference_is_the_policy_of_that_moment(adapted, fit):
    """Synced behind iterations 2 and 4: the KL is 0 at iterations 1, 3 and 5."""
    recorder = Recorder()
    fit(adapted(), iterations=5, callbacks=[recorder, ReferenceSync(2)])
    assert [kl == 0.0 for kl in recorder.kls] == [True, False, True, False, True]


def test_a_half_synced_reference_is_the_mean_of_the_adapters(adapted, fit):
    recorder = Recorder()
    module = adapted()
    fit(module, iterations=1, callbacks=[recorder, ReferenceSync(1, weight=0.5)])
    after, reference = trained(module), dict(module.reference.named_parameters())
    for name, before in recorder.start.items():
        mean = 0.5 * (before + after[name])
        torch.testing.assert_close(reference[name.removeprefix("policy.")], mean)


def test_trpo_moves_the_adapter_within_its_trust_region(adapted, fit):
    module, recorder = adapted(TRPO, num_minibatches=1, max_kl=0.01), Recorder()
    fit(module, iterations=2, callbacks=[recorder])
    after, start = trained(module), recorder.start
    assert not any(torch.equal(after[name], before) for name, before in start.items())
    experience = recorder.experience
    log_probs = module.output_under(module.policy, experience).log_probs
    mean = float((experience.old_log_probs - log_probs)[experience.mask].mean())
    assert 0 < abs(mean) < 0.1


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (LoRA(dropout=0.1), r"adapter\.dropout 0\.1 gives old and new policy"),
        (DORA, "adapter LoRA is DoRA, whose gradient takes the norms of rows as constants"),
    ],
)
def test_trpo_refuses_an_adapter_without_a_second_derivative(adapted, fit, adapter, message):
    with pytest.raises(ValueError, match=message):
        fit(adapted(TRPO, adapter=adapter, num_minibatches=1), iterations=1)


def test_dropout_is_off_where_the_policy_is_scored(adapted, fit):
    """Sampled and recomputed log-probs agree as they do without dropout; the ratio does not."""
    difference = {}

    class Compare(RLCallback):
        def on_rollout(self, trainer, module, scored, experience):
            gap = scored.sampler_log_probs - experience.old_log_probs
            difference["sampler"] = float(gap[scored.mask].abs().max())

        def on_minibatch(self, trainer, module, update):
            ((batch, output),) = update.micro_batches
            gap = (output.log_probs - batch.old_log_probs)[batch.mask]
            difference["update"] = float(gap.abs().max())

    adapter = LoRA(rank=4, dropout=0.5)
    fit(adapted(adapter=adapter, num_minibatches=1), iterations=2, callbacks=[Compare()])
    assert difference["sampler"] < 1e-5
    assert difference["update"] > 1e-3


class FourBits(RandomCausalLM):
    """A source that says of itself what one of quantized weights does."""

    @property
    def quantized(self):
        return True


def test_quantized_weights_are_refused_where_they_cannot_be_trained(adapted, fit, source):
    original = source()
    quantized = FourBits(config=original.config, alphabet=original.alphabet)
    with pytest.raises(ValueError, match="load_in_4bit freezes the weights: train an adapter"):
        adapted(source=quantized, adapter=None)
    with pytest.raises(ValueError, match="load_in_4bit has no second derivative"):
        adapted(TRPO, source=quantized)
    with pytest.raises(ValueError, match="load_in_4bit needs an accelerator"):
        fit(adapted(source=quantized), iterations=1)


def test_an_adapter_upon_a_folder_is_the_one_upon_its_source(adapted, fit, source, tmp_path):
    """A run upon exported weights is, bit for bit, the run upon the weights themselves."""
    save_pretrained(source().model(0), source().tokenizer(), tmp_path / "base")
    runs = [adapted(), adapted(source=PretrainedCausalLM(str(tmp_path / "base")))]
    for module in runs:
        fit(module, iterations=2)
        assert adapter_layers(module.policy)
    first, second = map(trained, runs)
    assert all(torch.equal(second[name], weight) for name, weight in first.items())
