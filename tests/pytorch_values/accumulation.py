# SPDX-License-Identifier: Apache-2.0
"""Writes accumulation.hpp: results of Python's PyTorch for windows of micro-batches, in float64.

Two settings for each optimizer: equal micro-batches, the usual loop; and uneven ones, weighted by their rows, clipped.
Weights and data are sines of their index, so that the C++ test needs no file and no generator.
"""
import torch

from oracle import braced, fill_with_waves, waves, write_header

STEPS, CLIP = 3, 0.2
UNEVEN = [3, 5, 2, 6, 1, 4, 4, 7]
EVEN = [4] * 8
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    fill_with_waves(model, amplitude=0.5)
    return model


def run(make, sizes, weighted):
    """Returns the parameters' sum of squares and their first and last element, after every update."""
    model = make_model()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    rows, result = 0, []
    for window in range(0, len(sizes), STEPS):
        members = sizes[window:window + STEPS]
        optimizer.zero_grad()
        for size in members:
            x, y = waves(size, 4, start=100 + 4 * rows), waves(size, 3, start=500 + 3 * rows)
            rows += size
            share = size / sum(members) if weighted else 1 / len(members)
            (share * torch.nn.functional.mse_loss(model(x), y)).backward()
        if weighted:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        result.append([flat.square().sum().item(), flat[0].item(), flat[-1].item()])
    return result


def main():
    lines = ["// After every update: sum of squares of all parameters, the first, the last.",
             "using Trace = std::vector<std::vector<double>>;"]
    for name, sizes, weighted in (("even", EVEN, False), ("uneven", UNEVEN, True)):
        lines += ["", f"inline const std::map<std::string, Trace> {name} = {{"]
        for optimizer, make in OPTIMIZERS.items():
            rows = ",\n      ".join(map(braced, run(make, sizes, weighted)))
            lines.append(f'    {{"{optimizer}",\n     {{{rows}}}}},')
        lines.append("};")
    write_header(__file__, [["map", "string", "vector"]], lines)


if __name__ == "__main__":
    main()
