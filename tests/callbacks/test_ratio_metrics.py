"""Clip fractions, KL to the old policy, ratios, and the sampler's difference."""

import math

import pytest

from lit_rl.callbacks import RatioMetrics
from lit_rl.policy_losses import ClippedSurrogate, OffPolicySequenceMask
from lit_rl.policy_losses.base import PolicyLoss
from lit_rl.sampler_corrections import ImportanceMask, TruncatedImportance

NAN = float("nan")


def test_clip_fraction_counts_only_tokens_where_the_clip_binds(make, iterate):
    # Both ratios are 1.5, above 1 + 0.2; with a negative advantage the unclipped term is the larger
    # loss, so only the first token loses its gradient.
    experience = make.experience([[1, 1]], old=[[0.0, 0.0]], advantages=[[1.0, -1.0]])
    logged = iterate(RatioMetrics(), make.update((experience, [[math.log(1.5)] * 2])))
    assert logged["ratio/clip_high_fraction"] == 0.5
    assert logged["ratio/clip_low_fraction"] == 0.0


def test_low_side_binds_for_negative_advantages(make, iterate):
    experience = make.experience([[1, 1]], old=[[0.0, 0.0]], advantages=[[1.0, -1.0]])
    logged = iterate(RatioMetrics(), make.update((experience, [[math.log(0.5)] * 2])))
    assert logged["ratio/clip_low_fraction"] == 0.5
    assert logged["ratio/clip_high_fraction"] == 0.0


def test_dual_clip_fraction(make, iterate):
    # Ratio 5 above the dual clip 3 at a negative advantage: 1 of 4 tokens.
    experience = make.experience([[1] * 4], old=[[0.0] * 4], advantages=[[-1.0, 1.0, 0.0, -1.0]])
    new = [[math.log(5), math.log(5), math.log(5), 0.0]]
    module = make.module(ClippedSurrogate(dual_clip=3.0))
    logged = iterate(RatioMetrics(), make.update((experience, new)), module=module)
    assert logged["ratio/dual_clip_fraction"] == 0.25


def test_a_loss_without_clips_logs_the_same_keys_as_zero(make, iterate):
    class Plain(PolicyLoss):
        def __call__(self, log_probs, experience):
            return log_probs

    experience = make.experience([[1]], old=[[0.0]], advantages=[[1.0]])
    update = make.update((experience, [[1.0]]))
    plain = iterate(RatioMetrics(), update, module=make.module(Plain()))
    assert list(plain) == list(iterate(RatioMetrics(), update))
    sides = ("clip_low", "clip_high", "dual_clip", "off_policy")
    assert [plain[f"ratio/{side}_fraction"] for side in sides] == [0.0, 0.0, 0.0, 0.0]


def test_off_policy_fraction_counts_the_tokens_that_the_mask_leaves_out(make, iterate):
    # Old minus new: 1 nat per token in both rows; only the first has a negative advantage.
    mask, old = [[1, 1], [1, 1]], [[-1.0, -1.0]] * 2
    experience = make.experience(mask, old=old, advantages=[[-1.0, -1.0], [1.0, 1.0]])
    module = make.module(OffPolicySequenceMask(ClippedSurrogate(), max_kl=0.5))
    update = make.update((experience, [[-2.0, -2.0]] * 2))
    logged = iterate(RatioMetrics(), update, module=module)
    assert logged["ratio/off_policy_fraction"] == 0.5
    # The ratio exp(-1) is below 0.8, but it is the mask that stops the gradient.
    assert logged["ratio/clip_low_fraction"] == 0.0


def weights_of(iterate, make, correction, *updates):
    logged = iterate(RatioMetrics(), *updates, module=make.module(sampler_correction=correction))
    names = ("effective_sample_size", "weight_mean", "masked_fraction")
    return [logged[f"sampler/{name}"] for name in names]


def test_weights_of_the_sampler_correction_by_hand(make, iterate):
    # Ratios 1, 3 and, at a token that does not count, NaN; old log-probs 0.
    sampler = [[0.0, -math.log(3), NAN]]
    experience = make.experience([[1, 1, 0]], old=[[0.0, 0.0, NAN]], sampler=sampler)
    update = make.update((experience, [[-5.0, -5.0, NAN]]))
    # Weights 1 and 2: (1 + 2)^2 / (1 + 4) / 2 tokens.
    truncated = weights_of(iterate, make, TruncatedImportance("token"), update)
    assert truncated == pytest.approx([0.9, 1.5, 0.0])
    # Weights 1 and 0: one token of two is left.
    masked = weights_of(iterate, make, ImportanceMask("token"), update)
    assert masked == pytest.approx([0.5, 0.5, 0.5])


def test_the_effective_sample_size_is_that_of_all_micro_batches_and_updates(make, iterate):
    one = make.experience([[1]], old=[[0.0]], sampler=[[0.0]])
    two = make.experience([[1]], old=[[0.0]], sampler=[[-math.log(2)]])
    new = [[0.0]]
    # Each alone has 1 of 1; together (1 + 2)^2 / (1 + 4) of 2.
    in_one_update = [make.update((one, new), (two, new))]
    in_two_updates = [make.update((one, new)), make.update((two, new), index=1)]
    for updates in (in_one_update, in_two_updates, 2 * in_two_updates):
        weights = weights_of(iterate, make, TruncatedImportance("token"), *updates)
        assert weights == pytest.approx([0.9, 1.5, 0.0])


