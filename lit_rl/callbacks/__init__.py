"""What happens around an iteration: metrics, samples, checkpoints, export, progress, health."""

from lit_rl.algorithms.hooks import RLCallback
from lit_rl.callbacks.critic_metrics import CriticMetrics
from lit_rl.callbacks.end_together import EndTogether
from lit_rl.callbacks.entropy_controller import EntropyController
from lit_rl.callbacks.health_monitor import HealthMonitor
from lit_rl.callbacks.hugging_face_export import HuggingFaceExport
from lit_rl.callbacks.iteration_checkpoint import IterationCheckpoint
from lit_rl.callbacks.iteration_progress_bar import IterationProgressBar
from lit_rl.callbacks.kl_controllers import AdaptiveKL, CosineKL, FixedKL, KLController, LinearKL
from lit_rl.callbacks.learning_curve import LearningCurve
from lit_rl.callbacks.ratio_metrics import RatioMetrics
from lit_rl.callbacks.reference_sync import ReferenceSync
from lit_rl.callbacks.response_writer import ResponseWriter
from lit_rl.callbacks.reward_metrics import RewardMetrics
from lit_rl.callbacks.run_plan import RunPlan
from lit_rl.callbacks.run_summary import RunSummary
from lit_rl.callbacks.sample_log import SampleLog
from lit_rl.callbacks.stop_on_interrupt import StopOnInterrupt
from lit_rl.callbacks.stop_on_kl import StopOnKL
from lit_rl.callbacks.throughput import Throughput

__all__ = [
    "AdaptiveKL",
    "CosineKL",
    "CriticMetrics",
    "EndTogether",
    "EntropyController",
    "FixedKL",
    "HealthMonitor",
    "HuggingFaceExport",
    "IterationCheckpoint",
    "IterationProgressBar",
    "KLController",
    "LearningCurve",
    "LinearKL",
    "RLCallback",
    "RatioMetrics",
    "ReferenceSync",
    "ResponseWriter",
    "RewardMetrics",
    "RunPlan",
    "RunSummary",
    "SampleLog",
    "StopOnInterrupt",
    "StopOnKL",
    "Throughput",
]
