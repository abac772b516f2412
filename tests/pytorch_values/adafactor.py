# SPDX-License-Identifier: Apache-2.0
"""Writes adafactor.hpp: results of Adafactor of Python's PyTorch and of transformers 5.23.0, in float64.

Parameters of 1 to 4 dimensions, and gradients that are sines of their index and of the step; so that the C++ test
needs no file and no generator. Two groups, the second (all but the matrix) with options of its own.
"""
import torch
import transformers

from oracle import braced, waves, write_header

TRANSFORMERS = "5.23.0"
STEPS, EVERY = 60, 15
SHAPES = [(7, 5), (9,), (4, 3, 6), (2, 3, 1, 5), (6, 1)]
# name: options of all, options of the second group
PYTORCH = {
    "pytorch": (dict(), dict()),
    "pytorch_lr": (dict(lr=0.5), dict(lr=0.05)),
    "pytorch_weight_decay": (dict(lr=0.1, weight_decay=0.1), dict(weight_decay=0.01)),
    "pytorch_d": (dict(lr=0.1, d=1.5), dict(d=2.0)),
    "pytorch_eps": (dict(lr=0.1, eps=(0.05, 0.1)), dict(eps=(0.2, 0.9))),
    "pytorch_beta2_decay": (dict(lr=0.1, beta2_decay=-0.5, eps=(1e-30, 1e-3)), dict(beta2_decay=-1.0)),
}
MANUAL = dict(relative_step=False)
TRANSFORMERS_RUNS = {
    "transformers": (dict(), dict()),
    "transformers_warmup_init": (dict(warmup_init=True), dict(warmup_init=False)),
    "transformers_lr": (dict(**MANUAL, lr=0.05), dict(lr=0.01)),
    "transformers_unscaled": (dict(**MANUAL, lr=0.05, scale_parameter=False), dict(scale_parameter=True)),
    "transformers_beta1": (dict(beta1=0.9), dict(beta1=0.5)),
    "transformers_weight_decay": (dict(weight_decay=0.3, clip_threshold=0.7), dict(weight_decay=0.1)),
    "transformers_all": (dict(**MANUAL, lr=0.05, beta1=0.8, weight_decay=0.1, eps=(1e-2, 0.3), decay_rate=-0.6),
                         dict(eps=(1e-1, 0.1))),
}
NAMES = {"clip_threshold": "d", "decay_rate": "beta2_decay"}


def run(make, options, second):
    parameters = [waves(*shape, start=10 * i).requires_grad_() for i, shape in enumerate(SHAPES)]
    optimizer = make([dict(params=parameters[:1]), dict(params=parameters[1:], **second)], **options)
    rows = []
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = waves(*parameter.shape, start=100 * step + i) ** 3 * (step % 7 + 0.1)
        optimizer.step()
        if step % EVERY == EVERY - 1:
            rows.append([p.detach().square().sum().item() for p in parameters])
    return rows


def cpp(value):
    return braced(value) if isinstance(value, tuple) else repr(value).lower()


def main():
    assert transformers.__version__ == TRANSFORMERS, f"pip install transformers=={TRANSFORMERS}"
    from transformers.optimization import Adafactor

    lines = [f"constexpr int adafactor_steps = {STEPS}, adafactor_sampled_every = {EVERY};",
             "inline const std::vector<std::vector<std::int64_t>> adafactor_shapes = {"
             + ", ".join("{" + ", ".join(map(str, shape)) + "}" for shape in SHAPES) + "};", "",
             "using gradaccum::optim::AdafactorOptions, gradaccum::optim::AdafactorVariant;",
             "struct AdafactorBaseline {", "  AdafactorOptions matrix, others;",
             "  std::vector<std::vector<double>> samples;  // the sum of squares of each parameter", "};", "",
             "inline const std::map<std::string, AdafactorBaseline> adafactors = {"]
    both = [(torch.optim.Adafactor, PYTORCH), (Adafactor, TRANSFORMERS_RUNS)]
    for make, runs in both:
        for key, (options, second) in runs.items():
            def made(given):
                common = dict(lr=0.01)
                if make is torch.optim.Adafactor:
                    common.update(variant="AdafactorVariant::pytorch", eps=(torch.finfo(torch.float64).eps, 1e-3))
                calls = {**common, **{NAMES.get(name, name): cpp(value) for name, value in given.items()}}
                lr = calls.pop("lr")
                return f"AdafactorOptions({lr})" + "".join(
                    f".{name}({value if isinstance(value, str) else cpp(value)})" for name, value in calls.items())

            rows = ",\n       ".join(map(braced, run(make, options, second)))
            lines.append(f'    {{"{key}",\n     {{{made(options)},\n      {made({**options, **second})},\n'
                         f'      {{{rows}}}}}}},')
    lines.append("};")
    write_header(__file__, [["gradaccum/optim/adafactor.hpp"], ["cstdint", "map", "string", "vector"]], lines)


if __name__ == "__main__":
    main()
