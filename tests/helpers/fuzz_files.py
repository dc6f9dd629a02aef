"""Broken files by the hundred, from seeds: a program that reads them within bounds.

    python fuzz_files.py FOLDER

prints one JSON object: how many cases of each kind were read and how many refused, and all that
ended in anything but success or one clear error: `case(folder, "gguf", 17)` makes it again.
"""

import json
import os
import re
import shutil
import struct
import sys
import warnings
import zlib
from pathlib import Path
from random import Random

import torch
from bounded import bounded

import funcrl
from funcrl import config, runs
from funcrl.loop.export import export
from funcrl.run import report
from funcrl.weights import load_config, load_params
from funcrl.weights.gguf import read_gguf

NUM_CASES = {"gguf": 400, "folder": 400, "run": 20, "checkpoint": 10}
SECONDS = 5.0
# The threads that read a checkpoint reserve address space that they do not use.
BYTES = {"gguf": 1 << 30, "folder": 1 << 30, "run": 1 << 30, "checkpoint": 1 << 32}
SIZES = [0, 1, 2, 3, 5, 255, 256, 65_535, 200_000, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62,
         2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
TEXTS = ["null", "true", "-1", "0", "1e308", "NaN", "-Infinity", '""', '"x"', "[]", "{}", "[[]]",
         '{"a": 1}', "1" + "0" * 400, str(2**64), "[" * 5000, '"' + "x" * 5000 + '"',
         '"\\u0000\\ud800"', r'"$\\frac{1$"', "0.5", "*a", "&a [*a]",
         "!!python/none x"]  # fmt: skip
# Of JSON as `json.dumps` writes it, and of YAML.
VALUES = re.compile(
    r'(?<=[:,] )("[^"]*"(?!:)|-?\d[\d.e-]*|true|false|null)|(?<=\[)-?\d+|(?<=\w: )\w+'
)
ALLOWED = re.compile(
    r"(?s)(load_params|report|train|evaluate|export|restore|save_params|TransformerConfig) "
)


def make_originals(folder):
    """Write a small model in each format, and a run of one step, to break copies of."""
    shape = funcrl.models.TransformerConfig(
        vocab_size=11, width=8, num_layers=2, num_heads=2, num_kv_heads=1, head_width=4,
        mlp_width=16,
    )  # fmt: skip
    model = funcrl.models.Transformer(shape)
    params = funcrl.init_params(model, seed=0)
    (folder / "gguf").mkdir(parents=True)
    funcrl.save_params(folder / "gguf" / "model.gguf", model, params)
    funcrl.save_params(folder / "folder", model, params, max_shard_bytes=1500)
    funcrl.train(config.TrainConfig(
        run_dir=folder / "run", steps=1, num_prompts=2, num_generations=2,
        warm_start=config.WarmStartConfig(steps=0), evaluation=config.EvaluationConfig(every=0),
        algorithm=config.AlgorithmConfig(kl=0.0),
    ))  # fmt: skip
    # Pictures take most of the time: two panels are enough.
    rows = [{name: row.get(name) for name in ("step", "reward", "rewards/correct/mean",
                                              "step_time")}
            for row in runs.read_lines(folder / "run" / "metrics.jsonl")]  # fmt: skip
    (folder / "run" / "metrics.jsonl").unlink()
    runs.append_lines(folder / "run" / "metrics.jsonl", rows)
    shutil.rmtree(folder / "run" / "checkpoints" / "0")  # which would do in place of a broken one
    shutil.copytree(folder / "run", folder / "checkpoint")


def broken_bytes(draw, raw, head):
    """Return bytes with a few places of the first `head` changed."""
    raw = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(min(head, len(raw)) or 1)
        kind = draw.randrange(6)
        if kind == 0:
            raw[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            raw[at : at + 8] = struct.pack("<Q", draw.choice(SIZES))
        elif kind == 2:
            raw[at : at + 4] = struct.pack("<I", draw.choice(SIZES) % 2**32)
        elif kind == 3:
            del raw[at : at + draw.randrange(1, 40)]
        elif kind == 4:
            raw[at:at] = raw[at : at + draw.randrange(1, 200)] * draw.randrange(1, 20)
        else:
            del raw[at * len(raw) // head :]
    return bytes(raw)


def broken_text(draw, text):
    """Return text with a few of its values replaced: numbers, quoted texts, rests of lines."""
    for _ in range(draw.choice([1, 1, 2])):
        values = list(VALUES.finditer(text))
        if not values:
            return text
        found = draw.choice(values)
        text = text[: found.start()] + draw.choice(TEXTS) + text[found.end() :]
    return text


def break_file(draw, path, head=None):
    raw = path.read_bytes()
    if head is None and draw.random() < 0.7:
        text = broken_text(draw, raw.decode("utf-8", "replace"))
        path.write_bytes(text.encode("utf-8", "replace"))
    else:
        path.write_bytes(broken_bytes(draw, raw, head or len(raw)))


def break_fields(draw, path):
    """Replace numbers of a GGUF file's header, where its metadata and its tensors have them."""
    held, raw = read_gguf(path), bytearray(path.read_bytes())
    places = [end - 4 for _, end in held.spans.values()]
    for name in held.tensors:
        end = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        places += range(end, end + 32, 4)  # the number of dimensions, these, the type, the offset
    for _ in range(draw.choice([1, 1, 2])):
        code, at = draw.choice("IQ"), draw.choice(places)
        value = draw.choice(SIZES) % (2**32 if code == "I" else 2**64)
        raw[at : at + struct.calcsize(f"<{code}")] = struct.pack(f"<{code}", value)
    path.write_bytes(raw)


def break_header(draw, path):
    """Replace a value in the header of a safetensors file, whose length stays right."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    text = broken_text(draw, raw[8:end].decode()).encode("utf-8", "replace")
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])


def break_manifest(draw, path):
    """Replace a value of a checkpoint's manifest, whose checksum is made anew."""
    text = path.read_text()
    try:
        inner = json.loads(broken_text(draw, text))["checkpoint"]
        checksum = zlib.crc32(json.dumps(inner).encode())
        text = json.dumps({"checksum": checksum, "checkpoint": inner}) + "\n"
    except (ValueError, KeyError, TypeError, RecursionError):
        text = broken_text(draw, text)
    path.write_bytes(text.encode("utf-8", "replace"))


def case(originals, kind, seed):
    """Make a case beside the originals, and return its folder."""
    draw = Random(f"{kind} {seed}")
    path = originals / "case" / f"{kind}-{seed}"
    shutil.copytree(originals / kind, path)
    if kind == "gguf":
        if draw.random() < 0.6:
            break_fields(draw, path / "model.gguf")
        else:
            break_file(draw, path / "model.gguf", head=2000)
    elif kind == "folder":
        file = draw.choice(sorted(path.iterdir()))
        if file.suffix == ".safetensors" and draw.random() < 0.7:
            break_header(draw, file)
        else:
            break_file(draw, file, head=600 if file.suffix == ".safetensors" else None)
    elif kind == "checkpoint":
        break_manifest(draw, path / "checkpoints" / "1" / "manifest.json")
    else:
        break_run(draw, path)
    return path


def break_run(draw, path):
    name = draw.choice(["metrics.jsonl", "metrics.jsonl", "completions.jsonl", "config.yaml",
                        "environment.json"])  # fmt: skip
    special = draw.random()
    if special < 0.1:
        (path / name).unlink()
        os.mkfifo(path / name)
    elif special < 0.15:
        (path / name).unlink()
        (path / name).mkdir()
    else:
        break_file(draw, path / name)


def read_run(run):
    """Read a run's folder as each command does, as far as the first error."""
    report.write_report(run)
    config.read_config(config.TrainConfig, run / "config.yaml")
    runs.check_given("train", run, {"task"})
    runs.keep_until(run / "completions.jsonl", 1)


READERS = {
    "gguf": lambda path: load_params(path / "model.gguf"),
    "folder": lambda path: (load_config(path), load_params(path)),
    "run": read_run,
    "checkpoint": lambda path: export(path, path / "model"),
}


def verdict(path, kind):
    """Return None for success or one clear error, else what was wrong."""
    try:
        with bounded(SECONDS, BYTES[kind]):
            READERS[kind](path)
    except (ValueError, OSError) as error:
        text = str(error)
        named = str(path) in text and ALLOWED.match(text) and len(text) < 2000
        return "refused" if named else f"unclear: {text[:300]}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "read"


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make_originals(folder)
    found = {}
    for kind, count in NUM_CASES.items():
        READERS[kind](folder / kind)  # imports what it needs, without a bound
        shutil.rmtree(folder / kind / "model", ignore_errors=True)
        for seed in range(count):
            path = case(folder, kind, seed)
            found[f"{kind} {seed}"] = verdict(path, kind)
            shutil.rmtree(path)
    wrong = {name: each for name, each in found.items() if each not in ("read", "refused")}
    counts = {
        kind: [[found[f"{kind} {n}"] for n in range(count)].count(each)
               for each in ("read", "refused")]
        for kind, count in NUM_CASES.items()
    }  # fmt: skip
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
