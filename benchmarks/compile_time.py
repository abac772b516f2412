#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What gradaccum costs the compiler: small programs, header-only and with gradaccum::compiled, over torch/torch.h alone.

All are compiled in turn, as often as --runs says; each time is a multiple of that of torch/torch.h alone in the same
turn, and what is printed is the median. Processor time of one core, without linking.

An empty program has next to no code, unless a class declares virtual functions that are not inline there, all of which every
program has then.
"""

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

TORCH_ALONE = "torch/torch.h alone"
EMPTY = "#include <torch/torch.h>\n#include <gradaccum/{}.hpp>\nint main() {{}}\n"
BY_HAND = """#include <torch/torch.h>
#include <iostream>

int main() {
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::GELU(), torch::nn::Linear(64, 1));
  auto x = torch::randn({1024, 8}), y = x.sum(1, /*keepdim=*/true);
  torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(3e-4));
  for (int i = 0; i < 100; ++i) {
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    adamw.step();
    adamw.zero_grad();
    std::cout << loss.item<double>() << '\\n';
  }
}
"""
TRAINER = """#include <gradaccum/trainer.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <torch/torch.h>
#include <iostream>

namespace ga = gradaccum;

int main() {
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::GELU(), torch::nn::Linear(64, 1));
  auto x = torch::randn({1024, 8}), y = x.sum(1, /*keepdim=*/true);
  ga::data::TensorBatches batches(x, y, {.batch_size = 16, .shuffle = true});
  ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(3e-4));
  ga::Trainer trainer(model, adamw,
      [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); },
      ga::Accumulate{.steps = 8}, ga::MixedPrecision{.dtype = torch::kBFloat16}, ga::ClipNorm{.max = 1.0},
      ga::Schedule{ga::lr::Cosine{.peak = 3e-4, .warmup = 100, .total = 5000}}, ga::Ema{.decay = 0.999},
      [](const ga::Step& step) { if (step.update % 100 == 0) std::cout << step.loss.item<double>() << '\\n'; });
  std::cout << trainer.fit(batches, {.epochs = 3});              // progress with time left, then a summary
  std::cout << trainer.evaluate(batches)["loss"] << '\\n';
}
"""

# name, text, whether it is another one with gradaccum::compiled
PROGRAMS = [
    (TORCH_ALONE, "#include <torch/torch.h>\nint main() {}\n", False),
    ("a loop by hand, LibTorch alone", BY_HAND, False),
    ("grad_accumulator.hpp", EMPTY.format("grad_accumulator"), True),
    ("trainer.hpp", EMPTY.format("trainer"), True),
    ("gradaccum.hpp", EMPTY.format("gradaccum"), True),
    ("README's Trainer program", TRAINER, True),
    ("the same with gradaccum.hpp", TRAINER.replace("gradaccum/trainer.hpp", "gradaccum/gradaccum.hpp"), True),
]


class Compilation:
    """One compilation: CPU seconds, the compiler's peak of memory, and its result."""

    def __init__(self, command, source, text, directory):
        path = os.path.join(directory, source)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        output = path + ".o"
        child = subprocess.Popen([*command, "-c", path, "-o", output])
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"compile_time.py: {shlex.join(command)} could not compile:\n{text}")
        self.seconds = usage.ru_utime + usage.ru_stime
        self.megabytes = usage.ru_maxrss / 1024
        sizes = subprocess.run(["size", output], check=True, capture_output=True, text=True).stdout.splitlines()[1]
        self.code = int(sizes.split()[0])


def variants(program):
    """Returns the ways to compile a program: a name of the column, and the flags."""
    name, _, both = program
    return [("header-only", [])] + ([("compiled", ["-DGRADACCUM_COMPILED"])] if both else [])


def measure(compiler, arguments, runs):
    """Returns the measurements of each program, run by run."""
    command = [compiler, "-std=c++20", *arguments]
    with tempfile.TemporaryDirectory() as directory:
        for run in range(runs):
            print(f"{compiler}, {run + 1} of {runs}", file=sys.stderr)
            yield {(program[0], column): Compilation([*command, *flags], f"{number}.cpp", program[1], directory)
                   for number, program in enumerate(PROGRAMS) for column, flags in variants(program)}


def report(compiler, results):
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    alone = results[TORCH_ALONE, "header-only"]
    seconds = statistics.median(each.seconds for each in alone)
    print(f"\n{version}; {TORCH_ALONE}: {seconds:.1f} s, {alone[0].megabytes:.0f} MB")
    print(f"{'':34}{'header-only':>30}{'compiled':>30}")
    print(f"{'':34}" + f"{'time':>10}{'memory':>10}{'code':>10}" * 2)
    for program in PROGRAMS[1:]:
        row = f"{program[0]:34}"
        for column, _ in variants(program):
            compilations = results[program[0], column]
            time = statistics.median(each.seconds / base.seconds for each, base in zip(compilations, alone))
            memory = statistics.median(each.megabytes / base.megabytes for each, base in zip(compilations, alone))
            row += f"{time:10.2f}{memory:10.2f}{compilations[0].code / 1024:7.0f} KB"
        print(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arguments", required=True, help="a file with the compiler's arguments, written by CMake")
    parser.add_argument("--compilers", nargs="+", default=["g++", "clang++"], help="those that are there are measured")
    parser.add_argument("--flags", default="-O2", help="how to optimise")
    parser.add_argument("--runs", type=int, default=3, help="how often everything is compiled")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be >= 1, got {options.runs}")
    for compiler in options.compilers:
        if shutil.which(compiler):
            arguments = [*shlex.split(options.flags), "@" + options.arguments]
            results = {}
            for run in measure(compiler, arguments, options.runs):
                for key, compilation in run.items():
                    results.setdefault(key, []).append(compilation)
            report(compiler, results)
        else:
            print(f"\n{compiler} is not there, and was left out")


if __name__ == "__main__":
    main()
