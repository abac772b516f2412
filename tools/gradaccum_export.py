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
import json
import math
import os
import pathlib
import re
import shutil

import torch
from torch.func import functional_call

from compile_step import (DTYPES, PASSES, Code, Failure, Inputs, Manifest, capability_of, directory_to_compile_in, entry_of,
                          first_line, graph_of)

FORMAT = "gradaccum exported model"
ROWS_ARE_ITEMS, COMPUTED_ITEMS = 0.0, -1.0
NO_TARGET = -2
WRITTEN = ("manifest.json", "model.safetensors", "sample.safetensors")
HALF = (torch.bfloat16, torch.float16)
SEED = 20_261_127
TORCH_NAMES = {getattr(torch, python): cpp for cpp, python in DTYPES.items()}


def export(module, batches, loss, folder, *, forward=None, items=None, target="labels", rows="any", autocast=None,
           passes=PASSES, files=None, capability=None, source_only=False):
    """Writes `folder`, with the code of a training step, of an evaluation and of inference for each batch.

    module:  in training mode, on the device (a CPU or a CUDA device) and in the dtype in which it is to be trained.
             Parameters that do not require a gradient stay as they are. Its tensors and modes are afterwards as before.
    batches: a batch, which is a dict of tensors with as many rows each, or a list of batches of several shapes. Their
             values are the sample that the program is checked with.
    loss:    loss(output, batch) of the module's output, a mean; or None for a module whose output has a `.loss`. It may
             use the module's parameters, and no others.
    forward: forward(module, batch); by default module(**batch), with what the module's `forward` has arguments for.
    items:   items(batch), a tensor: over how many items the loss is a mean. By default over the rows.
    target:  the name of the tensor that metrics compare the output with, and that inference does without.
    rows:    "any", or "these" for code of no other numbers of rows, which may be faster.
    autocast: a dtype, for mixed precision.
    passes:  which code is needed, of "training", "evaluation" and "inference".
    files:   further files, contents by names, that belong to the weights and are saved with them, such as config.json.
    """
    exporter = _Exporter(module, loss, forward, items, target, autocast, pathlib.Path(folder))
    exporter.rows, exporter.passes, exporter.files = rows, passes, files or {}
    exporter.capability, exporter.source_only = capability, source_only
    exporter.write([batches] if isinstance(batches, dict) else list(batches))


class _Pass(torch.nn.Module):
    """A pass of a module with its loss, for functional_call: whatever reads the module's tensors gets those given."""

    def __init__(self, exporter, kind):
        super().__init__()
        self.training = exporter.module.training
        self.module, self.run = exporter.module, lambda batch: exporter.results(kind, batch)

    def forward(self, batch):
        return self.run(batch)


