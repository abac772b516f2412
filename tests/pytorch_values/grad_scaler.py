# SPDX-License-Identifier: Apache-2.0
"""Writes grad_scaler.hpp: torch.amp.GradScaler('cpu') update by update, with inf and NaN put into gradients.

A loop of 24 updates for each case. Scale and growth tracker are float32 and integers that C++ must match exactly; the
parameters are float64, so that rounding does not hide the order of operations. Weights and data are sines of their
index, so that the C++ test needs no file and no generator.
"""
import textwrap

import torch

from oracle import braced, waves, write_header

UPDATES = 24
POWERS = dict(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
ODD = dict(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
LARGE = dict(init_scale=1e38, growth_factor=1.9, backoff_factor=0.9, growth_interval=1)
# name: settings, micro-batches of a window, what is clipped to after unscale_ (0: nothing), momentum, optimizers
CASES = {
    "plain": (POWERS, 1, 0.0, 0.9, 1),
    "plain_odd": (ODD, 1, 0.0, 0.9, 1),
    "plain_large": (LARGE, 1, 0.0, 0.0, 1),
    "clipped": (POWERS, 1, 0.2, 0.9, 1),
    "clipped_odd": (ODD, 1, 0.2, 0.0, 1),
    "window": (POWERS, 4, 0.0, 0.9, 1),
    "window_odd": (ODD, 3, 0.0, 0.9, 1),
    "window_clipped": (POWERS, 4, 0.2, 0.9, 1),
    "window_clipped_odd": (ODD, 3, 0.2, 0.9, 1),
    "two_optimizers": (POWERS, 1, 0.0, 0.9, 2),
    "two_optimizers_odd": (ODD, 1, 0.2, 0.9, 2),
    "two_optimizers_window": (ODD, 2, 0.2, 0.9, 2),
}


def make_layer(start):
    """Makes weight and bias of a layer from 4 to 3."""
    return [(0.5 * waves(3, 4, start=start)).requires_grad_(), (0.5 * waves(3, start=start + 12)).requires_grad_()]


def run(settings, steps, clip, momentum, count):
    """Returns [scale, tracker, then for each layer: sum of squares, first weight, last bias], after every update."""
    layers = [make_layer(20 * i) for i in range(count)]
    optimizers = [torch.optim.SGD(layer, lr=0.05, momentum=momentum) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", **settings)
    rows, micro_batches = [], 0
    for update in range(UPDATES):
        for micro in range(steps):
            x, y = waves(5, 4, start=100 + 20 * micro_batches), waves(5, 3, start=700 + 15 * micro_batches)
            micro_batches += 1
            loss = sum(torch.nn.functional.mse_loss(torch.tanh(x @ w.t() + b), y) for w, b in layers) / steps
            scaler.scale(loss).backward()
            if update % 7 == 4 and micro == steps // 2:
                layers[0][0].grad[0, 1] = float("inf")
            if update in (11, 12):
                layers[-1][1].grad[2] = float("nan")
        for layer, optimizer in zip(layers, optimizers):
            if clip and (optimizer is optimizers[0]):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(layer, clip)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        row = [scaler.get_scale(), float(scaler.state_dict()["_growth_tracker"])]
        for w, b in layers:
            row += [(w.square().sum() + b.square().sum()).item(), w[0, 0].item(), b[-1].item()]
        rows.append(row)
    return rows


def main():
    lines = [
        "// After every update: scale, growth tracker, and of each layer the sum of squares, first weight, last bias.",
        "inline const std::map<std::string, std::vector<std::vector<double>>> grad_scaler = {",
    ]
    for name, case in CASES.items():
        rows = [braced(row) + "," for row in run(*case)]
        rows[0], rows[-1] = "{" + rows[0], rows[-1][:-1] + "}},"
        lines.append(f'    {{"{name}",')
        for i, row in enumerate(rows):
            indent = 6 if i else 5
            lines += textwrap.wrap(row, 120, initial_indent=" " * indent, subsequent_indent=" " * 7)
    lines.append("};")
    write_header(__file__, [["map", "string", "vector"]], lines)


if __name__ == "__main__":
    main()
