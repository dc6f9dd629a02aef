"""Compiles a step by Inductor; prints how many of its graphs torch's cache had, and had not."""

from cases import tiny_batch
from torch import ones
from torch._dynamo.utils import counters

import funcrl
from funcrl import CompileConfig, TokenScores, optim


def model_fn(params, sample):
    logprobs = params["scale"] * sample.tokens.cos()
    return TokenScores(logprobs, logprobs)


if __name__ == "__main__":
    step = funcrl.grpo_step(model_fn, optimizer=optim.sgd(0.1))
    state, batch = step.init({"scale": ones(())}), tiny_batch()
    funcrl.compile_step(step, state, batch, CompileConfig(backend="inductor"))(state, batch)
    found = counters["inductor"]
    print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
