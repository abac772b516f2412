# SPDX-License-Identifier: Apache-2.0
"""Tests gradaccum.export with unusual modules, and with ones that it refuses."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import types
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "compiled_step"))
import wheel  # noqa: E402, F401: finds python/ and torch

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gradaccum import export, export_model, linear_cross_entropy  # noqa: E402

BATCH = {"x": torch.randn(5, 4), "labels": torch.randint(3, (5,))}
folder = pathlib.Path(tempfile.mkdtemp())


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])


def values_of(module, batch=BATCH, loss=loss, name="model", **options):
    """Exports a training step. Returns the manifest's values, and the output."""
    options = {"passes": ("training",), "capability": "DEFAULT", "source_only": True, **options}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        export.export(module, batch, loss, folder / name, **options)
    return json.loads((folder / name / "manifest.json").read_text())["values"], printed.getvalue()


def refused(part, *arguments, **options):
    try:
        values_of(*arguments, **options)
    except export.Failure as failure:
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
    refused("must be a tensor of one element that depends on parameters, got Float [5]", Module(), loss=lambda o, b: o[:, 0])
    refused("got float", Module(), loss=lambda o, b: 1.0)
    refused("got Float [] without a gradient", Module(), loss=lambda o, b: b["x"].sum())
    refused("items must give a tensor of one element, got int", Module(), items=lambda b: 5)
    refused('a dict with wrong: give export a forward', Module(lambda self, x: {"wrong": self.linear(x)}))
    refused("a module whose output has one", Module(lambda self, x: (x.sum(), x)), {"x": BATCH["x"]}, loss=None)
    refused("the module must run in training with labels Long [5], x Float [5, 4], but: ",
            Module(lambda self, x: self.linear(x[:1, :2])))
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    refused("there is mine.txt", Module(), name="full")
    assert (folder / "full" / "mine.txt").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["full"], "nothing half-made stays"


def test_what_torch_cannot_trace_is_told_with_the_line():
    def branch(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)
    depends = "branches and shapes must not depend on the values of tensors"
    line = f"export_modules.py:{branch.__code__.co_firstlineno + 1}: {depends}"
    refused(line, Module(branch))
    refused(depends, Module(), loss=lambda output, batch: nn.functional.ctc_loss(
        output[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])))
    refused("numpy", Module(lambda self, x: self.linear(torch.from_numpy(x.numpy()))))


def counting(how):
    """Returns a module whose forward calls `how`, which counts, and a function that returns the counted state."""
    module = Module(lambda self, x: (how(self), self.linear(x))[1])
    module.step, module.seen, module.deep, module.moved = 0, [], {"of": types.SimpleNamespace(n=0)}, torch.zeros(2)
    return module, lambda: repr((module.step, module.seen, module.deep, module.moved, random.getstate()))


def test_what_forward_counts_in_python_is_refused_and_stays():
    def count_step(self):
        if self.training:
            self.step += 1
    cases = {"step": count_step, "seen[1]": lambda self: self.seen.append(1), "moved": lambda self: self.moved.add_(1),
             "deep.of.n": lambda self: setattr(self.deep["of"], "n", self.deep["of"].n + 1),
             "random's numbers": lambda self: random.random()}
    for name, how in cases.items():
        module, text = counting(how)
        before = text()
        refused(f"changes {name}: compiled code would repeat the first run", module)
        assert text() == before, f"{text()}, not {before}"
    calls = 0

    def loss_that_counts(output, batch):
        nonlocal calls
        calls += 1
        return loss(output, batch)
    refused("changes loss.calls", Module(), loss=loss_that_counts)
    assert calls == 0
    global slow
    slow = 0

    def count_globally(self, x):
        global slow
        slow += 1
        return self.linear(x) * (1 + 1e-4 * slow)
    refused("has another", Module(count_globally))


