import pytest
import torch

from lit_rl.generation.row_sampler import RowSampler, TokenSampler, draw, row_uniforms
from lit_rl.generation.sampling import SamplingSettings

# Probabilities of four tokens, two prompt columns before.
PROBABILITIES = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
IDS = torch.zeros(1, 2, dtype=torch.long)


def sampler(uniform, **settings):
    return TokenSampler(
        SamplingSettings(max_new_tokens=1, **settings), torch.full((1, 1), uniform), end_ids=(0,)
    )


def drawn(uniform, **settings):
    return int(sampler(uniform, **settings)(PROBABILITIES.log(), step=0).tokens)


def test_generate_is_left_one_token():
    row = RowSampler(sampler(0.51), prompt_tokens=2)
    scores = row(IDS, PROBABILITIES.log())
    assert scores.tolist() == [[-torch.inf, 0.0, -torch.inf, -torch.inf]]
    assert [int(draw.tokens) for draw in row.draws] == [1]


def test_numbers_of_a_row_depend_on_seed_row_id_and_place_alone():
    batch = row_uniforms((0, 3), [17, 4], group_size=3, num_tokens=5)
    assert torch.equal(batch[3:5], row_uniforms((0, 3), [4], group_size=2, num_tokens=5))
    assert batch.unique().numel() == 2 * 3 * 5  # no number comes twice
    for other_seed in ((1, 3), (0, 4)):
        other = row_uniforms(other_seed, [17, 4], group_size=3, num_tokens=5)
        assert not (batch == other).any()


def test_a_longer_response_begins_with_the_same_numbers():
    assert torch.equal(
        row_uniforms((0,), [1], group_size=1, num_tokens=9)[:, :4],
        row_uniforms((0,), [1], group_size=1, num_tokens=4),
    )


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.91, 3)]
)
def test_tokens_follow_the_cumulative_distribution(uniform, token):
    assert drawn(uniform) == token  # the sums are 0.5, 0.75, 0.9, 1


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    torch.manual_seed(0)
    for size in (3, 1000, 50_000):
        scores = torch.full((4, size), -torch.inf)
        allowed = torch.randint(1, size - 1, (4, 2))  # the first and the last token are not
        scores.scatter_(1, allowed, torch.randn(4, 2))
        tokens = draw(scores.softmax(1), torch.full((4,), uniform))
        assert (tokens[:, None] == allowed).any(dim=1).all()


def test_frequencies_are_the_softmax_probabilities():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 20_000
    uniforms = row_uniforms((5,), range(count), group_size=1, num_tokens=1)[:, 0]
    probabilities = logits.softmax(0)
    tokens = draw(probabilities.expand(count, -1), uniforms)
    frequencies = tokens.bincount(minlength=5) / count
    standard_error = (probabilities * (1 - probabilities) / count).sqrt()
    # Four standard errors: a right sampler fails for one seed of some 3,000.
    assert ((frequencies - probabilities).abs() < 4 * standard_error).all()


def test_greedy_takes_the_most_probable_token():
    assert drawn(0.99, greedy=True) == 0


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({}, 3),
        ({"top_k": 2}, 1),
        ({"top_p": 0.7}, 1),  # 0.5 + 0.25 is the first sum to reach 0.7
        ({"min_p": 0.25}, 2),  # at least 0.25 x 0.5 = 0.125
    ],
)
def test_filters_keep_the_most_probable_tokens(settings, last):
    assert drawn(1 - 2**-24, **settings) == last


def test_top_p_sees_the_distribution_at_the_temperature():
    # At temperature 0.5 the probabilities are squared and normalised: 0.25, 0.0625, 0.0225, 0.01
    # over 0.345 = 0.725, 0.181, ...: the first token alone reaches 0.7.
    assert drawn(1 - 2**-24, top_p=0.7, temperature=0.5) == 0


def test_end_ids_are_not_drawn_before_min_new_tokens():
    assert drawn(0.0, min_new_tokens=1) == 1
    assert drawn(0.0, min_new_tokens=1, greedy=True) == 1


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"greedy": True}])
def test_log_probs_are_those_at_the_temperature_without_any_filter(settings):
    draw = sampler(0.0, temperature=0.5, **settings)(PROBABILITIES.log(), step=0)
    expected = torch.tensor([0.25 / 0.345]).log()  # squared and normalised, as above
    torch.testing.assert_close(draw.log_probs, expected)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 1.0),
        ({"top_k": 2}, 0.75),
        ({"top_p": 0.7}, 0.75),
        ({"min_p": 0.25}, 0.9),
        ({"min_new_tokens": 1}, 0.5),  # the end token 0 is left out
    ],
)
def test_filtered_log_probs_are_those_of_what_the_filters_leave(settings, kept):
    """By hand: the probability of the drawn token over the sum of those that are kept."""
    draw = sampler(0.0, **settings)(PROBABILITIES.log(), step=0)
    probability = PROBABILITIES[0, int(draw.tokens)]
    torch.testing.assert_close(draw.log_probs[0], probability.log())
    torch.testing.assert_close(draw.filtered_log_probs[0], (probability / kept).log())


def test_drawing_by_blocks_inverts_the_cumulative_sum_of_all_tokens():
    """Law: the first token whose cumulative probability is above the number, in float64."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(200, 1000, generator=generator, dtype=torch.float64).mul(3).exp()
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    cumulative = weights.cumsum(1) / weights.sum(1, keepdim=True)
    expected = (cumulative > uniforms[:, None]).int().argmax(1)
    assert torch.equal(draw(weights, uniforms), expected)
    assert expected.unique().numel() > 100
