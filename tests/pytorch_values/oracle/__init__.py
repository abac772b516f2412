# SPDX-License-Identifier: Apache-2.0
"""What the scripts beside this folder share: numbers that C++ can make too, and the header they write.

A folder of its own, since `./bootstrap.sh oracle` runs every script that lies beside it.
"""
import pathlib

import torch


def waves(*shape, start):
    """Sines of their index, so that the C++ test needs no file and no generator."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(start, start + count, dtype=torch.float64)).reshape(shape)


def fill_with_waves(model, amplitude=1.0):
    """One wave that goes through all parameters."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(amplitude * waves(*parameter.shape, start=start))
            start += parameter.numel()


def braced(values):
    """The values as C++ initialises a vector with them; repr gives every bit of a float."""
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