class _Exporter:
    def __init__(self, module, loss, forward, items, target, autocast, folder):
        self.module, self.loss, self.forward, self.items = module, loss, forward, items
        self.target, self.autocast, self.folder = target, autocast, folder
        self.parameters, self.buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.persistent = set(module.state_dict())
        self.device = next((value.device for value in (*self.parameters.values(), *self.buffers.values())), torch.device("cpu"))
        arguments = inspect.signature(module.forward).parameters
        takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
        self.accepts = lambda name: takes_all or name in arguments

    def check(self, batches):
        if not batches or not all(batches):
            raise Failure("export: at least one batch with tensors must be given")
        if "training" in self.passes and not self.module.training:
            raise Failure("export: the module must be in training mode for a training pass: call module.train()")
        if "training" in self.passes and not any(value.requires_grad for value in self.parameters.values()):
            raise Failure("export: at least one parameter must require grad")
        if not self.passes or not set(self.passes) <= set(PASSES):
            raise Failure(f"export: passes must be some of {', '.join(PASSES)}, got {self.passes!r}")
        if self.rows not in ("any", "these"):
            raise Failure(f'export: rows must be "any" or "these", got {self.rows!r}')
        for name, tensor in {**self.parameters, **self.buffers}.items():
            fits = tensor.device == self.device and tensor.device.type in ("cpu", "cuda") and tensor.dtype in TORCH_NAMES
            if not fits or re.search(r"\s", name):
                raise Failure(f"export: {name} must be on a CPU or CUDA device with all others, of a dtype among "
                              f"{', '.join(DTYPES.values())}, and have a name without blanks; got {tensor.dtype} on "
                              f"{tensor.device}")
        for name in self.files:
            if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name in WRITTEN or name.startswith("graph-"):
                raise Failure(f"export: a file must have a plain name that is not among {', '.join(WRITTEN)}, got {name!r}")
        for batch in batches:
            self.check_batch(batch)

    def check_batch(self, batch):
        rows = len(next(iter(batch.values())))
        for name, tensor in batch.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.dtype not in TORCH_NAMES:
                raise Failure(f"export: the batch's {name} must be a tensor with rows, got {type(tensor).__name__}")
            if re.search(r"\s", name) or len(tensor) != rows:
                raise Failure(f"export: the batch's tensors must have names without blanks and the same number of rows, got "
                              f"{name!r} with {len(tensor)} and {rows}")
            if not self.loss and not self.forward and not self.accepts(name):
                raise Failure(f"export: the module's forward has no argument for the batch's {name}")
        if self.target not in batch and self.target != "labels":
            raise Failure(f"export: the target {self.target!r} must be in the batch, which has {', '.join(batch)}")

    def text(self):
        """A line for each parameter and buffer, as StepModel::text of C++ writes it."""
        lines = [f"{name} {layout_of(value)} {'parameter' if value.requires_grad else 'frozen parameter'}\n"
                 for name, value in self.parameters.items()]
        return "".join(lines + [f"{name} {layout_of(value)} buffer\n" for name, value in self.buffers.items()])

    @contextlib.contextmanager
    def mode(self, kind):
        """The module as that kind of pass has it, and then as it was."""
        training = {name: module.training for name, module in self.module.named_modules()}
        if kind != "training":
            self.module.eval()
        try:
            yield
        finally:
            for name, module in self.module.named_modules():
                module.training = training[name]

    def results(self, kind, batch):
        """What a pass of that kind gives: loss, output, number of items, where it has them."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            output = (self.forward(self.module, batch) if self.forward else
                      self.module(**{name: tensor for name, tensor in batch.items() if self.accepts(name)}))
            tensor = tensor_of_output(output)
            if kind == "inference":
                return (tensor,)
            loss = self.loss(output, batch) if self.loss else output.loss
        return (loss, tensor, *([self.items(batch).to(torch.float64)] if self.items else []))

    def run(self, kind, state, batch):
        """A pass with other parameters and buffers. Buffers that the module exchanges for others move, too."""
        given = {f"module.{name}": value for name, value in state.items()}
        with torch.set_grad_enabled(kind == "training"):
            results = functional_call(_Pass(self, kind), given, (batch,))
        with torch.no_grad():
            for name in self.buffers:
                if given[f"module.{name}"] is not state[name]:
                    state[name].copy_(given[f"module.{name}"])
        return results

    def write(self, batches):
        """Writes a folder beside, which then takes the place of an older one."""
        self.check(batches)
        self.check_folder()
        made, old = (self.folder.with_name(f"{self.folder.name}.{what}-{os.getpid()}") for what in ("tmp", "old"))
        made.mkdir(parents=True)
        try:
            self.write_to(made, batches)
            if self.folder.exists():
                self.folder.rename(old)
            made.rename(self.folder)
        except BaseException:
            shutil.rmtree(made)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def check_folder(self):
        if self.folder.is_symlink() or self.folder.exists() and not self.folder.is_dir():
            raise Failure(f"{self.folder}: must be a folder, or must not exist")
        there = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if not there:
            return
        manifest = self.folder / "manifest.json"
        content = json.loads(manifest.read_text()) if manifest.is_file() else {}
        others = there - set(content.get("files", ())) - {"manifest.json"}
        if content.get("format") != FORMAT or others:
            raise Failure(f"{self.folder}: must be a new folder, or have only an exported model, but there is "
                          f"{min(others, default='manifest.json')}")

    def write_to(self, folder, batches):
        manifest = Manifest(folder, {
            "crc32": "", "format": FORMAT, "format_version": 1, "gradaccum": version_of_gradaccum(),
            "libtorch": torch.__version__.split("+")[0], "files": {}, "values": {}})
        passes = [(kind, {name: batch[name].to(self.device) for name in sorted(batch)})
                  for batch in batches for kind in self.passes]
        manifest["graphs"] = len(passes)
        manifest["model"] = self.text()
        manifest["modes"] = f"training; {TORCH_NAMES[self.autocast] if self.autocast else 'no'} autocast"
        manifest["with_weights"] = "".join(f"{name}\n" for name in sorted(self.files))
        tied = {} if self.files else self.tied()  # Hugging Face's libraries tie, and expect the first names alone
        manifest["tied"] = "".join(f"{name} {first}\n" for name, first in tied.items())
        for name, content in self.files.items():
            manifest.add(name, content)
        samples = {}
        with directory_to_compile_in() as directory, Code(
                manifest, self.folder, capability_of(self.capability, manifest["model"]), directory,
                not self.source_only) as code:
            for number, (kind, batch) in enumerate(passes):
                with self.mode(kind):
                    self.add(code, f"graph-{number}", kind, batch, samples)
            code.finish()
        weights = {name: value for name, value in {**self.parameters, **self.buffers}.items() if name in self.persistent}
        samples.update({f"buffer.{name}": value for name, value in self.buffers.items() if name not in self.persistent})
        weights.update({name: weights[first] for name, first in tied.items()})
        self.add_tensors(manifest, "model.safetensors", weights, {"format": "pt"})
        self.add_tensors(manifest, "sample.safetensors", samples, None)
        manifest.write()

    def add_tensors(self, manifest, name, tensors, metadata):
        from safetensors.torch import save_file
        path = manifest.folder / name
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path, metadata)
        manifest.content["files"][name] = entry_of(path.read_bytes())

    def tied(self):
        """The further names of saved tensors, each with the first."""
        first = {id(value): name for name, value in {**self.parameters, **self.buffers}.items()}
        both = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers(remove_duplicate=False))
        return {name: first[id(value)] for name, value in both if first[id(value)] != name and name in self.persistent}

    def add(self, code, name, kind, batch, samples):
        """Adds the code of a kind of pass, and its samples."""
        manifest = code.manifest
        if kind == "inference":
            batch = {key: value for key, value in batch.items()
                     if key != self.target and (self.forward or self.accepts(key))}
        exported, gradients, inputs, any_rows = self.graph(kind, batch)
        manifest[f"{name}.kind"], manifest[f"{name}.names"] = kind, " ".join(batch)
        manifest[f"{name}.batch"] = layouts_of(batch)
        manifest[f"{name}.any_rows"] = layouts_of(batch, any_rows=True) if any_rows else ""
        manifest[f"{name}.least_rows"] = 2
        manifest[f"{name}.items"] = COMPUTED_ITEMS if self.items and kind != "inference" else ROWS_ARE_ITEMS
        manifest[f"{name}.output"] = kind != "inference"
        manifest[f"{name}.target"] = list(batch).index(self.target) if self.target in batch else NO_TARGET
        manifest[f"{name}.trace"] = ""
        code.add(name, exported, gradients, inputs)
        samples.update(self.sample(name, kind, batch))
        if any_rows and not (problem := self.difference(exported, kind, rows_of(batch, 1))):
            manifest[f"{name}.least_rows"] = 1
            samples.update(self.sample(f"{name}-1", kind, rows_of(batch, 1)))
        elif any_rows:
            print(f"{self.folder}: {name} not of one row: {problem}")

    def graph(self, kind, batch):
        """The pass as a graph for any number of rows where it can be had, else for the batch's own."""
        count = len(next(iter(batch.values())))
        problem = "" if self.rows == "these" else "a batch of one row shows nothing of others" if count == 1 else None
        if problem is None:
            inputs = self.inputs(kind, batch, any_rows=True)
            try:
                exported, gradients = graph_of(self.function(kind, batch), inputs)
                # A branch of the module's on the number of rows is decided by that with which it is traced.
                problem = next(filter(None, (self.difference(exported, kind, rows_of(batch, rows))
                                             for rows in (count, count - 1) if rows > 1)), None)
                if not problem:
                    return self.with_own_tensors_alone(exported), gradients, inputs, True
            except Failure:
                raise
            except Exception as error:  # of whatever part of torch: with a number of rows it says what does not work
                problem = first_line(error)
        if problem:
            print(f"{self.folder}: {kind} only of {layouts_of(batch)}: {problem}")
        inputs = self.inputs(kind, batch, any_rows=False)
        exported, gradients = graph_of(self.function(kind, batch), inputs)
        return self.with_own_tensors_alone(exported), gradients, inputs, False

    def with_own_tensors_alone(self, exported):
        constants = {**exported.state_dict, **exported.constants}
        others = [name for name, value in constants.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        if others:
            raise Failure(f"export: the loss uses {len(others)} tensors that require grad and are not the module's parameters: "
                          f"make what has them a submodule")
        return exported

    def inputs(self, kind, batch, any_rows):
        inputs = Inputs(self.text(), layouts_of(batch, any_rows))
        if kind != "training":
            inputs.learned = [False] * len(inputs.learned)
        return inputs

    def function(self, kind, batch):
        """The pass as a function of parameters, buffers and the batch's tensors."""
        names = [*self.parameters, *self.buffers]
        return lambda *values: self.run(kind, dict(zip(names, values)), dict(zip(batch, values[len(names):])))

    def difference(self, exported, kind, batch):
        """What a graph computes of a batch otherwise than the module, or why the module cannot; empty if nothing."""
        tensors = [value.detach().clone() for value in (*self.parameters.values(), *self.buffers.values())]
        try:
            wanted = self.eager(kind, batch)
            with seeded():
                got = exported.module()(*tensors, *batch.values(), torch.ones((), device=self.device))
        except Exception as error:  # the module's, or torch's
            return first_line(error)
        tolerance = 0.1 if self.in_16_bits() else 1e-3
        # A gradient that is 0 in exact arithmetic, as that of the bias of attention's keys, is rounding of the others.
        rounding = tolerance * math.hypot(*(value[-1] for name, value in wanted.items() if name.startswith("gradient.")))
        rounding = rounding if math.isfinite(rounding) else 0
        for (name, value), other in zip(wanted.items(), got):
            least = rounding if name.startswith("gradient.") else 1e-6
            if not name.startswith("buffer.") and (value - summary_of(other)).norm() > tolerance * (value.norm() + least):
                return f"for {layouts_of(batch)} the {name.replace('.', ' of ', 1)} is another"
        return ""

    def in_16_bits(self):
        return self.autocast in HALF or any(value.dtype in HALF for value in self.parameters.values())

    def sample(self, name, kind, batch):
        """A batch, and what eager PyTorch computes of it: numbers that stand for the loss, the output, each gradient, and
        each buffer. In 16 bits, those of float32, too."""
        found = {f"{name}.batch.{key}": value for key, value in batch.items()}
        found.update({f"{name}.wanted.{key}": value for key, value in self.eager(kind, batch).items()})
        if self.in_16_bits():
            widened = _Exporter(copy.deepcopy(self.module).float(), self.loss, self.forward, self.items, self.target, None,
                                self.folder)
            exact = widened.eager(kind, {key: value.float() if value.is_floating_point() else value
                                         for key, value in batch.items()})
            found.update({f"{name}.exact.{key}": value for key, value in exact.items()})
        return found

    def eager(self, kind, batch):
        """The results of a pass as summaries: of all that a graph gives, in that order, and of the buffers."""
        state = {name: value.detach().clone().requires_grad_(value.requires_grad)
                 for name, value in {**self.parameters, **self.buffers}.items()}
        with seeded():
            results = self.run(kind, state, batch)
            learned = [name for name in self.parameters if kind == "training" and state[name].requires_grad]
            gradients = torch.autograd.grad(results[0], [state[name] for name in learned],
                                            allow_unused=True) if learned else ()
        names = ("output",) if kind == "inference" else ("loss", "output", "items")
        wanted = dict(zip(names, map(summary_of, results)))
        wanted.update({f"gradient.{name}": summary_of(gradient)
                       for name, gradient in zip(learned, gradients) if gradient is not None})
        return wanted | {f"buffer.{name}": summary_of(state[name]) for name in self.buffers}


@contextlib.contextmanager
def seeded():
    """Random numbers from one beginning, and then as before."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(SEED)
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def rows_of(batch, rows):
    return {name: tensor[:rows] for name, tensor in batch.items()}


def layout_of(tensor, any_rows=False):
    sizes = [str(size) for size in tensor.shape]
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{TORCH_NAMES[tensor.dtype]} [{', '.join(['*', *sizes[1:]] if any_rows else sizes)}]{place}"


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
    """Up to 64 elements, evenly spaced, and the norm: summary_of in C++ computes the same."""
    flat = tensor.detach().reshape(-1).double()
    count = min(64, len(flat))
    at = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return torch.cat([flat[at], flat.norm().reshape(1)]).cpu()


def version_of_gradaccum():
    text = (pathlib.Path(__file__).parents[1] / "include/gradaccum/version.hpp").read_text()
    return ".".join(re.search(rf"VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))
