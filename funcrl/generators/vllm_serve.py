"""The process of a server: vLLM's own, which ends when the trainer does, however that ends.

Started by `funcrl.generators.vllm_server` as `python -m funcrl.generators.vllm_serve`, with the
arguments of vLLM's server, and a standard input that stays open as long as the trainer lives.
"""

import os
import runpy
import signal
import sys
import threading


def _end_with_the_trainer() -> None:
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
