"""Tasks: prompts, and what a completion of one is worth."""

from funcrl.protocols import Prompt, Task, Tokenizer
from funcrl.tasks.answers import (
    last_number,
    marked_answer,
    number_of,
    same_number,
    tagged_answer,
)
from funcrl.tasks.chat import ChatTokenizer, load_tokenizer
from funcrl.tasks.countdown import Countdown
from funcrl.tasks.gsm8k import Gsm8k
from funcrl.tasks.gym import ReasoningGym
from funcrl.tasks.load import TASKS, load
from funcrl.tasks.sum_digits import SumDigits
from funcrl.tasks.tokenizers import CharTokenizer

__all__ = [
    "TASKS",
    "CharTokenizer",
    "ChatTokenizer",
    "Countdown",
    "Gsm8k",
    "Prompt",
    "ReasoningGym",
    "SumDigits",
    "Task",
    "Tokenizer",
    "last_number",
    "load",
    "load_tokenizer",
    "marked_answer",
    "number_of",
    "same_number",
    "tagged_answer",
]
