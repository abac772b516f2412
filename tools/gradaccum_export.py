# SPDX-License-Identifier: Apache-2.0
"""Exports a torch.nn.Module with its training step, for ga::ExportedModel to train and run in C++ without Python.

    import gradaccum_export
    loss = lambda output, batch: torch.nn.functional.cross_entropy(output, batch["labels"])
    gradaccum_export.export(module, {"x": images, "labels": labels}, loss, "model")

tools/export_model.py does it for models of Hugging Face's. It needs Python's torch of the version that the C++ program is
built with, the package safetensors, and a C++ compiler (g++, or $CXX).
"""

import contextlib
import copy
import inspect
import os
import pathlib
import shutil

import torch
from torch.func import functional_call

from compile_step import (DTYPES, Code, Failure, Inputs, Manifest, capability_of, directory_to_compile_in, entry_of,
                          first_line, graph_of)

FORMAT = "gradaccum exported model"
ROWS_ARE_ITEMS, COMPUTED_ITEMS = 0.0, -1.0
NO_TARGET = -2
PASSES = ("training", "evaluation", "inference")
SEED = 20_261_127
TORCH_NAMES = {getattr(torch, python): cpp for cpp, python in DTYPES.items()}


def export(module, batches, loss, folder, *, forward=None, items=None, target="labels", rows="any", autocast=None,
           passes=PASSES, files=None, capability=None, source_only=False):
    """Writes `folder`, with the code of a training step, of an evaluation and of inference for each batch.

    module:  in the dtype in which it is to be trained, on the CPU. Parameters that do not require a gradient stay as they
             are. The export changes nothing of it.
    batches: a batch, which is a dict of tensors with as many rows each, or a list of batches of several shapes. Their
             values are the sample that the program is checked with.
    loss:    loss(output, batch) of the module's output, a mean; or None for a module whose output has a `.loss`.
    forward: forward(module, batch); by default module(**batch), with what the module's `forward` has arguments for.
    items:   items(batch), a tensor: over how many items the loss is a mean. By default over the rows.
    target:  the name of the tensor that metrics compare the output with, and that inference does without.
    rows:    "any", or "these" for code of no other numbers of rows, which may be faster.
    autocast: a dtype, for mixed precision.
    passes:  which code is needed, of "training", "evaluation" and "inference".
    files:   further files, contents by names, that belong to the weights and are saved with them, such as config.json.
    """
    _Export(module, [batches] if isinstance(batches, dict) else list(batches), loss, folder, forward=forward, items=items,
            target=target, rows=rows, autocast=autocast, passes=passes, files=files or {}, capability=capability,
            source_only=source_only).write()


class _Called(torch.nn.Module):
    """A module behind a function that calls it."""

    def __init__(self, module, call):
        super().__init__()
        self.training = module.training
        self.module, self.call = module, call

    def forward(self, batch):
        return self.call(self.module, batch)


