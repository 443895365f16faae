"""Values and gradients against numbers that another library computed in float64.

`LIT_RL_GOLDEN` names another file of the same form. verl adds 1e-8 to some counts and we add
nothing, which is why the tolerance is 1e-7.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from lit_rl.advantages import (
    gae,
    greedy_baseline,
    group_centered,
    group_centered_whitened,
    group_normalized,
    leave_one_out,
    optimal_baseline,
    return_to_go,
    whitened_return,
)
from lit_rl.advantages.whitening import whitened
from lit_rl.aggregations import (
    FixedLength,
    SequenceMean,
    SequenceSum,
    TokenMean,
    TokenSum,
    Totals,
)
from lit_rl.callbacks.kl_controllers import adaptive_kl_coef
from lit_rl.functional import (
    kl_abs,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_mean,
    token_log_probs_and_entropy,
    unbiased_gradient,
)
from lit_rl.policy_losses import (
    binding_clips,
    binding_sequence_clips,
    binding_weight_clips,
    clipped_surrogate,
    clipped_weight,
    geometric_mean_clipped,
    log_prob_surrogate,
    sequence_clipped,
    soft_gate,
)
from lit_rl.value_losses import clipped_value_loss, value_clip_binds

FILE = Path(os.environ.get("LIT_RL_GOLDEN", Path(__file__).parent / "golden" / "verl-0.9.1.json"))
CASES = json.loads(FILE.read_text())["cases"]

COVERED = {
    "adaptive_kl",
    "aggregate",
    "entropy",
    "gae",
    "grpo",
    "kl",
    "opo",
    "policy_loss/cispo",
    "policy_loss/geo_mean",
    "policy_loss/gpg",
    "policy_loss/gspo",
    "policy_loss/sapo",
    "policy_loss/vanilla",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "value_loss",
}

KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "abs": kl_abs}
LARGEST_KL_OF_VERL = 10.0


def cases_of(kind):
    """Parametrize over the cases of a kind, named by position in the file and parameters."""
    chosen = [(number, case) for number, case in enumerate(CASES) if case["kind"] == kind]
    ids = []
    for number, case in chosen:
        params = [str(value) for name, value in case["params"].items() if name != "note"]
        ids.append("-".join([str(number), *params]))
    return pytest.mark.parametrize("case", [case for _, case in chosen], ids=ids)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(case):
    """The inputs as float64 tensors, the mask as booleans."""
    inputs = {name: float64(values) for name, values in case["inputs"].items()}
    if "mask" in inputs:
        inputs["mask"] = inputs["mask"].bool()
    return inputs


def aggregation_of(params):
    """Our aggregation for a name of verl's."""
    match params["aggregation"]:
        case "token-mean":
            return TokenMean()
        case "token-sum":
            return TokenSum()
        case "seq-mean-token-mean":
            return SequenceMean()
        case "seq-mean-token-sum":
            return SequenceSum()
        case "seq-mean-token-sum-norm":
            return FixedLength(length=params["normalizer"])
        case name:
            raise ValueError(f"no aggregation is known for {name}")


def assert_golden(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)


def test_every_kind_of_case_is_covered():
    assert {case["kind"] for case in CASES} <= COVERED


@cases_of("aggregate")
def test_aggregations(case):
    inputs = inputs_of(case)
    totals = Totals.of(inputs["mask"])
    loss = aggregation_of(case["params"])(inputs["losses"], inputs["mask"], totals)
    assert_golden(loss, float64(case["outputs"]["loss"]))


@cases_of("kl")
def test_kl_estimators(case):
    inputs, outputs, name = inputs_of(case), case["outputs"], case["params"]["estimator"]
    estimator = KL_ESTIMATORS[name.removesuffix("+")]
    if name.endswith("+"):
        estimator = unbiased_gradient(estimator)
    log_probs = inputs["logprobs"].requires_grad_()
    kl = estimator(log_probs, inputs["ref_logprobs"])
    kl.sum().backward()

    golden, gradient = float64(outputs["kl"]), float64(outputs["grad_logprobs_of_sum"])
    # We differ above 10: verl cuts k3 off there, and with it the gradient back to the reference.
    alike = (kl.detach() < LARGEST_KL_OF_VERL) | (not name.startswith("k3"))
    assert_golden(kl.detach()[alike], golden[alike])
    assert_golden(log_probs.grad[alike], gradient[alike])
    assert golden[~alike].eq(LARGEST_KL_OF_VERL).all()


