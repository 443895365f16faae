"""Tasks: where prompts and reference answers come from, and how a model reads them."""

from lit_rl.tasks.addition import Addition
from lit_rl.tasks.base import Task
from lit_rl.tasks.data_files import DataFiles
from lit_rl.tasks.digits import Copy, LargestDigit, Sort
from lit_rl.tasks.hugging_face_data import HuggingFaceData
from lit_rl.tasks.prompt_format import ChatPrompt, Example, PlainPrompt, PromptFormat
from lit_rl.tasks.reasoning_gym import ReasoningGym

__all__ = [
    "Addition",
    "ChatPrompt",
    "Copy",
    "DataFiles",
    "Example",
    "HuggingFaceData",
    "LargestDigit",
    "PlainPrompt",
    "PromptFormat",
    "ReasoningGym",
    "Sort",
    "Task",
]
