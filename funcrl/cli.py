"""The command line: `funcrl bench step`; every option is a field of a config dataclass."""

import sys
from collections.abc import Sequence

from tyro.conf import OmitArgPrefixes
from tyro.extras import SubcommandApp

from funcrl.bench import StepBenchConfig, bench_step, describe_machine, format_rows

app = SubcommandApp()
bench = SubcommandApp()
app.command(bench, name="bench")


@bench.command(name="step")
def step(config: OmitArgPrefixes[StepBenchConfig] = StepBenchConfig()) -> None:  # noqa: B008 (frozen)
    """Print time and peak memory of one GRPO step beside the ordinary way of writing it."""
    rows = bench_step(config)
    print(format_rows(rows, describe_machine(config.device)))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name."""
    app.cli(
        prog="funcrl",
        description="RL post-training of language models as pure functions.",
        args=sys.argv[1:] if args is None else args,
    )
