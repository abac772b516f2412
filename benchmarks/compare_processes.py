#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ours and its peers in turn, each in a separate process and as its users would, and compares the printed results."""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

scripts = pathlib.Path(__file__).parent / "python"
launch = pathlib.Path(__file__).parent.parent / "launch.sh"


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default="build/bench/benchmarks", help="where the built programs are")
    parser.add_argument("--data", default="build/data/unzipped", help="the data set, its four files unzipped")
    parser.add_argument("--python", help="an interpreter with PyTorch; without it Python's programs are left out")
    parser.add_argument("--steps", help="where the compiled steps of fashion_epoch are; without it they are left out")
    parser.add_argument("--repeats", type=int, default=3, help="how often each runs")
    parser.add_argument("--epochs", type=int, default=3, help="of a run; its time is the median of them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="", help="append the results to this file, an object a line")
    parser.add_argument("--keep-memory", action="store_true", help="for the other programs: here each is as it would be")
    return parser.parse_args()


def run(command, environment={}):
    """Runs a program, and returns the results that it appended to its --json file."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as results:
        process = subprocess.run(
            [*map(str, command), "--json", results.name], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        if process.returncode != 0:
            sys.exit(f"compare_processes.py: {command[0]} ended with status {process.returncode}")
        return [json.loads(line) for line in results]


@dataclasses.dataclass
class AsItIs:
    """A program that runs without mkl_on_amd.hpp, as LibTorch's users run it on an AMD processor."""

    command: object

    environment = {"GRADACCUM_MKL_ON_AMD": "0"}
    note = ", MKL as it is"

    def __call__(self, repeat):
        return self.command(repeat)


@dataclasses.dataclass
class AtFullRate(AsItIs):
    """A Python program, with a library to preload."""

    library: str

    note = ", MKL at full rate"

    @property
    def environment(self):
        return {"LD_PRELOAD": str(pathlib.Path(self.library).resolve())}


def in_turn(commands, repeats):
    """Returns results by contestant, in the order of the commands; the order of running alternates."""
    contestants = {}
    for repeat in range(repeats):
        order = commands[:: -1 if repeat % 2 else 1]
        rounds = [(run(command(repeat), getattr(command, "environment", {})), command) for command in order]
        for results, command in rounds[:: -1 if repeat % 2 else 1]:
            for result in results:
                contestants.setdefault(result["contestant"] + getattr(command, "note", ""), []).append(result)
    return contestants


def report(title, unit, scale, contestants, json_path):
    print(title)
    first = [result["median_s"] for result in next(iter(contestants.values()))]
    for name, results in contestants.items():
        times = [result["median_s"] for result in results]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(times, first))
        line = f"{statistics.median(times) * scale:>9.3f} {unit} ({min(times) * scale:.3f} to {max(times) * scale:.3f})"
        summary = {"benchmark": title, "contestant": name, "median_s": statistics.median(times), "time_over_ours": ratio}
        if "accuracy" in results[0]:
            summary["accuracy"] = statistics.mean(result["accuracy"] for result in results)
            line += f"  accuracy {summary['accuracy']:.1f} %"
        print(f"  {name:<60} {line}  {ratio:.2f} x ours")
        if json_path:
            with open(json_path, "a") as file:
                file.write(json.dumps(summary) + "\n")
    sys.stdout.flush()


def tiny_step(arguments, common):
    commands = [lambda repeat: [f"{arguments.programs}/benchmark_tiny_step", *common]]
    if arguments.python:
        commands.append(lambda repeat: [arguments.python, scripts / "tiny_step.py", *common])
    title = "A training step of a tiny network, AdamW, 8-8-8-10, 1 row; a process each"
    report(title, "us", 1e6, in_turn(commands, arguments.repeats), arguments.json)


def muon(arguments, common):
    commands = [lambda repeat: [f"{arguments.programs}/benchmark_muon", *common]]
    python = lambda repeat: [arguments.python, scripts / "muon.py", *common]
    commands.append(python)
    if is_amd():
        commands.append(AtFullRate(python, f"{arguments.programs}/libmkl_on_amd.so"))
    title = "An update of 4 transformer blocks of width 256, 8 x 64 tokens, Muon and AdamW; a process each"
    report(title, "ms", 1e3, in_turn(commands, arguments.repeats), arguments.json)


def is_bf16_fast():
    """Returns whether bfloat16 is fast: on x86 LibTorch needs AVX-512 for it, as in gradaccum::is_bf16_fast."""
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    return "avx2" not in flags or "avx512bw" in flags


