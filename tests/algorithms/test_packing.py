"""Packed passes within the loops: the same training, or none of it."""

import gc
import warnings
from functools import partial

import pytest
import torch

from lit_rl.algorithms import GRPO, PPO
from lit_rl.algorithms.free_memory import return_free_memory
from lit_rl.callbacks import RLCallback
from lit_rl.generation import SamplingSettings
from lit_rl.models import SharedTrunk, flex_packing
from lit_rl.rewards import PythonFunction

WIDE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}
FALLBACK = "packed and padded passes of LlamaForCausalLM differ"


def num_fives(responses, **columns):
    return [float(response.count("5")) for response in responses]


@pytest.fixture
def signal(algorithm):
    return partial(algorithm, reward=PythonFunction(num_fives))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {"kl_coef": 0.1}),
        (GRPO, {"gradient_checkpointing": True, "micro_batch_tokens": 20}),
        (PPO, {}),
        (PPO, {"critic": SharedTrunk()}),
    ],
    ids=["reference", "micro-batches", "critic", "shared trunk"],
)
def test_packing_changes_no_result(signal, fit, weights, kind, settings):
    """Law: the passes say the same up to rounding; SGD keeps a difference what it is."""
    results = []
    for layout in ("packed", "padded"):
        module = signal(kind, layout=layout, update_epochs=2, num_minibatches=2, **settings)
        fit(module)
        assert module.layout == layout
        assert {reader.layout for reader in module.readers} == {layout}
        results.append(weights(module))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
    initial = signal(kind, **settings)
    initial.configure_model()
    assert (results[0] - weights(initial)).abs().max() > 1e-3


def mixing(module):
    """A module whose layer reads the position before: across packed sequences."""
    module.configure_model()
    module.policy.model.model.layers[0].register_forward_hook(
        lambda layer, inputs, output: output + output.roll(1, dims=1)
    )
    return module


def test_an_architecture_that_does_not_fit_is_padded_with_a_warning(signal, fit, weights):
    with pytest.warns(UserWarning, match=FALLBACK):
        fit(found := mixing(signal()))
    assert found.layout == "padded"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=FALLBACK)
        fit(told := mixing(signal(layout="padded")))
    assert torch.equal(weights(found), weights(told))


def test_an_architecture_without_position_ids_is_padded(algorithm, source, fit):
    module = algorithm(source=source(BLOOM))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="packed and padded")
        fit(module)
    assert module.layout == "padded"


class UsesFlexAttention(RLCallback):
    """Switches flex attention on where a run on a CPU is refused."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.lay_out("packed_flex")


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled_flex_attention")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {"kl_coef": 0.1, "gradient_checkpointing": True, "micro_batch_tokens": 20}),
        (PPO, {}),
    ],
    ids=["reference", "critic"],
)
def test_flex_attention_changes_no_result(signal, source, fit, weights, kind, settings):
    """Rounding: packed and padded passes of this wider model differ by 4e-6 after the updates."""
    results = []
    for callbacks in ([UsesFlexAttention()], []):
        module = signal(kind, source=source(WIDE), update_epochs=2, num_minibatches=2, **settings)
        fit(module, callbacks=callbacks)
        assert module.layout == ("packed_flex" if callbacks else "packed")
        assert {reader.layout for reader in module.readers} == {module.layout}
        results.append(weights(module))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    initial = signal(kind, source=source(WIDE), **settings)
    initial.configure_model()
    assert (results[0] - weights(initial)).abs().max() > 1e-2


def test_flex_attention_that_differs_is_left_with_a_warning(
    signal, source, fit, weights, monkeypatch
):
    def wrong(query, key, value, **options):
        return torch.zeros_like(query)

    monkeypatch.setattr(flex_packing, "compiled", lambda: wrong)
    with pytest.warns(UserWarning, match="packed_flex and padded passes of LlamaForCausalLM di"):
        fit(found := signal(source=source(WIDE)), callbacks=[UsesFlexAttention()])
    assert found.layout == "packed"
    fit(told := signal(source=source(WIDE)))
    assert torch.equal(weights(found), weights(told))


@pytest.mark.usefixtures("uncompiled_flex_attention")
def test_an_architecture_that_fits_neither_is_padded(signal, source, fit):
    module = mixing(signal(source=source(WIDE)))
    with (
        pytest.warns(UserWarning, match="packed_flex and padded passes"),
        pytest.warns(UserWarning, match=FALLBACK),
    ):
        fit(module, callbacks=[UsesFlexAttention()])
    assert module.layout == "padded"


def test_flex_attention_is_refused_where_it_cannot_run(signal, source, fit):
    with pytest.raises(ValueError, match="packed_flex has a backward pass on CUDA devices only"):
        fit(signal(layout="packed_flex"))
    for settings, match in (
        ({"source": source(BLOOM)}, "BloomForCausalLM cannot be told positions"),
        ({"source": source({**WIDE, "attention_dropout": 0.1}, dropout=True)}, "drops no weights"),
        ({}, "needs heads of at least 16 numbers, and those of this model have 8"),
    ):
        with pytest.raises(ValueError, match=match):
            signal(layout="packed_flex", **settings).configure_model()


@pytest.mark.usefixtures("without_type_checks")
def test_a_layout_that_does_not_exist_is_refused(signal):
    with pytest.raises(ValueError, match="layout 'flat' is unknown; choose one of packed, packed_"):
        signal(layout="flat")


class LiveTensors(RLCallback):
    """Counts what is alive at the end of every tenth iteration, when the gradient is gone."""

    def __init__(self):
        self.counts = []

    def on_iteration_end(self, trainer, module):
        assert all(parameter.grad is None for parameter in module.parameters())
        if module.iteration % 10:
            return
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, whose lazy attributes it touches
            tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        self.counts.append((len(tensors), sum(t.numel() * t.element_size() for t in tensors)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GRPO, PPO])
def test_no_tensor_stays_over_200_iterations(algorithm, fit, kind):
    """Law: what lives after an iteration is weights, optimizer and one rollout, of equal shape.

    Responses have exactly 4 tokens.
    """
    live = LiveTensors()
    sampling = SamplingSettings(max_new_tokens=4, min_new_tokens=4)
    fit(algorithm(kind, sampling=sampling), iterations=200, callbacks=[live])
    assert len(live.counts) == 20
    assert live.counts[-1] == live.counts[2]


def test_freed_memory_goes_back_to_the_system():
    """Between tensors that stay, 200 MB of freed ones are kept by the C library of Linux."""
    resident = _resident_megabytes()
    if resident is None:
        pytest.skip("there is no /proc to read the resident memory from")
    kept, freed = [], []
    for _ in range(4000):
        freed.append(torch.ones(12_500))  # 50 KB: from the heap, not from a map of their own
        kept.append(torch.ones(64))
    full = _resident_megabytes()
    freed.clear()
    return_free_memory()
    assert full - resident > 150
    assert full - _resident_megabytes() > 150
    assert len(kept) == 4000


def _resident_megabytes():
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    except FileNotFoundError:
        return None
