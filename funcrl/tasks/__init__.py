"""Tasks: prompts, and what a completion of one is worth."""

from funcrl.tasks.load import TASKS, load
from funcrl.tasks.sum_digits import SumDigits
from funcrl.tasks.tokenizers import CharTokenizer
from funcrl.types import Prompt, Task, Tokenizer

__all__ = ["TASKS", "CharTokenizer", "Prompt", "SumDigits", "Task", "Tokenizer", "load"]