def test_folders_of_killed_exports_are_removed():
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {process: f"killed.tmp-{process}" for process in (ended.pid, os.getpid(), os.getppid())}
    for name in names.values():
        (folder / name / "half").mkdir(parents=True)
    refused("got float", Module(), loss=lambda output, batch: 1.0, name="killed")
    assert [path.name for path in folder.glob("killed*")] == [names[os.getppid()]], "another export may be running"


def loss_and_gradients(function, bias, dtype):
    """Returns the loss of a head over 40 classes, and its gradients, with some labels that do not count."""
    torch.manual_seed(2)
    shapes = ((3, 200, 8), (40, 8), *([(40,)] if bias else []))
    tensors = [torch.randn(shape).bfloat16().to(dtype).requires_grad_() for shape in shapes]  # equal in all dtypes
    labels = torch.randint(40, (3, 200)).index_fill(1, torch.arange(4, 200, 3), -100)
    result = function(*tensors[:2], labels, *tensors[2:])
    return [result, *torch.autograd.grad(3 * result, tensors)]


def test_a_head_by_parts_has_the_loss_and_gradients_of_all_logits():
    def whole(hidden, weight, labels, bias=None):
        logits = nn.functional.linear(hidden, weight, bias)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def by_parts(hidden, weight, labels, bias=None):
        return linear_cross_entropy.linear_cross_entropy(hidden, weight, labels, bias, parts)

    def counting_all(hidden, weight, labels, bias=None):
        return by_parts(hidden, weight, labels.clamp(min=0), bias)

    def furthest(one, other):
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other))

    for bias in (False, True):
        exact, narrow = loss_and_gradients(whole, bias, torch.float64), loss_and_gradients(whole, bias, torch.bfloat16)
        for parts in (200, 7, 1):
            assert furthest(loss_and_gradients(by_parts, bias, torch.float64), exact) < 1e-14
            in_bfloat16 = loss_and_gradients(by_parts, bias, torch.bfloat16)
            assert furthest(in_bfloat16, exact) < 2 * furthest(narrow, exact)  # with sums in bfloat16 2.6 times as far
            others = loss_and_gradients(counting_all, bias, torch.float64)
            assert furthest(others, exact) > 1e-2  # labels that do not count were counted


def test_the_operation_that_save_step_records_equals_a_cross_entropy_of_all_logits():
    def whole(hidden, weight, bias, target, weights, ignore_index, smoothing, z_loss):
        logits, classes = nn.functional.linear(hidden, weight, bias).double().flatten(0, -2), target.flatten()
        losses = nn.functional.cross_entropy(logits, classes, ignore_index=ignore_index, label_smoothing=smoothing,
                                             reduction="none")
        counted = (classes != ignore_index).double()
        losses = losses + z_loss * logits.logsumexp(-1).square() * counted
        factors = counted if weights is None else counted * weights.flatten()
        return (losses * factors).sum() / factors.sum().clamp(min=1e-300), losses.reshape(target.shape)

    def furthest(of_results, other, inputs):
        one, other = ([result[0], result[1].sum(), *torch.autograd.grad(result[0], inputs)] for result in (of_results, other))
        return max(((a.double() - b.double()).norm() / (1e-3 + b.double().norm())).item() for a, b in zip(one, other))

    with linear_cross_entropy.as_operation():
        operation = torch.ops.gradaccum.linear_cross_entropy
        for shape, *of_losses, budget, dtype in itertools.product(
                ((3, 20), (60,), (1, 1)), (0, 0.1), (0, 0.01), (1, 2000, 10**9), (torch.float64, torch.bfloat16, torch.float16)):
            torch.manual_seed(0)
            inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((*shape, 8), (40, 8), (40,))]
            target = torch.randint(40, shape).index_fill(-1, torch.arange(0, shape[-1], 4), 5)
            weights = torch.rand(shape, dtype=torch.float64)
            for bias, factors in itertools.product((None, inputs[2]), (None, weights)):
                given = (*inputs[:2], bias, target, factors, 5, *of_losses)
                own, exact = operation(*given, budget, dtype), whole(*given)
                of = [tensor for tensor in (*inputs[:2], bias) if tensor is not None]
                assert furthest(own, exact, of) < (1e-13 if dtype == torch.float64 else 2e-2)
        none = operation(*inputs[:2], None, torch.full((1, 1), 5), None, 5, 0, 0, 1, torch.float16)
        assert none[0] == 0 and torch.autograd.grad(none[0], inputs[0])[0].count_nonzero() == 0
        scalar = operation(inputs[0][0, 0], inputs[1], None, target[0, 0] + 1, None, 5, 0, 0, 10**9, torch.float16)
        assert scalar[1].shape == () and scalar[0] == scalar[1] != 0


