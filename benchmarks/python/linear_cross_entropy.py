# SPDX-License-Identifier: Apache-2.0
"""The contests of benchmark_linear_cross_entropy.cpp by Python's F.linear_cross_entropy, in chunks and by all logits."""

import torch
from torch import nn

from record import parse, record, seconds

WIDTH, REPEATS = 256, 7


def compare(arguments, tokens, vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = (torch.randn(vocabulary, WIDTH) * 0.05).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=128, chunking_method=None)
    for name, options in (("in 128 tokens a chunk", chunks), ("in its own chunks", nn.LinearCrossEntropyOptions()),
                          ("all logits", None)):
        def run():
            nn.functional.linear_cross_entropy(hidden, weight, target, options=options).backward()

        run(), run()
        times = [seconds(run) for _ in range(REPEATS)]
        record(arguments, f"Python: linear_cross_entropy {name}, {tokens} tokens, {vocabulary} words", times)


def main():
    arguments = parse(__doc__)
    compare(arguments, 1024, 50_257)
    compare(arguments, 512, 250_880)


if __name__ == "__main__":
    main()
