# SPDX-License-Identifier: Apache-2.0
"""Writes training_state.hpp: a training that began in C++ and continues in Python, and one that began in Python.

The folder training_state has states that C++ wrote, by `gradaccum.tests.pytorch_values "[write]"` in this
folder. They are read and written by the functions that docs/training_state.md shows, taken from there.
"""
import pathlib
import re
import shutil
import tempfile

import torch

from oracle import braced, fill_with_waves, waves, write_header
from safetensors_files import literal

HERE = pathlib.Path(__file__).parent
DOCUMENT = (HERE / "../../docs/training_state.md").read_text()
exec(re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[1])  # load_state and save_state

STEPS, MORE = 5, 7


class Training:
    def __init__(self, dtype):
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        fill_with_waves(self.model.to(dtype))
        weights, others = [[p for p in self.model.parameters() if (p.dim() == 2) is two] for two in (True, False)]
        self.adamw = torch.optim.AdamW([dict(params=others, lr=0.02), dict(params=weights)], lr=0.01, weight_decay=0.1)
        self.x, self.y = waves(20, 2, start=100).to(dtype), waves(20, 1, start=300).square().to(dtype)

    def run(self, steps):
        for _ in range(steps):
            self.adamw.zero_grad()
            torch.nn.functional.mse_loss(self.model(self.x), self.y).backward()
            self.adamw.step()

    def values(self):
        return [value for tensor in self.model.state_dict().values() for value in tensor.double().flatten().tolist()]


def begun_in_cpp(folder, dtype):
    training = Training(dtype)
    load_state(folder, training.model, training.adamw)
    training.run(MORE)
    return folder, training.values()


def begun_in_python(folder, dtype):
    training = Training(dtype)
    training.run(STEPS)
    save_state(folder, training.model, training.adamw)
    training.run(MORE)
    return folder, training.values()


def main():
    lines = ["struct SavedTraining {", "  std::map<std::string, std::string> files;",
             "  std::vector<double> continued;  // parameters and buffers, the steps that are more later", "};", "",
             f"constexpr int steps = {STEPS}, more_steps = {MORE};", ""]
    for begun in (begun_in_cpp, begun_in_python):
        lines.append(f"inline const std::map<std::string, SavedTraining> {begun.__name__} = {{")
        for dtype in ("float32", "float64"):
            with tempfile.TemporaryDirectory() as temporary:
                state = shutil.copytree(HERE / f"training_state/{dtype}/step-{STEPS:06}", f"{temporary}/state")
                folder, values = begun(pathlib.Path(state), getattr(torch, dtype))
                files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
            lines.append(f'    {{"{dtype}",\n     {{{{')
            lines += [f'     {{"{name}", std::string({literal(data)}, {len(data)})}},' for name, data in files.items()]
            lines.append(f"     }}, {braced(values)}}}}},")
        lines.append("};\n")
    write_header(__file__, [["map", "string", "vector"]], lines[:-1] + ["};"])


if __name__ == "__main__":
    main()
