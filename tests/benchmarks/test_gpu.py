import pytest
import torch

import gpu

FOR_GPU = [
    "generator.cuda_graphs: true",
    "layout: packed_flex",
    "cuda_graphs and packed_flex",
    "activation_offload: true",
    "both",
]


def test_the_script_runs_on_any_machine(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--accelerator", "cpu", "--small"])
    settings = {name: gpu.SETTINGS[name] for name in ("layout: padded", *FOR_GPU)}
    monkeypatch.setattr(gpu, "SETTINGS", settings)
    gpu.main()
    head, _, row = capsys.readouterr().out.strip().splitlines()[-3:]  # the only row
    values = dict(zip(head.split(" | ")[1:], row.split(" | ")[1:], strict=True))
    # A stage is never longer than its iteration, so neither is the median of one than that of the
    # other; the medians of all stages together can be, where single iterations are disturbed.
    for stage in ("generate", "log_probs", "update"):
        assert 0 < float(values[stage]) <= float(values["iteration"])
    # By hand: 8 prompts x 8 responses x 4 tokens, in seconds that are rounded to 1 ms.
    rate = float(values["generated tokens/s"].replace(",", ""))
    assert rate * float(values["generate"]) == pytest.approx(256, rel=0.1)


@pytest.mark.slow
def test_slow_rewards_are_waited_for(monkeypatch, capsys):
    """By hand: one worker judges 64 responses of 20 ms in 1.28 s at least."""
    monkeypatch.setattr("sys.argv", ["gpu.py", "--accelerator", "cpu", "--small"])
    names = ("slow rewards in workers", "the same, prompts_at_a_time: 2")
    monkeypatch.setattr(gpu, "SETTINGS", {name: gpu.SETTINGS[name] for name in names})
    gpu.main()
    head, _, *rows = capsys.readouterr().out.strip().splitlines()[-4:]
    place = head.split(" | ").index("score")
    at_once, _ = (float(row.split(" | ")[place]) for row in rows)  # how much less is no test
    assert at_once >= 64 * 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="no GPU is here"):
        gpu.main()
