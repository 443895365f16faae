"""What is done about a sampler whose probabilities are not those of the trainer."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from lit_rl.types import Experience


class SamplerCorrection(ABC):
    """A weight per token by which the policy loss is multiplied, from old and sampler log-probs.

    A subclass is a frozen dataclass of its hyper-parameters; the maths stands in a function of
    tensors beside it.
    """

    @abstractmethod
    def weights(self, experience: Experience) -> Float[Tensor, "rollouts tokens"]:
        """Return the weights, without gradient: at least 0; 1 where the mask is False.

        Args:
            experience: `old_log_probs` is present.
        """
