"""Train, validate or sample: `python train.py fit --config configs/algorithm/grpo.yaml`."""

from pathlib import Path

from lit_rl.cli import RLCLI


def main() -> None:
    """Run the command line."""
    RLCLI(base_config=Path(__file__).parent / "configs" / "base.yaml")


if __name__ == "__main__":
    main()
