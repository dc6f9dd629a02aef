"""The process of a server: vLLM's own, which ends when the trainer does, however that ends.

Started by `processes` beside it as `python -m funcrl.generators.vllm.serve`, with the
arguments of vLLM's server, and a standard input that says which folder to leave nothing in, and
stays open as long as the trainer lives.
"""

import os
import runpy
import shutil
import signal
import sys
import threading
import time

_LAST_SECONDS = 10  # for vLLM to end in order


def _end_with_the_trainer() -> None:
    folder = sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
