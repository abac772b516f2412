# SPDX-License-Identifier: Apache-2.0
"""read_weights.py FOLDER: Python reads the weights that C++ saved, and must compute the same as C++."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "compiled_step"))
import wheel  # noqa: E402, F401: finds python/ and torch

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from export_models import Own  # noqa: E402


def check(name, model, inputs, wanted):
    with torch.no_grad():
        output = model.eval()(**inputs)
    off = (getattr(output, "logits", output) - wanted).norm() / wanted.norm()
    if not off < 1e-5:
        sys.exit(f"{name}: the output differs by {off} of its norm")


def main():
    folder = pathlib.Path(sys.argv[1])
    vit = load_file(folder / "vit.output.safetensors")
    model = transformers.ViTForImageClassification.from_pretrained(folder / "vit.trained")
    check("vit", model, {"pixel_values": vit["pixel_values"]}, vit["output"])
    own = load_file(folder / "own.output.safetensors")
    model = Own()
    model.load_state_dict(load_file(folder / "own.trained/model.safetensors"))
    check("own", model, {"x": own["x"]}, own["output"])
    untrained = Own()
    with torch.no_grad():
        if torch.allclose(untrained.eval()(own["x"]), own["output"], rtol=1e-2):
            sys.exit("own: other weights must give another output")


if __name__ == "__main__":
    main()
