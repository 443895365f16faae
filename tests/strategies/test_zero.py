"""What is said of DeepSpeed before anything runs, and the clipping of its gradients."""

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from lit_rl.strategies import DeepSpeed
from lit_rl.strategies.parallelism import Parallelism
from lit_rl.strategies.zero import Clipping, check_engine_checkpoint, engine_config

CPU = torch.device("cpu")


def test_an_offload_is_for_stage_3():
    with pytest.raises(ValueError, match="offload of DeepSpeed is for stage 3, not for stage 2"):
        DeepSpeed(stage=2, offload=True)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"DS_BUILD_OPS=0 pip install .*deepspeed"):
        DeepSpeed()


def test_a_machine_without_a_gpu_is_refused():
    strategy = DeepSpeed()
    strategy.accelerator = CPUAccelerator()
    with pytest.raises(ValueError, match=r"needs a CUDA GPU, .*fsdp2\.yaml, or ddp\.yaml"):
        strategy.setup_environment()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_neither_clips_nor_counts_micro_batches(stage):
    """Its own clipping is of all groups at once; its counting overwrites earlier micro-batches."""
    config = engine_config(stage, offload=False, persistence_threshold=0)
    assert config["gradient_clipping"] == 0.0
    assert config["managed_gradient_accumulation"] is False
    assert config["zero_optimization"]["stage"] == stage
    assert "offload_param" not in config["zero_optimization"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (0, "none of DeepSpeed: go on with the --config"),
        (3, r"was written by 3 ranks, .* not on 2: use --trainer\.devices 3"),
    ],
)
def test_a_checkpoint_that_the_engine_cannot_read_is_refused(tmp_path, files, message):
    (tmp_path / "checkpoint").mkdir()
    for rank in range(files):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (tmp_path / "checkpoint" / name).touch()
    with pytest.raises(ValueError, match=message):
        check_engine_checkpoint(tmp_path, 2, 2, trains=True)


def test_stage_3_says_how_held_out_prompts_are_answered_from_a_checkpoint(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(ValueError, match=r"only to train on from it: .*exported model"):
        check_engine_checkpoint(tmp_path, 3, 1, trains=False)
    check_engine_checkpoint(tmp_path, 3, 1, trains=True)


def test_a_folder_of_shards_is_refused_where_weights_are_whole(tmp_path):
    with pytest.raises(ValueError, match="is a folder of weights in shards"):
        Parallelism().check_checkpoint(tmp_path)
    Parallelism().check_checkpoint(tmp_path / "last.ckpt")


def groups(**gradients):
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in gradients}
    for name, gradient in gradients.items():
        parameters[name].grad = torch.tensor(gradient)
    named = [{"params": [parameter], "name": name} for name, parameter in parameters.items()]
    return parameters, torch.optim.SGD(named, lr=1.0)


def test_groups_are_clipped_apart_when_the_optimizer_takes_its_step():
    """Norms 5 and 0.5; a limit of 1 scales the first by 1/5: its step is -(0.6, 0.8)."""
    parameters, optimizer = groups(actor=[3.0, 4.0], critic=[0.3, 0.4])
    clipping = Clipping(1.0, frozenset(), CPU)
    optimizer.register_step_pre_hook(clipping)
    optimizer.step()
    assert clipping.norms == {"actor": pytest.approx(5.0), "critic": pytest.approx(0.5)}
    torch.testing.assert_close(parameters["actor"].data, torch.tensor([-0.6, -0.8]))
    torch.testing.assert_close(parameters["critic"].data, torch.tensor([-0.3, -0.4]))


def test_a_group_that_rests_takes_no_step_and_has_a_norm():
    parameters, optimizer = groups(actor=[3.0, 4.0], critic=[0.3, 0.4])
    clipping = Clipping(None, frozenset({"actor"}), CPU)
    optimizer.register_step_pre_hook(clipping)
    optimizer.step()
    assert clipping.norms["actor"] == 5.0
    assert parameters["actor"].tolist() == [0.0, 0.0]
