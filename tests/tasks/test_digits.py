import pytest

from lit_rl.tasks import Copy, LargestDigit, Sort

ANSWERS = {LargestDigit: "8", Copy: "482", Sort: "248"}


@pytest.mark.parametrize("kind", ANSWERS)
def test_prompts_have_the_right_answer(kind):
    data = kind().train()
    answers = dict(zip(data["prompt"], data["answer"], strict=True))
    held_out = kind().held_out()
    answers |= zip(held_out["prompt"], held_out["answer"], strict=True)
    assert answers["482>"] == ANSWERS[kind]


def test_the_two_sides_are_all_strings_of_three_digits_each_once():
    task = LargestDigit()
    train, held_out = task.train()["prompt"], task.held_out()["prompt"]
    assert (len(train), len(held_out)) == (800, 200)
    assert sorted([*train, *held_out]) == [f"{number:03d}>" for number in range(1000)]


def test_the_seed_decides_the_split():
    assert LargestDigit().train()["prompt"] == LargestDigit().train()["prompt"]
    # 40 of 200 is what independent choices share on average; equal choices would share all.
    first, second = (set(LargestDigit(seed=seed).held_out()["prompt"]) for seed in (0, 1))
    assert len(first & second) < 80


def test_more_prompts_than_strings_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"800 \+ num_held_out 201 = 1001 .* make only 1000"):
        LargestDigit(num_held_out=201)
    with pytest.raises(ValueError, match="num_train 0 and"):
        Sort(num_train=0)
    with pytest.raises(ValueError, match="num_digits is 0"):
        Copy(num_digits=0)
