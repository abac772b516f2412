# SPDX-License-Identifier: Apache-2.0
"""What gradaccum_export makes of unusual modules, or refuses."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "compiled_step"))
import wheel  # noqa: E402, F401: finds tools/ and torch

import torch  # noqa: E402
from torch import nn  # noqa: E402

import gradaccum_export  # noqa: E402

BATCH = {"x": torch.randn(5, 4), "labels": torch.randint(3, (5,))}
folder = pathlib.Path(tempfile.mkdtemp())


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])


def values_of(module, batch=BATCH, loss=loss, name="model", **options):
    """Exports a training step. Returns what the manifest says, and what was printed."""
    options = {"passes": ("training",), "capability": "DEFAULT", "source_only": True, **options}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        gradaccum_export.export(module, batch, loss, folder / name, **options)
    return json.loads((folder / name / "manifest.json").read_text())["values"], printed.getvalue()


def refused(part, *arguments, **options):
    try:
        values_of(*arguments, **options)
    except gradaccum_export.Failure as failure:
        assert part in str(failure), f"{failure}: must say {part}"
        return
    raise AssertionError(f"must be refused: {part}")


class Module(nn.Module):
    def __init__(self, forward=None):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.run = forward or (lambda self, x: self.linear(x))

    def forward(self, x):
        return self.run(self, x)


def gradient_norm(name="model"):
    from safetensors.torch import load_file
    return load_file(folder / name / "sample.safetensors")["graph-0.wanted.gradient.linear.weight"][-1]


def test_refusals():
    refused("must be in training mode", Module().eval())
    refused("no argument for the batch's labels", Module(), loss=None)
    refused("must be in the batch", Module(), target="wanted")
    refused("the same number of rows", Module(), {"x": torch.randn(5, 4), "labels": torch.randint(3, (4,))})
    refused("without blanks", Module(), {"an x": torch.randn(5, 4)})
    refused("a file must have a plain name", Module(), files={"../config.json": b""})
    refused("a file must have a plain name", Module(), files={"model.safetensors": b""})
    refused("at least one parameter must require grad", Module().requires_grad_(False))
    criterion = nn.Linear(3, 3)
    refused("make what has them a submodule", Module(), loss=lambda o, b: loss(criterion(o), b))
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    refused("there is mine.txt", Module(), name="full")
    assert (folder / "full" / "mine.txt").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["full"], "nothing half-made stays"


def test_a_loss_that_reads_the_module_has_its_gradient():
    module = Module()
    values_of(module)
    plain = gradient_norm()
    values_of(module, loss=lambda output, batch: loss(output, batch) + 100 * module.linear.weight.square().sum())
    total = loss(module(BATCH["x"]), BATCH) + 100 * module.linear.weight.square().sum()
    expected = torch.autograd.grad(total, module.linear.weight)[0].norm()
    assert (gradient_norm() - expected).abs() < 1e-4 * expected and expected > 10 * plain


def test_a_buffer_that_is_exchanged_moves():
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)
    module = Module(forward)
    values, _ = values_of(module)
    assert values["graph-0.moved"] == "y" and module.mean.norm() == 0


def test_a_branch_on_the_number_of_rows_is_noticed():
    values, printed = values_of(Module(lambda self, x: self.linear(x) * (2 if len(x) % 2 else 1)))
    assert values["graph-0.any_rows"] == "" and "only of" in printed, printed
    values, _ = values_of(Module())
    assert values["graph-0.any_rows"] == "Long [*], Float [*, 4]" and values["graph-0.least_rows"] == 1
    values, printed = values_of(Module(lambda self, x: self.linear(x.squeeze() - x[1])))
    assert values["graph-0.least_rows"] == 2 and "not of one row" in printed, printed


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.head = (nn.Linear(4, size) for size in (8, 8, 8, 3))

    def forward(self, x):
        tokens = x.unsqueeze(1) * torch.linspace(-1, 1, 6)[:, None]
        query, key, value = (part(tokens).unflatten(2, (2, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head(mixed[:, 0, :4])


def test_a_gradient_that_is_mere_rounding_is_no_difference():
    """That of the bias of an attention's keys: the compiled code attends by other operations."""
    values, printed = values_of(Attention(), loss=lambda output, batch: 100 * loss(output, batch))
    assert values["graph-0.any_rows"] == "Long [*], Float [*, 4]", printed


def test_state_and_random_numbers_are_as_before():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3).eval())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    values, _ = values_of(module, {"input": BATCH["x"], "labels": BATCH["labels"]}, passes=("training", "inference"))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module] == [True, True, True, False]
    assert values["graph-1.names"] == "input" and values["graph-0.names"] == "input labels"


def test_parameters_that_are_not_contiguous():
    module = Module()
    module.linear.weight = nn.Parameter(torch.randn(4, 3).t())
    values, _ = values_of(module)
    assert values["model"].startswith("linear.weight Float [3, 4] parameter\n")


def main():
    for name, test in globals().copy().items():
        if name.startswith("test_"):
            test()
            print(f"{name}: passed", flush=True)


main()