def test_own_log_probs_are_compared_with_the_sampler_where_there_are_no_old_ones(make, iterate):
    experience = make.experience([[1]], sampler=[[-math.log(2)]])
    weights = weights_of(
        iterate, make, TruncatedImportance("token"), make.update((experience, [[-math.log(4)]]))
    )
    assert weights == pytest.approx([1.0, 0.5, 0.0])


def test_weights_are_logged_only_where_there_is_a_correction(make, iterate):
    experience = make.experience([[1]], old=[[0.0]])
    logged = iterate(RatioMetrics(), make.update((experience, [[0.0]])))
    assert not {"sampler/weight_mean", "sampler/effective_sample_size"} & logged.keys()


def test_an_iteration_without_tokens_logs_weights_as_nan(make, iterate):
    weights = weights_of(iterate, make, TruncatedImportance("token"), make.update())
    assert all(math.isnan(value) for value in weights)


def test_kl_and_ratios_by_hand_without_masked_tokens(make, iterate):
    # Old minus new: 1 and -1. k1 = 0; k3 = exp(d) - 1 - d with d = -1 and 1:
    # (exp(-1) - 1 + 1 + exp(1) - 1 - 1) / 2 = (exp(-1) + exp(1) - 2) / 2.
    experience = make.experience([[1, 1, 0]], old=[[-1.0, -2.0, NAN]], sampler=[[-1.0, -4.0, NAN]])
    logged = iterate(RatioMetrics(), make.update((experience, [[-2.0, -1.0, NAN]])))
    assert logged["ratio/approx_kl_k1"] == pytest.approx(0.0, abs=1e-15)
    assert logged["ratio/approx_kl_k3"] == pytest.approx((math.exp(-1) + math.e - 2) / 2)
    assert logged["ratio/mean"] == pytest.approx((math.exp(-1) + math.e) / 2)
    assert logged["ratio/min"] == pytest.approx(math.exp(-1))
    assert logged["ratio/max"] == pytest.approx(math.e)
    # |sampler - new|: 1 and 3.
    assert logged["sampler/abs_difference_mean"] == 2.0
    assert logged["sampler/abs_difference_max"] == 3.0


def test_approximate_kl_is_old_minus_new(make, iterate):
    experience = make.experience([[1]], old=[[-1.0]])
    logged = iterate(RatioMetrics(), make.update((experience, [[-1.5]])))
    assert logged["ratio/approx_kl_k1"] == 0.5


def test_own_log_probs_are_the_old_ones_where_there_are_none(make, iterate):
    experience = make.experience([[1, 1]], sampler=[[-1.0, -1.0]])
    logged = iterate(RatioMetrics(), make.update((experience, [[-1.25, -1.0]])))
    assert logged["ratio/min"] == logged["ratio/max"] == 1.0
    assert logged["ratio/approx_kl_k3"] == 0.0
    assert logged["sampler/abs_difference_max"] == 0.25


def test_sampler_is_compared_before_the_first_step_only(make, iterate):
    experience = make.experience([[1]], old=[[-1.0]], sampler=[[-1.0]])
    first = make.update((experience, [[-1.125]]), index=0)
    second = make.update((experience, [[-3.0]]), index=1)
    logged = iterate(RatioMetrics(), first, second)
    assert logged["sampler/abs_difference_max"] == 0.125
    # The ratios are over both steps.
    assert logged["ratio/approx_kl_k1"] == pytest.approx((0.125 + 2.0) / 2)


def test_any_split_into_micro_batches_gives_the_metrics_of_the_whole(make, iterate):
    mask = [[1, 1], [1, 0], [1, 1]]
    old = [[-1.0, -2.0], [-0.5, NAN], [-3.0, -0.25]]
    new = [[-1.5, -1.0], [-0.75, NAN], [-3.0, -2.0]]
    advantages = [[1.0, 1.0], [-1.0, 0.0], [-1.0, -1.0]]

    def update(*groups):
        return make.update(
            *(
                (
                    make.experience(
                        [mask[row] for row in rows],
                        old=[old[row] for row in rows],
                        sampler=[old[row] for row in rows],
                        advantages=[advantages[row] for row in rows],
                    ),
                    [new[row] for row in rows],
                )
                for rows in groups
            )
        )

    whole = iterate(RatioMetrics(), update([0, 1, 2]))
    for split in (update([0], [1], [2]), update([2, 0], [1])):
        assert iterate(RatioMetrics(), split) == pytest.approx(whole, rel=1e-15)
    # 5 tokens: the mean of the means of single rows would divide by 3.
    assert whole["ratio/approx_kl_k1"] == pytest.approx((0.5 - 1.0 + 0.25 + 0.0 + 1.75) / 5)


def test_each_iteration_begins_anew(make, iterate):
    callback = RatioMetrics()
    experience = make.experience([[1]], old=[[-1.0]])
    iterate(callback, make.update((experience, [[-9.0]])))
    logged = iterate(callback, make.update((experience, [[-1.0]])))
    assert logged["ratio/min"] == logged["ratio/mean"] == 1.0


def test_an_iteration_without_tokens_logs_the_same_keys(make, iterate):
    experience = make.experience([[1]], old=[[-1.0]])
    keys = list(iterate(RatioMetrics(), make.update((experience, [[-1.0]]))))
    empty = iterate(RatioMetrics(), make.update())
    assert list(empty) == keys
    assert all(math.isnan(value) for value in empty.values())
