"""The real pretrained model: from the file in the PyPI package to an export and back."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rl.generation import CachedGenerator, SamplingSettings, TransformersGenerator
from lit_rl.models import Policy, SmolLM2, save_pretrained, smollm2
from lit_rl.types import Sequences

EXAMPLES = "2+3=5\n7+1=8\n6+6=12\n"


@pytest.mark.slow
def test_smollm2_adds_samples_and_survives_an_export(tmp_path, monkeypatch, prompts_of):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("LIT_RL_CACHE", str(tmp_path))
    SmolLM2().tokenizer()  # converts

    def fail(*args):
        raise AssertionError("converted again")

    monkeypatch.setattr(smollm2, "_convert", fail)
    source = SmolLM2()
    tokenizer = source.tokenizer()
    policy = Policy(source.model(0))
    prompts = prompts_of(
        [tokenizer(EXAMPLES + question).input_ids for question in ("9+4=", "10+2=", "5+3=")],
        pad_id=tokenizer.pad_token_id,
    )
    sampling = SamplingSettings(max_new_tokens=5, stop_strings=["\n"])
    arguments = (policy, tokenizer, prompts)
    greedy = CachedGenerator()(*arguments, sampling.as_greedy(), group_size=1, seed=(0,))
    assert policy.fits_group_cache
    assert greedy.responses[0] == "13"  # it gets about half of such sums right
    assert all(response.isdigit() for response in greedy.responses)
    assert greedy.finished.all()

    for generator in (CachedGenerator(), TransformersGenerator()):
        rollout = generator(*arguments, sampling, group_size=4, seed=(0,))
        assert all(response.strip().isdigit() for response in rollout.responses)
        sequences = Sequences(
            prompt_ids=rollout.prompt_ids,
            prompt_mask=rollout.prompt_mask,
            response_ids=rollout.response_ids,
            mask=rollout.mask,
        )
        for layout in ("packed", "padded"):
            with torch.no_grad(), policy.passes(layout):
                log_probs = policy(sequences, temperature=1.0).log_probs
            torch.testing.assert_close(log_probs, rollout.sampler_log_probs, rtol=0, atol=1e-4)

    save_pretrained(policy.model, tokenizer, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        expected = policy.model.eval()(prompts.ids).logits
        assert torch.equal(exported(prompts.ids).logits, expected)
