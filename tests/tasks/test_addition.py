import pytest

from lit_rl.tasks import Addition


def pairs(data):
    return {tuple(sorted(map(int, p.rstrip("=").split("+")))) for p in data["prompt"]}


def test_answers_are_the_sums():
    data = Addition().train()
    for prompt, answer in zip(data["prompt"], data["answer"], strict=True):
        x, y = prompt.rstrip("=").split("+")
        assert int(x) + int(y) == int(answer)


def test_no_held_out_sum_has_its_mirror_in_training():
    train, held_out = pairs(Addition().train()), pairs(Addition().held_out())
    # 12 * 13 / 2 unordered pairs of 1 to 12, a third of them held out.
    assert (len(train), len(held_out)) == (52, 26)
    assert not train & held_out


def test_both_orders_of_all_pairs_stand_once():
    prompts = [*Addition(1, 3).train()["prompt"], *Addition(1, 3).held_out()["prompt"]]
    assert sorted(prompts) == [f"{x}+{y}=" for x in (1, 2, 3) for y in (1, 2, 3)]


def test_the_seed_decides_the_split():
    assert Addition().held_out()["prompt"] == Addition().held_out()["prompt"]
    assert pairs(Addition().held_out()) != pairs(Addition(seed=1).held_out())


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.999, 1.0])
def test_an_empty_side_is_refused_with_the_numbers(fraction):
    with pytest.raises(ValueError, match=f"held_out_fraction {fraction} of the 78 pairs"):
        Addition(held_out_fraction=fraction)


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="0 pairs of numbers from minimum 5 to maximum 4"):
        Addition(minimum=5, maximum=4)
