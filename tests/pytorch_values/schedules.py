# SPDX-License-Identifier: Apache-2.0
"""Writes schedules.hpp: the learning rates of Python's schedulers, ReduceLROnPlateau's too, and AveragedModel's averages.

torch.optim.lr_scheduler's schedulers are run update by update. The schedules of the transformers package are LambdaLR
with the factors below.
"""
import math
import textwrap
import warnings

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from oracle import braced, waves, write_header

PEAK = 3e-3


def rates_of(make_scheduler, last):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(last + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmed_up(warmup, after, lowest=0.0):
    """Returns the factor by update: a line from `lowest` to 1, then `after`."""
    return lambda u: lowest + (1 - lowest) * u / warmup if u < warmup else after(u)


def falling(first, total, shape, lowest=0.0):
    return lambda u: lowest + (1 - lowest) * shape(u - first, total - first) if u < total else lowest


SHAPES = {
    "linear": lambda done, length: (length - done) / length,
    "cosine": lambda done, length: 0.5 * (1 + math.cos(math.pi * (done / length))),
    "one_minus_sqrt": lambda done, length: 1 - math.sqrt(done / length),
}


def in_turn(first, milestone, second):
    return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [first(optimizer), second(optimizer)], [milestone])


def torch_scheduler(name, **options):
    return lambda optimizer: getattr(lr_scheduler, name)(optimizer, **options)


def factors(factor):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


# name: scheduler, last update
SCHEDULES = {
    "LinearLR_up": (torch_scheduler("LinearLR", start_factor=0.1, total_iters=20), 25),
    "LinearLR_down": (torch_scheduler("LinearLR", start_factor=1.0, end_factor=0.25, total_iters=30), 35),
    "CosineAnnealingLR": (torch_scheduler("CosineAnnealingLR", T_max=40, eta_min=1e-4), 40),
    "CosineAnnealingLR_to_0": (torch_scheduler("CosineAnnealingLR", T_max=40), 40),
    "SequentialLR": (in_turn(torch_scheduler("LinearLR", start_factor=0.01, total_iters=10), 10,
                             torch_scheduler("CosineAnnealingLR", T_max=40, eta_min=1e-5)), 50),
    "ConstantLR": (torch_scheduler("ConstantLR", factor=0.25, total_iters=5), 10),
    "StepLR": (torch_scheduler("StepLR", step_size=4, gamma=0.5), 20),
    "ExponentialLR": (torch_scheduler("ExponentialLR", gamma=0.9), 20),
    "transformers_constant": (factors(warmed_up(10, lambda u: 1.0)), 15),
    "transformers_linear": (factors(warmed_up(10, falling(10, 50, SHAPES["linear"]))), 60),
    "transformers_cosine": (factors(warmed_up(10, falling(10, 50, SHAPES["cosine"]))), 60),
    "transformers_cosine_with_min_lr": (factors(warmed_up(10, falling(10, 50, SHAPES["cosine"], 0.1))), 60),
    # Shifted by one update: the first has a tenth of the peak, number 9 the peak.
    "transformers_cosine_warmup_with_min_lr":
        (factors(lambda u: (u + 1) / 10 if u < 10 else falling(9, 49, SHAPES["cosine"], 0.1)(u)), 60),
    **{f"transformers_wsd_{name}":
        (factors(warmed_up(10, lambda u, s=shape: 1.0 if u < 35 else falling(35, 50, s, 0.1)(u), lowest=0.1)), 60)
       for name, shape in SHAPES.items()},
    "no_warmup": (factors(falling(0, 20, SHAPES["cosine"])), 25),
    "one_update": (factors(falling(0, 1, SHAPES["linear"])), 3),
    "all_warmup": (factors(warmed_up(20, lambda u: 0.0)), 25),
    "long_cosine": (factors(warmed_up(100, falling(100, 5000, SHAPES["cosine"]))), 5001),
    "long_linear": (factors(warmed_up(100, falling(100, 5000, SHAPES["linear"]))), 5001),
}
LONG = [0, 1, 99, 100, 101, 1000, 2500, 4000, 4900, 4990, 4998, 4999, 5000, 5001]

# The watched metric: it falls, stays, falls by little, rises, is NaN and infinite, and falls again.
WATCHED = [1.0, 0.8, 0.80001, 0.7999, 0.7998, 0.79, 0.9, math.nan, 0.95, 0.5, 0.5, 0.5, math.inf, 0.5, 0.49999, 0.4995,
           0.51, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.19, 0.1899, 0.5, 0.5, 0.5, -0.1, -0.1, -0.10001, -0.2, -0.1, 0.0,
           *[-0.1] * 10]
