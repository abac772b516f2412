# SPDX-License-Identifier: Apache-2.0
"""Writes optimizers.hpp: results of Python's PyTorch for 1001 steps of each optimizer, in float64.

A network 2-3-1 with sigmoids; weights and data are sines of their index, so that the C++ test needs no file and no
generator. Two parameter groups, the second (both biases) with other options.
"""
import torch

from oracle import braced, fill_with_waves, sampled_training, waves, write_header

STEPS, EVERY = 1001, 100
# name: class, options of all, options of the second group
OPTIMIZERS = {
    "SGD": ("SGD", dict(lr=0.1), dict(lr=0.2)),
    "SGD_weight_decay": ("SGD", dict(lr=0.1, weight_decay=1e-2), dict(weight_decay=1e-3)),
    "SGD_momentum": ("SGD", dict(lr=0.1, momentum=0.9), dict(momentum=0.5)),
    "SGD_dampening": ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.4, weight_decay=1e-3), dict(dampening=0.1)),
    "SGD_nesterov": ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-6), dict(lr=0.05)),
    "Adam": ("Adam", dict(lr=0.01), dict(lr=0.02)),
    "Adam_weight_decay": ("Adam", dict(lr=0.01, weight_decay=1e-2), dict(weight_decay=1e-3)),
    "Adam_betas": ("Adam", dict(lr=0.01, betas=(0.8, 0.95), eps=1e-4), dict(eps=1e-2)),
    "Adam_amsgrad": ("Adam", dict(lr=0.01, weight_decay=1e-6, amsgrad=True), dict(lr=0.02)),
    "AdamW": ("AdamW", dict(lr=0.01), dict(lr=0.02)),
    "AdamW_weight_decay": ("AdamW", dict(lr=0.01, weight_decay=0.5), dict(weight_decay=0.1)),
    "AdamW_amsgrad": ("AdamW", dict(lr=0.01, weight_decay=1e-3, amsgrad=True), dict(lr=0.02)),
    "Lion": ("Lion", dict(lr=0.002), dict(lr=0.001)),
    "Lion_weight_decay": ("Lion", dict(lr=0.002, betas=(0.95, 0.98), weight_decay=0.5), dict(weight_decay=0.1)),
}


class Lion(torch.optim.Optimizer):
    """PyTorch has none: the program 2 of Chen et al., 2023."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1), torch.nn.Sigmoid())
    fill_with_waves(model.double())
    return model


def run(name, options, second):
    model = make_model()
    weights, biases = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
    kind = Lion if name == "Lion" else getattr(torch.optim, name)
    optimizer = kind([dict(params=weights), dict(params=biases, **second)], **options)
    x, y = waves(20, 2, start=100), waves(20, 1, start=300).square()
    return sampled_training(model, optimizer, x, y, list(model.parameters()), STEPS, EVERY)


def cpp(value):
    if isinstance(value, tuple):
        return braced(value)
    return repr(value).lower()


def main():
    includes = [["gradaccum/optim/lion.hpp"], ["torch/optim/adam.h", "torch/optim/adamw.h", "torch/optim/sgd.h"],
                ["map", "memory", "string", "vector"]]
    lines = [f"constexpr int optimizer_steps = {STEPS}, sampled_every = {EVERY};", "",
             "struct Baseline {", "  std::shared_ptr<torch::optim::OptimizerOptions> weights, biases;",
             "  std::vector<std::vector<double>> samples;  // the sum of squares of each parameter", "};", "",
             "inline const std::map<std::string, Baseline> optimizers = {"]
    for key, (name, options, second) in OPTIMIZERS.items():
        def made(all_options):
            calls = "".join(f".{option}({cpp(value)})" for option, value in all_options.items() if option != "lr")
            kind = f"{'gradaccum' if name == 'Lion' else 'torch'}::optim::{name}Options"
            return f"std::make_shared<{kind}>({kind}({all_options['lr']!r}){calls})"

        rows = ",\n       ".join(map(braced, run(name, options, second)))
        lines.append(f'    {{"{key}",\n     {{{made(options)},\n      {made({**options, **second})},\n      {{{rows}}}}}}},')
    lines.append("};")
    write_header(__file__, includes, lines)


if __name__ == "__main__":
    main()
