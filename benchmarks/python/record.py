# SPDX-License-Identifier: Apache-2.0
"""Shared by the scripts here: their options, and how they report a result."""

import argparse
import json
import statistics
import time

import torch


def parse(description, *add_more):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=2, help="processor threads; 0: PyTorch chooses")
    parser.add_argument("--json", default="", help="append the results to this file, an object a line")
    for add in add_more:
        add(parser)
    arguments = parser.parse_args()
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    return arguments


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def record(arguments, contestant, times, **more):
    median = statistics.median(times)
    shown = (f"{name} {value if isinstance(value, str) else f'{value:.1f}'}" for name, value in more.items())
    print(f"{contestant}: {median:.6f} s", *shown, sep=", ")
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(json.dumps({"contestant": contestant, "median_s": median, **more}) + "\n")
