# SPDX-License-Identifier: Apache-2.0
"""Shared by the scripts of the parent folder: numbers that C++ can compute, too, and the header that they write.

It has a separate folder, because `./bootstrap.sh oracle` runs every script of the parent folder.
"""
import pathlib

import torch


def waves(*shape, start):
    """Returns sines of their index, so that the C++ test needs no file and no generator."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(start, start + count, dtype=torch.float64)).reshape(shape)


def fill_with_waves(model, amplitude=1.0):
    """Fills all parameters with one wave."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(amplitude * waves(*parameter.shape, start=start))
            start += parameter.numel()


def sampled_training(model, optimizer, x, y, parameters, steps, every):
    """Trains, and returns the sum of squares of each parameter after every so many steps."""
    rows = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % every == 0:
            rows.append([p.detach().square().sum().item() for p in parameters])
    return rows


def braced(values):
    """Formats values as a C++ initializer of a vector; repr keeps every bit of a float."""
    return "{" + ", ".join(map(repr, values)) + "}"


def write_header(script, includes, lines):
    """Writes the header of the script's name; includes are in groups, as #include has them."""
    script = pathlib.Path(script)
    head = ["// SPDX-License-Identifier: Apache-2.0", "#pragma once", "",
            f"// Written by {script.name} with PyTorch {torch.__version__.split('+')[0]}. Do not edit.", ""]
    for group in includes:
        head += [f"#include <{name}>" for name in group] + [""]
    text = [*head, "namespace pytorch_values {", "", *lines, "", "}  // namespace pytorch_values", ""]
    script.with_suffix(".hpp").write_text("\n".join(text))
