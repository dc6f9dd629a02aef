"""Tasks: prompts, and what a completion of one is worth."""

from funcrl.protocols import Prompt, Task, Tokenizer
from funcrl.tasks.load import TASKS, load
from funcrl.tasks.sum_digits import SumDigits
from funcrl.tasks.tokenizers import CharTokenizer

__all__ = ["TASKS", "CharTokenizer", "Prompt", "SumDigits", "Task", "Tokenizer", "load"]
