# SPDX-License-Identifier: Apache-2.0
"""The step of benchmark_tiny_step.cpp in Python: 8-8-8-10, one sample, AdamW as it is by default, and fused."""

import torch

from record import parse, record, seconds

steps, repeats = 1000, 9


def make_step(**options):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, **options)
    x, y = torch.rand(1, 8), torch.randint(10, (1,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main():
    arguments = parse(__doc__)
    programs = {"Python: AdamW": make_step(), "Python: AdamW(fused=True)": make_step(fused=True)}
    times = {name: [] for name in programs}
    for repeat in range(1 + repeats):
        for name, step in programs.items():
            elapsed = seconds(lambda: [step() for _ in range(steps)])
            if repeat > 0:  # the first one warms up
                times[name].append(elapsed / steps)
    for name in programs:
        record(arguments, name, times[name])


main()
