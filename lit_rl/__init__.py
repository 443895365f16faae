"""lit_rl: reinforcement learning for Hugging Face causal language models, as LightningModules."""

__version__ = "0.1.0"
