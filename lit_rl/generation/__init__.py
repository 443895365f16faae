"""From prompts to rollouts."""

from lit_rl.generation.base import Generator
from lit_rl.generation.cached_generator import CachedGenerator
from lit_rl.generation.sampling import SamplingSettings
from lit_rl.generation.transformers_generator import TransformersGenerator

__all__ = ["CachedGenerator", "Generator", "SamplingSettings", "TransformersGenerator"]
