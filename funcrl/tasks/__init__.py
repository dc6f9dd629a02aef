"""Tasks: prompts, and the rewards of their completions."""

from funcrl.tasks.adapt import RewardFn, check_task, matches, with_rewards
from funcrl.tasks.answers import (
    boxed_answer,
    last_number,
    marked_answer,
    number_of,
    same_number,
    tagged_answer,
)
from funcrl.tasks.builtin.calculator import Calculator
from funcrl.tasks.builtin.generated import Countdown, SumDigits
from funcrl.tasks.builtin.gym import ReasoningGym
from funcrl.tasks.builtin.gymnasium import Gymnasium
from funcrl.tasks.builtin.judge import Judge
from funcrl.tasks.builtin.mathematics import Gsm8k, Math
from funcrl.tasks.chat import ChatTokenizer, load_tokenizer
from funcrl.tasks.contracts import (
    Environment,
    Played,
    Prompt,
    Task,
    Tokenizer,
    ToolResults,
    ToolState,
)
from funcrl.tasks.load import (
    TASKS,
    data_file,
    is_built_in,
    load,
    load_rewards,
    source_file,
)
from funcrl.tasks.model_rewards import ask_judge, reward_model
from funcrl.tasks.reward_calls import RewardLimits
from funcrl.tasks.rewards import TrainerState
from funcrl.tasks.rows import from_rows
from funcrl.tasks.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer
from funcrl.tasks.tool_calls import ToolCall, json_calls, python_calls, renderer_calls
from funcrl.tasks.tools import from_environment
from funcrl.tasks.verifiers import from_verifiers

__all__ = [
    "TASKS",
    "ByteTokenizer",
    "Calculator",
    "CharTokenizer",
    "ChatTokenizer",
    "Countdown",
    "Environment",
    "Gsm8k",
    "Gymnasium",
    "Judge",
    "Math",
    "Played",
    "Prompt",
    "ReasoningGym",
    "RewardFn",
    "RewardLimits",
    "SumDigits",
    "Task",
    "Tokenizer",
    "ToolCall",
    "ToolResults",
    "ToolState",
    "TrainerState",
    "WordTokenizer",
    "ask_judge",
    "boxed_answer",
    "check_task",
    "data_file",
    "from_environment",
    "from_rows",
    "from_verifiers",
    "is_built_in",
    "json_calls",
    "last_number",
    "load",
    "load_rewards",
    "load_tokenizer",
    "marked_answer",
    "matches",
    "number_of",
    "python_calls",
    "renderer_calls",
    "reward_model",
    "same_number",
    "source_file",
    "tagged_answer",
    "with_rewards",
]
