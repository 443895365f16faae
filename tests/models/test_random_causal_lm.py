import re

import numpy as np
import pytest
import torch

from lit_rl.models import RandomCausalLM


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_vocabulary_and_special_ids_come_from_the_alphabet(tiny_source):
    source = tiny_source()
    config = source.model(0).config
    assert config.vocab_size == len(source.tokenizer()) == 14  # 11 characters and 3 special tokens
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_weights_depend_on_the_seed_alone(tiny_source):
    first = weights(tiny_source().model(0))
    torch.manual_seed(123)
    assert torch.equal(first, weights(tiny_source().model(0)))
    assert not torch.equal(first, weights(tiny_source().model(1)))


def test_global_random_states_stay_as_they_are(tiny_source):
    before = (torch.get_rng_state(), np.random.get_state()[1].copy())
    tiny_source().model(7)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_the_model_lies_on_the_cpu_whatever_the_default_device(tiny_source):
    with torch.device("meta"):
        model = tiny_source().model(0)
    assert torch.equal(weights(model), weights(tiny_source().model(0)))


def test_an_unknown_config_key_is_refused_with_the_near_one(tiny_source):
    with pytest.raises(ValueError, match=r"'hiden_size'.*did you mean 'hidden_size'"):
        tiny_source(config={"hiden_size": 64}).model(0)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (
            "llama",
            {"initializer_range": 1000},
            "config initializer_range 1000 is refused: Field 'initializer_range' expected float, "
            "got int (value: 1000); an example is initializer_range 0.02",
        ),
        (
            "llama",
            {"hidden_size": 63, "num_attention_heads": 4},
            "config hidden_size 63, num_attention_heads 4 is refused: The hidden size (63) is not "
            "a multiple of the number of attention heads (4); an example is hidden_size 4096, "
            "num_attention_heads 32",
        ),
        (
            "llama",
            {"hidden_size": 60, "num_attention_heads": 4},
            "config of model_type 'llama' is refused: RoPE requires an even rotary dimension, but "
            "got `head_dim`=15 with `partial_rotary_factor`=1.0 for `full_attention`",
        ),
        (
            "llama",
            {"model_type": "llamma"},
            "config model_type is 'llamma', unknown to transformers, such as 'llama'",
        ),
        (
            "llama",
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "config num_key_value_heads is 3, must divide num_attention_heads 4, such as 4",
        ),
        (
            "llama",
            {"num_hidden_layers": 0},
            "config num_hidden_layers is 0, must be at least 1, such as 32",
        ),
        (
            "llama",
            {"num_attention_heads": 0},
            "config num_attention_heads is 0, must be at least 1, such as 32",
        ),
        # The name that GPT-2 has for num_hidden_layers, and its default.
        ("gpt2", {"n_layer": 0}, "config n_layer is 0, must be at least 1, such as 12"),
    ],
)
def test_sizes_of_which_no_model_can_be_made_are_refused(
    tiny_source, architecture, config, message
):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_source(architecture, config=config).load_config()


def test_keys_that_the_architecture_converts_or_renames_are_known(tiny_source):
    model = tiny_source(config={"rope_theta": 77.0}).model(0)
    assert model.config.rope_parameters["rope_theta"] == 77.0
    # GPT-2 calls it n_embd; hidden_size is the name common to all architectures.
    assert tiny_source("gpt2", config={"hidden_size": 16}).model(0).config.n_embd == 16


def test_what_the_alphabet_gives_cannot_be_set(tiny_source):
    with pytest.raises(ValueError, match="vocab_size"):
        tiny_source(config={"vocab_size": 20}).model(0)


def test_the_config_names_an_architecture():
    with pytest.raises(ValueError, match="model_type, such as 'llama'"):
        RandomCausalLM({"hidden_size": 32}, "01").model(0)


def test_the_tokenizer_is_made_once(tiny_source):
    source = tiny_source()
    assert source.tokenizer() is source.tokenizer()


def test_dropout_is_off_in_training_mode_unless_asked_for(tiny_source):
    ids = torch.arange(8)[None]
    off = tiny_source("gpt2").model(0)  # GPT-2's own config drops with probability 0.1
    assert off.training
    assert torch.equal(off(ids).logits, off(ids).logits)
    on = tiny_source("gpt2", dropout=True).model(0)
    assert on.training
    assert not torch.equal(on(ids).logits, on(ids).logits)


def test_float16_weights_are_refused(tiny_source):
    with pytest.raises(ValueError, match=r"'float16'.*float32.*bf16-mixed"):
        tiny_source(dtype="float16")


def test_bfloat16_weights_warn_that_updates_vanish(tiny_source):
    with pytest.warns(UserWarning, match=r"vanish.*float32 with trainer.precision: bf16-mixed"):
        model = tiny_source(dtype="bfloat16").model(0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