@cases_of("adaptive_kl")
def test_adaptive_kl(case):
    params, coefficient = case["params"], case["params"]["init"]
    settings = {name: params[name] for name in ("target", "horizon")}
    course = []
    for kl in case["inputs"]["kl"]:
        num_responses = params["n_steps"]
        coefficient = adaptive_kl_coef(coefficient, kl, num_responses=num_responses, **settings)
        course.append(coefficient)
    assert_golden(float64(course), float64(case["outputs"]["coefficient"]))


@cases_of("entropy")
def test_entropy(case):
    logits = inputs_of(case)["logits"]
    targets = logits.argmax(dim=-1)
    mask = torch.ones_like(targets, dtype=torch.bool)
    _, entropy = token_log_probs_and_entropy(
        logits, torch.nn.Identity(), targets, mask=mask, temperature=1.0
    )
    assert_golden(entropy, float64(case["outputs"]["entropy"]))


def assert_advantages(actual, case, inputs, name="advantages"):
    """Compare the tokens that count: verl leaves numbers at tokens that are not the policy's."""
    golden = float64(case["outputs"][name])
    assert_golden(actual[inputs["mask"]], golden[inputs["mask"]])


def with_contiguous_groups(case):
    """The case with the rows of a group side by side, and the size of its groups."""
    _, sizes = torch.tensor(case["inputs"]["group"]).unique(return_counts=True)
    assert sizes.eq(sizes[0]).all(), f"our groups have one size, these have {sizes.tolist()}"
    by_group = torch.tensor(case["inputs"]["group"]).argsort(stable=True)
    parts = {
        part: {name: [rows[row] for row in by_group] for name, rows in case[part].items()}
        for part in ("inputs", "outputs")
    }
    return {**case, **parts}, int(sizes[0])


def assert_group_advantages(case, estimator):
    """Compare `estimator(rewards, group_size, valid=...)`."""
    case, group_size = with_contiguous_groups(case)
    inputs = inputs_of(case)
    mask = inputs["mask"]
    advantages = estimator(inputs["scores"], group_size, valid=mask.any(dim=1))
    assert_advantages(advantages[:, None] * mask, case, inputs)


@cases_of("grpo")
def test_group_mean_and_deviation(case):
    params = case["params"]
    assert params["ddof"] == 1

    def normalized(rewards, group_size, *, valid):
        return group_normalized(rewards, group_size, valid=valid, epsilon=params["eps"])

    assert_group_advantages(case, normalized if params["scale_by_std"] else group_centered)


@cases_of("rloo")
def test_leave_one_out(case):
    assert_group_advantages(case, leave_one_out)


@cases_of("opo")
def test_optimal_baseline(case):
    case, group_size = with_contiguous_groups(case)
    inputs = inputs_of(case)
    lengths = inputs["mask"].sum(dim=1)
    advantages = optimal_baseline(inputs["scores"], group_size, lengths=lengths)
    assert_advantages(advantages[:, None] * inputs["mask"], case, inputs)


@cases_of("reinforce_plus_plus_baseline")
def test_group_centered_whitened(case):
    case, group_size = with_contiguous_groups(case)
    inputs = inputs_of(case)
    advantages = group_centered_whitened(inputs["scores"], group_size, mask=inputs["mask"])
    assert_advantages(advantages, case, inputs)


@cases_of("reinforce_plus_plus")
def test_whitened_return(case):
    inputs, gamma = inputs_of(case), case["params"]["gamma"]
    rewards, mask = inputs["rewards"], inputs["mask"]
    assert_advantages(whitened_return(rewards, mask, gamma=gamma), case, inputs)
    assert_advantages(return_to_go(rewards, mask, gamma=gamma), case, inputs, "returns")


@cases_of("remax")
def test_greedy_baseline(case):
    inputs = inputs_of(case)
    rewards, mask = inputs["rewards"], inputs["mask"]
    assert_advantages(greedy_baseline(rewards, inputs["baseline"], mask), case, inputs)
    assert_advantages(return_to_go(rewards, mask, gamma=1.0), case, inputs, "returns")


@cases_of("gae")
def test_gae(case):
    inputs, params = inputs_of(case), case["params"]
    values, mask = inputs["values"], inputs["mask"]
    advantages = gae(inputs["rewards"], values, mask, gamma=params["gamma"], lam=params["lam"])
    assert_advantages(advantages, case, inputs)
    assert_advantages(advantages + values, case, inputs, "returns")
    assert_advantages(whitened(advantages, mask), case, inputs, "whitened_advantages")


