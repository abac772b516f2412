# SPDX-License-Identifier: Apache-2.0
"""The networks of benchmark_compiled_step.cpp in Python: a step, forward and backward, as it is and by torch.compile."""

import argparse
import statistics
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.width, self.attention_norm, self.norm = width, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def attention(self, x):
        parts = self.query_key_value(x).view(x.size(0), x.size(1), 3, self.width // 32, 32).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.dense(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")))


class Transformer(nn.Module):
    def __init__(self, width, layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 2, bias=False)

    def forward(self, ids):
        return self.score(self.norm(self.blocks(self.embedding(ids)))[:, -1])


def perceptron(inputs, hidden):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(32 * 49, 10))


def tasks():
    def classes(rows, count=10):
        return torch.randint(count, (rows,))

    def ids(tokens):
        return torch.randint(1000, (8, tokens))
    return {
        "tiny": (perceptron(8, 8), torch.randn(16, 8), classes(16), False),
        "perceptron": (perceptron(784, 512), torch.randn(64, 784), classes(64), False),
        "convolutional": (convolutional(), torch.randn(32, 1, 28, 28), classes(32), False),
        "transformer": (Transformer(128, 2, 0), ids(64), classes(8, 2), False),
        "transformer_dropout": (Transformer(256, 4, 0.1), ids(128), classes(8, 2), False),
        "transformer_bfloat16": (Transformer(256, 4, 0), ids(128), classes(8, 2), True),
    }


def make_step(model, x, y, bfloat16, compiled):
    def loss_of(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return nn.functional.cross_entropy(model(x), y)
    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step():
        model.zero_grad()
        loss_of(x, y).backward()
    return step


def median_of(step):
    for _ in range(3):
        step()
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < 0.1:
        step()
        runs += 1
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(runs):
            step()
        times.append((time.perf_counter() - began) / runs)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(arguments.threads)
    for name, task in tasks().items():
        plain, compiled = (median_of(make_step(*task, compiled)) for compiled in (False, True))
        print(f"Python, {name}: {plain * 1e6:.1f} us as it is, {compiled * 1e6:.1f} us by torch.compile, "
              f"{plain / compiled:.2f} times as fast", flush=True)


main()