def test_random_numbers_are_drawn_in_the_order_of_the_module():
    def forward(self, x):
        drawn = [torch.rand(size, size) for size in (90, 70, 50, 30)]  # little memory would be needed in the other order
        return self.linear(x) + sum(torch.mm(matrix, matrix).sum() for matrix in reversed(drawn))

    values_of(Module(forward), name="draws")
    code, = (folder / "draws").glob("graph-0.*.cpp")
    assert re.findall(r"aoti_torch_cpu_rand\(.*?{(\d+)L", code.read_text()) == ["90", "70", "50", "30"]


def test_parts_have_the_budget_for_the_rows_of_the_batch():
    def parts(*shape, budget=8 * 40 * 4 * 10, dtype=torch.float32, rows=(131, 8)):  # 10 tokens of 8 rows
        return linear_cross_entropy.parts_of(torch.empty(shape, dtype=torch.long), 40, budget, dtype, rows)

    assert [parts(131, tokens) for tokens in (1, 10, 11, 262, 1048)] == [1, 1, 2, 27, 64]
    assert parts(131, 262, dtype=torch.float64) == 53 and parts(131, 262, budget=1) == 64
    assert parts(8, 262, rows=None) == 27 and parts(131 * 262) == parts(8 * 262, rows=None) == 27


def test_a_head_that_is_no_plain_product_has_all_logits():
    import transformers
    small = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=1,
                 num_key_value_heads=1, head_dim=8)
    experts = dict(num_local_experts=2, num_experts_per_tok=1)
    for config, plain in ((transformers.LlamaConfig(**small), True), (transformers.Gemma2Config(**small), False),
                          (transformers.GraniteConfig(**small, logits_scaling=1.001), False),
                          (transformers.MixtralConfig(**small, **experts, output_router_logits=True), False)):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
        batch = export_model.sample_of(model, "causal-lm", "4x10")
        assert export_model.has_plain_head(model, batch) == plain and model.training
        assert export_model.passes_of(model, None, "causal-lm", [batch]) == {"loss": None}  # all logits are small
        with mock.patch.object(linear_cross_entropy, "MEMORY_BUDGET", 1000):
            loss = export_model.passes_of(model, None, "causal-lm", [batch])["loss"]
            assert loss.__self__.parts == {10: 9} if plain else loss is None  # one token of all four rows at a time
            assert export_model.passes_of(model, torch.float16, "causal-lm", [batch]) == {"loss": None}


def items_of(loss, labels, module=None, **options):
    """Returns the number of items over which an export's loss is a mean; None for the rows."""
    options = {"forward": None, "items": None, "target": "labels", "autocast": None, **options}
    exporter = export._Exporter(module or Module(), loss, folder=folder, **options)
    with exporter.mode("training"):
        items = exporter.repeated("training", {"x": BATCH["x"], "labels": labels}).get("items")
    return None if items is None else items[0].item()