@cases_of("value_loss")
def test_clipped_value_loss(case):
    inputs, outputs, params = inputs_of(case), case["outputs"], case["params"]
    mask, values = inputs["mask"], inputs["values"].requires_grad_()
    tokens = (values, inputs["old_values"], inputs["returns"], mask)
    per_token = clipped_value_loss(*tokens, clip=params["clip"]) * (params["factor"] / 0.5)
    loss = aggregation_of(params)(per_token, mask, Totals.of(mask))
    loss.backward()
    assert_golden(loss.detach(), float64(outputs["loss"]))
    assert_golden(values.grad, float64(outputs["grad_values"]))
    binds = value_clip_binds(*tokens, clip=params["clip"]).double()
    assert_golden(masked_mean(binds, mask), float64(outputs["clip_fraction"]))


@cases_of("policy_loss/vanilla")
def test_clipped_surrogate(case):
    inputs, outputs, params = inputs_of(case), case["outputs"], case["params"]
    mask, log_probs = inputs["mask"], inputs["logprobs"].requires_grad_()
    tokens = (log_probs, inputs["old_logprobs"], inputs["advantages"], mask)
    clips = {name: params[name] for name in ("clip_low", "clip_high", "dual_clip")}

    per_token = clipped_surrogate(*tokens, **clips)
    loss = aggregation_of(params)(per_token, mask, Totals.of(mask))
    loss.backward()
    assert_golden(loss.detach(), float64(outputs["loss"]))
    assert_golden(log_probs.grad, float64(outputs["grad_logprobs"]))

    # verl's one fraction is our low and high side together.
    binding = {name: flag.double() for name, flag in binding_clips(*tokens, **clips).items()}
    assert_golden(
        masked_mean(binding["low"] + binding["high"], mask), float64(outputs["pg_clipfrac"])
    )
    assert_golden(masked_mean(binding["dual"], mask), float64(outputs["pg_clipfrac_lower"]))
    old_to_new = kl_k1(inputs["old_logprobs"], log_probs.detach())
    assert_golden(masked_mean(old_to_new, mask), float64(outputs["ppo_kl"]))


def assert_policy_loss(case, loss_of, *names, **settings):
    """Compare value and gradient of `loss_of`, which is given the inputs of these names."""
    inputs, outputs = inputs_of(case), case["outputs"]
    mask, log_probs = inputs["mask"], inputs["logprobs"].requires_grad_()
    per_token = loss_of(*(inputs[name] for name in names), **settings)
    loss = aggregation_of(case["params"])(per_token, mask, Totals.of(mask))
    loss.backward()
    assert_golden(loss.detach(), float64(outputs["loss"]))
    assert_golden(log_probs.grad, float64(outputs["grad_logprobs"]))


def assert_clip_fraction(case, clips_of, *names, **settings):
    """Compare the low and the high side of `clips_of` together, as verl counts them."""
    inputs = inputs_of(case)
    clips = clips_of(*(inputs[name] for name in names), **settings)
    fraction = masked_mean((clips["low"] | clips["high"]).double(), inputs["mask"])
    assert_golden(fraction, float64(case["outputs"]["pg_clipfrac"]))


TOKENS = ("logprobs", "old_logprobs", "advantages", "mask")


def clip_range_of(case):
    return {name: case["params"][name] for name in ("clip_low", "clip_high")}


@cases_of("policy_loss/gspo")
def test_sequence_clipped(case):
    assert_policy_loss(case, sequence_clipped, *TOKENS, **clip_range_of(case))
    assert_clip_fraction(case, binding_sequence_clips, *TOKENS, **clip_range_of(case))


@cases_of("policy_loss/cispo")
def test_clipped_weight(case):
    assert_policy_loss(case, clipped_weight, *TOKENS, **clip_range_of(case))
    assert_clip_fraction(case, binding_weight_clips, *TOKENS, **clip_range_of(case))


# The fractions of verl are not compared: they count a ratio out of bounds on either side.
@cases_of("policy_loss/geo_mean")
def test_geometric_mean_clipped(case):
    assert_policy_loss(case, geometric_mean_clipped, *TOKENS, **clip_range_of(case))


@cases_of("policy_loss/sapo")
def test_soft_gate(case):
    params = case["params"]
    taus = {"tau_positive": params["tau_pos"], "tau_negative": params["tau_neg"]}
    assert_policy_loss(case, soft_gate, *TOKENS, **taus)


@cases_of("policy_loss/gpg")
def test_log_prob_surrogate(case):
    assert_policy_loss(case, log_prob_surrogate, "logprobs", "advantages", "mask")
