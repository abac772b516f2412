# SPDX-License-Identifier: Apache-2.0
"""Writes muon.hpp: results of Python's torch.optim.Muon for the matrices of a network 6-10-10-4.

PyTorch iterates in bfloat16. Here it does in float64, but for one row, so that the other rows compare its arithmetic to
all digits.
"""
import types

import torch

from oracle import braced, fill_with_waves, sampled_training, waves, write_header

STEPS, EVERY = 61, 10
# name: options, options of the group of the last matrix, whether to iterate in bfloat16
TRAININGS = {
    "defaults": (dict(lr=0.02), dict(lr=0.05), False),
    "bfloat16": (dict(lr=0.02), dict(lr=0.05), True),
    "no_nesterov": (dict(lr=0.02, nesterov=False, momentum=0.8, weight_decay=0.5), dict(weight_decay=0.0), False),
    "match_rms_adamw": (dict(lr=0.03, adjust_lr_fn="match_rms_adamw"), dict(), False),
    "spectral_unclamped": (dict(lr=0.02, adjust_lr_fn="spectral_unclamped", ns_steps=3), dict(), False),
    "coefficients": (dict(lr=0.02, ns_coefficients=(2.0, -1.5, 0.5), eps=0.5, ns_steps=8), dict(momentum=0.3), False),
}


def run(options, second, in_bfloat16):
    torch.optim._muon.torch = torch if in_bfloat16 else types.SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 10), torch.nn.Tanh(),
                                torch.nn.Linear(10, 4))
    fill_with_waves(model.double())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Muon([dict(params=matrices[:2]), dict(params=matrices[2:], **second)], **options)
    x, y = waves(20, 6, start=100), waves(20, 4, start=300).square()
    return sampled_training(model, optimizer, x, y, matrices, STEPS, EVERY)


def cpp(value):
    if isinstance(value, tuple):
        return braced(value)
    if isinstance(value, str):
        return f"gradaccum::optim::MuonAdjustLr::{value}"
    return repr(value).lower()


def made(options):
    calls = "".join(f".{option}({cpp(value)})" for option, value in options.items() if option != "lr")
    return f"gradaccum::optim::MuonOptions({options['lr']!r}){calls}"


def main():
    includes = [["gradaccum/optim/muon.hpp"], ["map", "string", "vector"]]
    lines = [f"constexpr int muon_steps = {STEPS}, muon_sampled_every = {EVERY};", "",
             "struct MuonTraining {", "  gradaccum::optim::MuonOptions first, last;  // of the first matrices and the last",
             "  bool in_bfloat16;", "  std::vector<std::vector<double>> samples;    // the sum of squares of each matrix",
             "};", "", "inline const std::map<std::string, MuonTraining> muon_trainings = {"]
    for name, (options, second, in_bfloat16) in TRAININGS.items():
        rows = ",\n      ".join(map(braced, run(options, second, in_bfloat16)))
        lines.append(f'    {{"{name}",\n     {{{made(options)},\n      {made({**options, **second})},\n'
                     f"      {cpp(in_bfloat16)},\n      {{{rows}}}}}}},")
    lines.append("};")
    write_header(__file__, includes, lines)


if __name__ == "__main__":
    main()