class _Export:
    def __init__(self, module, batches, loss, folder, **options):
        self.__dict__.update(options)
        self.module, self.loss, self.folder = module, loss, pathlib.Path(folder)
        self.batches = [dict(sorted(batch.items())) for batch in batches]
        self.parameters, self.buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.check()
        self.accepted = set(inspect.signature(module.forward).parameters)

    def check(self):
        if not self.batches:
            raise Failure("export: there must be a batch")
        for name, tensor in {**self.parameters, **self.buffers}.items():
            if tensor.device.type != "cpu" or tensor.dtype not in TORCH_NAMES:
                raise Failure(f"export: {name} must be on the CPU, of a dtype among {', '.join(DTYPES.values())}, "
                              f"got {tensor.dtype} on {tensor.device}")
        for batch in self.batches:
            for name, tensor in batch.items():
                if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.dtype not in TORCH_NAMES:
                    raise Failure(f"export: the batch's {name} must be a tensor with rows, got {type(tensor).__name__}")
                if len(tensor) != len(next(iter(batch.values()))):
                    raise Failure(f"export: the batch's tensors must have as many rows each, got {len(tensor)} of {name}")
        if not self.passes or not set(self.passes) <= set(PASSES):
            raise Failure(f"export: passes must be some of {', '.join(PASSES)}, got {self.passes!r}")
        if self.rows not in ("any", "these"):
            raise Failure(f'export: rows must be "any" or "these", got {self.rows!r}')

    def text(self):
        """A line for each parameter and buffer, as StepModel::text of C++ writes it."""
        lines = [f"{name} {layout_of(value)} {'parameter' if value.requires_grad else 'frozen parameter'}\n"
                 for name, value in self.parameters.items()]
        return "".join(lines + [f"{name} {layout_of(value)} buffer\n" for name, value in self.buffers.items()])

    def modes(self):
        return f"training; {TORCH_NAMES[self.autocast] if self.autocast else 'no'} autocast"

    @contextlib.contextmanager
    def mode(self, kind):
        """The module as that kind of pass has it, and then as it was."""
        training = {name: module.training for name, module in self.module.named_modules()}
        if kind != "training":
            self.module.eval()
        try:
            with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None, cache_enabled=False):
                yield
        finally:
            for name, module in self.module.named_modules():
                module.training = training[name]

    def call(self, module, batch):
        if self.forward:
            return self.forward(module, batch)
        return module(**{name: tensor for name, tensor in batch.items() if name in self.accepted})

    def results(self, kind, state, batch):
        """What a pass of that kind gives, with these parameters and buffers: loss, output, number of items."""
        output = functional_call(_Called(self.module, self.call), {f"module.{name}": value for name, value in state.items()},
                                 (batch,))
        tensor = tensor_of_output(output)
        if kind == "inference":
            return (tensor,)
        loss = self.loss(output, batch) if self.loss else output.loss
        return (loss, tensor, *([self.items(batch).to(torch.float64)] if self.items else []))

    def write(self):
        """Writes a folder beside, which then takes the place of an older one."""
        if self.folder.exists() and any(self.folder.iterdir()):
            path = self.folder / "manifest.json"
            if not path.is_file() or f'"{FORMAT}"' not in path.read_text():
                raise Failure(f"{self.folder}: must be a new folder, or an exported model, and there are other files")
        made = self.folder.with_name(f"{self.folder.name}.tmp-{os.getpid()}")
        made.mkdir(parents=True)
        try:
            self.write_to(made)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            made.rename(self.folder)
        except BaseException:
            shutil.rmtree(made)
            raise

    def write_to(self, folder):
        manifest = Manifest(folder, {
            "crc32": "", "format": FORMAT, "format_version": 1, "gradaccum": version_of_gradaccum(),
            "libtorch": torch.__version__.split("+")[0], "files": {}, "values": {}})
        manifest["model"], manifest["modes"] = self.text(), self.modes()
        manifest["with_weights"] = "".join(f"{name}\n" for name in sorted(self.files))
        manifest["tied"] = "".join(f"{name} {first}\n" for name, first in self.tied())
        for name, content in self.files.items():
            manifest.add(name, content)
        samples = {}
        passes = [(kind, batch) for batch in self.batches for kind in self.passes]
        manifest["graphs"] = len(passes)
        with directory_to_compile_in() as directory:
            code = Code(manifest, capability_of(self.capability), directory, not self.source_only)
            for number, (kind, batch) in enumerate(passes):
                self.add(code, f"graph-{number}", kind, batch, samples)
            code.finish()
        persistent = set(self.module.state_dict())
        weights = {**self.parameters, **{name: value for name, value in self.buffers.items() if name in persistent}}
        samples.update({f"buffer.{name}": value for name, value in self.buffers.items() if name not in persistent})
        self.add_tensors(manifest, "model.safetensors", weights, {"format": "pt"})
        self.add_tensors(manifest, "sample.safetensors", samples, None)
        manifest.write()

    def add_tensors(self, manifest, name, tensors, metadata):
        from safetensors.torch import save_file
        path = manifest.folder / name
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path, metadata)
        manifest.content["files"][name] = entry_of(path.read_bytes())

    def tied(self):
        """Further names of parameters, with the first name of each."""
        first = {id(value): name for name, value in self.parameters.items()}
        return [(name, first[id(value)]) for name, value in self.module.named_parameters(remove_duplicate=False)
                if first[id(value)] != name]

    def add(self, code, name, kind, batch, samples):
        """Adds the code of a kind of pass, and its sample."""
        manifest = code.manifest
        batch = {key: value for key, value in batch.items() if kind != "inference" or key != self.target}
        with self.mode(kind):
            exported, gradients, inputs, any_rows = self.graph(kind, batch)
            manifest[f"{name}.kind"], manifest[f"{name}.names"] = kind, " ".join(batch)
            manifest[f"{name}.batch"] = layouts_of(batch)
            manifest[f"{name}.any_rows"] = layouts_of(batch, any_rows=True) if any_rows else ""
            manifest[f"{name}.items"] = COMPUTED_ITEMS if self.items and kind != "inference" else ROWS_ARE_ITEMS
            manifest[f"{name}.output"] = kind != "inference"
            manifest[f"{name}.target"] = sorted(batch).index(self.target) if self.target in batch else NO_TARGET
            manifest[f"{name}.trace"] = ""
            code.add(name, exported, gradients, inputs)
            samples.update(self.sample(name, kind, batch))
            manifest[f"{name}.least_rows"] = 2
            if any_rows:
                with contextlib.suppress(ValueError):  # as BatchNorm says in training
                    samples.update(self.sample(f"{name}-1", kind, {key: value[:1] for key, value in batch.items()}))
                    manifest[f"{name}.least_rows"] = 1

    def graph(self, kind, batch):
        if self.rows == "any" and len(next(iter(batch.values()))) > 1:
            inputs = self.inputs(kind, batch, any_rows=True)
            try:
                return (*graph_of(self.function(kind, batch), inputs), inputs, True)
            except Exception as error:  # of whatever part of torch: with a number of rows it says what does not work
                print(f"{self.folder}: {kind} only of {layouts_of(batch)}: {first_line(error)}")
        inputs = self.inputs(kind, batch, any_rows=False)
        return (*graph_of(self.function(kind, batch), inputs), inputs, False)

    def inputs(self, kind, batch, any_rows):
        inputs = Inputs("", layouts_of(batch, any_rows))
        of_batch, of_any = inputs.tensors, inputs.any_rows
        inputs.tensors, inputs.learned, inputs.any_rows = [], [], []
        for value in (*self.parameters.values(), *self.buffers.values()):
            inputs.add(value.detach(), kind == "training" and value.requires_grad, False)
        inputs.parameters = range(len(self.parameters))
        inputs.buffers = range(len(self.parameters), len(inputs.tensors))
        for tensor, rows in zip(of_batch, of_any):
            inputs.add(tensor, False, rows)
        return inputs

    def function(self, kind, batch):
        """The pass as a function of parameters, buffers and the batch's tensors."""
        names = [*self.parameters, *self.buffers]

        def run(*values):
            state, tensors = dict(zip(names, values)), values[len(names):]
            with torch.set_grad_enabled(kind == "training"):
                return self.results(kind, state, dict(zip(batch, tensors)))
        return run

    def sample(self, name, kind, batch):
        """A batch, and what eager PyTorch computes of it: numbers that stand for the loss, the output, each gradient, and
        each buffer that moves. In 16 bits, those of float32, too."""
        found = {f"{name}.batch.{key}": value for key, value in batch.items()}
        found.update({f"{name}.wanted.{key}": value for key, value in self.eager(kind, batch).items()})
        in_16_bits = self.autocast in (torch.bfloat16, torch.float16) or any(
            value.dtype in (torch.bfloat16, torch.float16) for value in self.parameters.values())
        if in_16_bits:
            widened = copy.copy(self)
            widened.autocast, widened.module = None, copy.deepcopy(self.module).float()
            with widened.mode(kind):
                with torch.autocast("cpu", enabled=False):
                    exact = widened.eager(kind, {key: value.float() if value.is_floating_point() else value
                                                 for key, value in batch.items()})
            found.update({f"{name}.exact.{key}": value for key, value in exact.items()})
        return found

    def eager(self, kind, batch):
        state = {name: value.detach().clone().requires_grad_(value.requires_grad)
                 for name, value in self.module.named_parameters()}
        buffers = {name: value.detach().clone() for name, value in self.module.named_buffers()}
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(kind == "training"):
            torch.manual_seed(SEED)
            first, *others = self.results(kind, {**state, **buffers}, batch)
        wanted = {"loss" if others else "output": summary_of(first)}
        wanted.update(zip(("output", "items"), map(summary_of, others)))
        if kind == "training":
            learned = {name: value for name, value in state.items() if value.requires_grad}
            gradients = torch.autograd.grad(first, list(learned.values()), allow_unused=True)
            wanted.update({f"gradient.{name}": summary_of(gradient)
                           for name, gradient in zip(learned, gradients) if gradient is not None})
        wanted.update({f"buffer.{name}": summary_of(buffer) for name, buffer in buffers.items()})
        return wanted


def layout_of(tensor, any_rows=False):
    sizes = [str(size) for size in tensor.shape]
    return f"{TORCH_NAMES[tensor.dtype]} [{', '.join(['*', *sizes[1:]] if any_rows else sizes)}]"


def layouts_of(batch, any_rows=False):
    return ", ".join(layout_of(tensor, any_rows) for tensor in batch.values())


def tensor_of_output(output):
    """The output of a module that is compared with a target."""
    if isinstance(output, torch.Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        return output[0]
    raise Failure(f"export: the module's output must be a tensor, a tuple that begins with one, or have .logits; got "
                  f"{type(output).__name__}: give export a forward that returns one")


def summary_of(tensor):
    """Up to 64 elements, evenly spaced, and the norm: SampleSummary of C++ computes the same."""
    flat = tensor.detach().reshape(-1).double()
    count = min(64, len(flat))
    at = torch.arange(count) * (len(flat) - 1) // max(count - 1, 1)
    return torch.cat([flat[at], flat.norm().reshape(1)])


def version_of_gradaccum():
    import re
    text = (pathlib.Path(__file__).parents[1] / "include/gradaccum/version.hpp").read_text()
    return ".".join(re.search(rf"VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))