def is_amd():
    return "AuthenticAMD" in pathlib.Path("/proc/cpuinfo").read_text()


def fashion_epoch(arguments, common):
    """Runs ours and LibTorch's programs with mkl_on_amd.hpp and without, and Python's also with it, if it matters."""
    def command(program, kind, *more):
        options = ["--data", arguments.data, "--epochs", arguments.epochs, *common, *more]
        return lambda repeat: [*program, kind, *options, "--seed", repeat]

    def possible(kinds):
        return [kind for kind in kinds if is_bf16_fast() or not kind.endswith("-bf16")]

    cpp = [f"{arguments.programs}/fashion_epoch"]
    commands = [command(cpp, kind) for kind in possible(["ours", "ours-bf16", "libtorch", "libtorch-test-later"])]
    if arguments.steps:
        commands += [command(cpp, kind, "--step", f"{arguments.steps}/{kind}") for kind in possible(["ours", "ours-bf16"])]
    if is_amd():
        commands += [AsItIs(command(cpp, kind)) for kind in possible(["ours", "ours-bf16", "libtorch"])]
    if arguments.python:
        python = [arguments.python, scripts / "fashion_epoch.py"]
        commands += [command(python, kind) for kind in possible(["dataloader", "fused", "fused-bf16"])]
        if is_amd():
            library = f"{arguments.programs}/libmkl_on_amd.so"
            commands += [AtFullRate(command(python, kind), library) for kind in possible(["fused", "fused-bf16"])]
    title = f"One epoch of FashionMNIST, AdamW, a process each; accuracy after {arguments.epochs}, mean of the runs"
    report(title, "s", 1, in_turn(commands, arguments.repeats), arguments.json)


def data_parallel(arguments, optimizer, processes):
    """Compares processes of one thread each, on one machine."""
    launched = [launch, processes]
    options = ["--threads", 1, "--repeats", 15, "--optimizer", optimizer]
    commands = [lambda repeat: [*launched, f"{arguments.programs}/data_parallel", "--keep-memory", *options]]
    if arguments.python:
        python = lambda repeat: [*launched, arguments.python, scripts / "data_parallel.py", *options]
        commands.append(python)
        if is_amd():
            commands.append(AtFullRate(python, f"{arguments.programs}/libmkl_on_amd.so"))
    contestants = in_turn(commands, arguments.repeats)
    title = (f"A window of 4 micro-batches by {processes} processes: 8.4 million parameters, 32 rows a micro-batch, "
             f"{optimizer}")
    report(title, "ms", 1e3, contestants, arguments.json)
    for name, results in contestants.items():
        volume = statistics.median(result["bytes"] for result in results)
        print(f"  {name:<48} {volume / 1e6:>9.1f} MB sent in a window, by all; "
              f"{results[0]['state'] / 1e6:.1f} MB of state in rank 0")


def tokenizer(arguments):
    """Compares tokenizers on one thread each; one with other ids gets no time."""
    script = [arguments.python, scripts / "tokenizer.py"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*map(str, script), folder, "--make"], check=True)
        texts = json.loads((pathlib.Path(folder) / "texts.json").read_text())
        cpp = [f"{arguments.programs}/tokenizer"]
        commands = [lambda repeat: [*cpp, folder], lambda repeat: [*script, folder]]
        contestants = in_turn(commands, arguments.repeats)
    ids = {name: {result["ids"] for result in results} for name, results in contestants.items()}
    if len(set.union(*ids.values())) != 1:
        sys.exit(f"compare_processes.py: the tokenizers must make the same ids, got {ids}")
    millions = sum(map(len, texts)) / 1e6
    title = f"Encoding {len(texts)} texts, {millions:.1f} million characters, on one thread; a process each; the same ids"
    report(title, "ms", 1e3, contestants, arguments.json)
    for name, results in contestants.items():
        median = statistics.median(result["median_s"] for result in results)
        print(f"  {name:<48} {millions / median:>9.1f} million characters/s")


def main():
    arguments = parse()
    common = ["--threads", arguments.threads]
    if arguments.python:
        tokenizer(arguments)
        tiny_step(arguments, common)
        muon(arguments, common)
    data_parallel(arguments, "sgd", 2)
    for processes in (2, 4):
        data_parallel(arguments, "adamw", processes)
    fashion_epoch(arguments, common)


main()