def test_items_are_the_classes_that_a_mean_takes():
    cross_entropy, labels = nn.functional.cross_entropy, torch.tensor([0, -100, 1, 2, 0])
    assert items_of(loss, labels) == 4
    assert items_of(loss, labels, autocast=torch.bfloat16) == 4
    assert items_of(lambda o, b: cross_entropy(o, b["labels"], label_smoothing=0.1), labels) == 4
    assert items_of(lambda o, b: cross_entropy(o, b["labels"].abs() % 3, ignore_index=0), labels) == 3
    assert items_of(lambda o, b: cross_entropy(o, b["labels"], torch.tensor([1.0, 2.0, 4.0])), labels) == 8
    assert items_of(lambda o, b: cross_entropy(o, b["labels"]) + cross_entropy(-o, b["labels"]), labels) == 4
    pixels = Module(lambda self, x: self.linear(x)[:, :, None, None].expand(-1, -1, 2, 2))
    assert items_of(loss, torch.tensor([[0, 1], [-100, 2]]).expand(5, 2, 2), pixels) == 15
    assert items_of(lambda o, b: cross_entropy(o, b["labels"], reduction="none").mean(), labels) is None
    assert items_of(loss, torch.rand(5, 3)) is None  # probabilities
    assert items_of(lambda o, b: nn.functional.mse_loss(o[:, 0], b["labels"].float()), labels) is None
    assert items_of(loss, labels, items=lambda batch: batch["labels"].sum()) == -97


class Checkpointed(Module):
    """A module with checkpoints that contain uncounted state."""

    def __init__(self):
        super().__init__()
        self.mask, self.last = None, None

    def forward(self, x, labels):
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        middle = checkpoint(lambda x: self.linear(x @ self.mask).tanh(), x, use_reentrant=False)
        self.last = checkpoint(lambda middle: middle * self.linear.bias, middle, use_reentrant=True)
        return {"loss": nn.functional.cross_entropy(self.last, labels), "logits": self.last}


def test_checkpoints_and_dicts_are_computed_as_without_them():
    module, labels = Checkpointed(), torch.tensor([0, -100, 1, 2, 0])
    values, _ = values_of(module, {**BATCH, "labels": labels}, None)
    assert values["graph-0.any_rows"] == "Long [*], Float [*, 4]" and values["graph-0.items"] == -1
    assert module.mask is None and module.last is None
    output = (BATCH["x"] @ torch.ones(4, 4).tril() @ module.linear.weight.t() + module.linear.bias).tanh() * module.linear.bias
    plain = torch.autograd.grad(nn.functional.cross_entropy(output, labels), module.linear.weight)[0].norm()
    assert (gradient_norm() - plain).abs() < 1e-5 * plain
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in (folder / "model").iterdir()}
    assert modes == {0o666 & ~umask}, "others may read all files, or none"


def test_samples_of_the_command():
    def sample(task, batch, **config):
        config = types.SimpleNamespace(**{"problem_type": None, "num_labels": 3, **config})
        config.get_text_config = lambda: config
        return export_model.sample_of(types.SimpleNamespace(config=config, dtype=torch.float32), task, batch)

    text = dict(vocab_size=9, pad_token_id=1, eos_token_id=2)
    of_classes = sample("sequence-classification", "6x5", **text)
    assert of_classes["labels"].dtype == torch.long
    assert (of_classes["input_ids"] == 2).sum(1).tolist() == 6 * [1], "some models classify by the end of the text"
    regression = sample("sequence-classification", "6x5", **text, num_labels=1)["labels"]
    assert regression.dtype == torch.float32 and regression.shape == (6,)
    several = sample("sequence-classification", "6x5", **text, problem_type="multi_label_classification")["labels"]
    assert several.shape == (6, 3) and set(several.flatten().tolist()) == {0, 1}
    assert sample("image-classification", "2x3x8x6")["pixel_values"].shape == (2, 3, 8, 6)
    assert sample("image-classification", "2", num_channels=1, image_size=8)["pixel_values"].shape == (2, 1, 8, 8)
    for task, batch, part in (("image-classification", "2", "such as 2x3x224x224"), ("image-classification", "2x8", "8x3x224x224"),
                              ("sequence-classification", "2", "8x256"), ("causal-lm", "ax5", "got ax5")):
        try:
            sample(task, batch)
        except export_model.Failure as failure:
            assert part in str(failure), failure
        else:
            raise AssertionError(f"{batch} must be refused")


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
    """Accepts the key bias of an attention, which only has rounding errors: compiled code uses other operations."""
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