# name: options of ReduceLROnPlateau; two groups, of PEAK and a tenth of it
PLATEAUS = {
    "defaults": {},
    "patience_0": {"patience": 0, "factor": 0.5},
    "patience_2": {"patience": 2, "factor": 0.5},
    "max": {"mode": "max", "patience": 1, "factor": 0.3},
    "absolute": {"patience": 1, "factor": 0.5, "threshold": 0.05, "threshold_mode": "abs"},
    "max_absolute": {"mode": "max", "patience": 1, "factor": 0.5, "threshold": 0.1, "threshold_mode": "abs"},
    "threshold": {"patience": 1, "factor": 0.5, "threshold": 0.1},
    "threshold_0": {"patience": 1, "factor": 0.5, "threshold": 0.0},
    "cooldown": {"patience": 1, "factor": 0.5, "cooldown": 3},
    "min_lr": {"patience": 0, "factor": 0.25, "min_lr": 1e-4},
    "eps": {"patience": 0, "factor": 0.5, "eps": 1e-4},
}


def plateau_rates(options):
    """Returns the rates of both groups after each value."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (PEAK, PEAK / 10)])
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    rates = []
    for number in WATCHED:
        scheduler.step(number)
        rates += [group["lr"] for group in optimizer.param_groups]
    return rates


UPDATES = 8
# name: decay, warmup, buffers, rounded to eighths (the arithmetic is then exact, on every machine)
AVERAGES = {
    "decay_0_9": (0.9, False, False, False),
    "decay_0_999": (0.999, False, False, False),
    "decay_0_2": (0.2, False, False, False),
    "buffers": (0.9, False, True, False),
    "warmup": (0.3, True, False, False),
    "exact": (0.75, False, True, True),
}


def ema_with_warmup(decay):
    def average(averaged, current, updates):
        so_far = updates.item()
        get_ema_multi_avg_fn(min(decay, (1 + so_far) / (10 + so_far)))(averaged, current, updates)
    return average


def floating(module):
    return [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]


@torch.no_grad()
def averages(decay, warmup, buffers, eighths):
    """Returns all averages after each update."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    averaged = AveragedModel(model, multi_avg_fn=(ema_with_warmup if warmup else get_ema_multi_avg_fn)(decay),
                             use_buffers=buffers)
    rows = []
    for update in range(UPDATES):
        start = 100 * update
        for tensor in floating(model):
            values = waves(*tensor.shape, start=start)
            tensor.copy_(torch.round(values * 8) / 8 if eighths else values)
            start += tensor.numel()
        averaged.update_parameters(model)
        rows.append(torch.cat([tensor.flatten() for tensor in floating(averaged.module)]).tolist())
    return rows


def numbers(values):
    return [Literal("NAN" if math.isnan(value) else "INFINITY") if not math.isfinite(value) else value for value in values]


class Literal(str):
    def __repr__(self):
        return str(self)


def wrapped(values):
    return textwrap.fill(braced(values), 110, initial_indent="\n     ", subsequent_indent="      ") if values else ""


def main():
    lines = [f"constexpr double peak = {PEAK!r};", "",
             "struct Rates {", "  std::vector<double> rates;",
             "  std::vector<std::int64_t> updates;  // where empty: 0, 1, 2, ...", "};", "",
             "inline const std::map<std::string, Rates> schedules = {"]
    for name, (scheduler, last) in SCHEDULES.items():
        rates = rates_of(scheduler, last)
        sampled = LONG if name.startswith("long") else []
        chosen = [rates[update] for update in sampled or range(last + 1)]
        lines.append(f'    {{"{name}", {{{wrapped(chosen)},{wrapped(sampled) or " {}"}}}}},')
    lines += ["};", "", f"inline const std::vector<double> watched ={wrapped(numbers(WATCHED))};", "",
              "inline const std::map<std::string, std::vector<double>> plateaus = {"]
    for name, options in PLATEAUS.items():
        lines.append(f'    {{"{name}",{wrapped(plateau_rates(options))}}},')
    lines += ["};", "", f"constexpr int average_updates = {UPDATES};", "", "struct Averages {", "  double decay;",
              "  bool warmup, buffers, eighths;",
              "  std::vector<std::vector<double>> values;  // after each update: parameters, then floating buffers",
              "};", "", "inline const std::map<std::string, Averages> averages = {"]
    for name, options in AVERAGES.items():
        rows = ",".join(map(wrapped, averages(*options)))
        lines.append(f'    {{"{name}", {{{", ".join(map(repr, options)).lower()}, {{{rows}}}}}}},')
    lines.append("};")
    write_header(__file__, [["cmath", "cstdint", "map", "string", "vector"]], lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # SequentialLR warns about its own calls
    main()
