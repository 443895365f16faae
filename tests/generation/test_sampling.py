import pytest
from jsonargparse import ArgumentParser

from lit_rl.generation import SamplingSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),  # more than the 128 of max_new_tokens
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("stop_strings", "\n"),
        ("stop_strings", ("\n", "")),
    ],
)
def test_a_setting_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*; it is"):
        SamplingSettings(**{name: value})


def test_nothing_is_filtered_by_default():
    settings = SamplingSettings()
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (1, 0, 1, 0)
    assert not settings.greedy


def test_as_greedy_changes_nothing_else():
    settings = SamplingSettings(temperature=0.7, stop_strings=("\n",))
    assert settings.as_greedy() == SamplingSettings(
        temperature=0.7, stop_strings=("\n",), greedy=True
    )


def test_a_command_line_sets_each_field():
    parser = ArgumentParser()
    parser.add_argument("--sampling", type=SamplingSettings, default=SamplingSettings())
    arguments = ["--sampling.temperature=0.5", r'--sampling.stop_strings=["\n", "="]']
    settings = parser.instantiate(parser.parse_args(arguments)).sampling
    assert settings == SamplingSettings(temperature=0.5, stop_strings=["\n", "="])
