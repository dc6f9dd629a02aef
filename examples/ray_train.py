"""The same run on a cluster that has Ray: Ray starts the ranks, and funcrl trains on them.

    python examples/ray_train.py --num-workers 2 --device cpu --steps 4

Ray Train joins the ranks to one process group, as torchrun does; what follows is `funcrl.train`
with their mesh. All other options are those of `funcrl train`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import ray.train
from ray.train.torch import TorchTrainer

import funcrl
from funcrl.cli.program import read_train_config


def train_rank(options: dict) -> None:
    """Train as one rank of the run."""
    config = replace(options["config"], run_dir=options["run_dir"])
    if config.threads is None and config.device == "cpu":
        config = replace(config, threads=1)
    sharing = config.num_sharing(options["num_workers"])
    mesh = funcrl.parallel.make_mesh(config.ranks.timeout, shard=sharing)
    view = "live" if mesh.all.rank == 0 else None
    resume = (Path(config.run_dir) / "config.yaml").exists()  # Ray has started the ranks again
    funcrl.train(config, view=view, resume=resume, mesh=mesh)


def main() -> None:
    """Start the ranks, and print what they come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=0)
    own, rest = parser.parse_known_args()
    config = read_train_config(rest)
    run_dir = Path(config.run_dir or "runs/on-ray").absolute()  # a folder that all hosts see
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={
            "config": config,
            "run_dir": run_dir,
            "num_workers": own.num_workers,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=own.num_workers, use_gpu=config.device == "cuda"
        ),
        run_config=ray.train.RunConfig(
            storage_path=str(run_dir.parent / "ray-files"),
            failure_config=ray.train.FailureConfig(max_failures=own.restarts),
        ),
    )
    trainer.fit()
    last = funcrl.runs.read_history(run_dir)[-1]
    print(
        f"{own.num_workers} ranks, step {last['step']}, reward {last['reward']:.3f}, in {run_dir}"
    )


if __name__ == "__main__":
    main()
