#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""launch.sh 2 python3 data_parallel.py: a window of DistributedDataParallel with no_sync, for compare_processes.py.
With --optimizer adamw also with its state divided, by ZeroRedundancyOptimizer."""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

WIDTH, LAYERS, ROWS = 1024, 8, 32
WINDOWS = 4  # consecutive ones, as in ours, between two barriers


def sent_bytes():
    with open("/proc/net/dev") as devices:
        for line in devices:
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[8])
    return 0


def window(model, optimizer, inputs):
    for i, x in enumerate(inputs):
        last = i + 1 == len(inputs)
        with contextlib.nullcontext() if last else model.no_sync():
            (model(x).square().mean() / len(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()


def ways(optimizer):
    """Returns by name whether gradients are views of the buckets, and how to make the optimizer."""
    if optimizer == "adamw":
        return {
            "Python DDP with no_sync, AdamW": (True, lambda p: torch.optim.AdamW(p, lr=1e-3)),
            "Python DDP with no_sync, ZeroRedundancyOptimizer": (
                True, lambda p: ZeroRedundancyOptimizer(p, optimizer_class=torch.optim.AdamW, lr=1e-3)),
        }
    return {
        "Python DDP with no_sync": (False, lambda p: torch.optim.SGD(p, lr=1e-3)),
        "Python DDP with no_sync, gradients as bucket views": (True, lambda p: torch.optim.SGD(p, lr=1e-3)),
    }


def bytes_of_state(optimizer):
    own = getattr(optimizer, "optim", optimizer)
    tensors = [value for state in own.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    contestants = {}
    for name, (views, optimizer_of) in ways(arguments.optimizer).items():
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=views)
        contestants[name] = (model, optimizer_of(model.parameters()), [], [])
    inputs = []
    for i in range(arguments.micro_batches):
        torch.manual_seed(1 + rank * arguments.micro_batches + i)
        inputs.append(torch.randn(ROWS, WIDTH))
    for repeat in range(arguments.repeats + 2):
        for model, optimizer, times, volumes in contestants.values():
            dist.barrier()
            before = sent_bytes()
            start = time.perf_counter()
            for _ in range(WINDOWS):
                window(model, optimizer, inputs)
            dist.barrier()
            if repeat >= 2:  # DDP rearranges its buckets after the first
                times.append((time.perf_counter() - start) / WINDOWS)
                volumes.append((sent_bytes() - before) / WINDOWS)
    if rank == 0:
        with open(arguments.json or os.devnull, "a") as file:
            for name, (_, optimizer, times, volumes) in contestants.items():
                row = {"contestant": name, "median_s": statistics.median(times), "bytes": statistics.median(volumes),
                       "state": bytes_of_state(optimizer)}
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


main()
