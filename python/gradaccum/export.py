# SPDX-License-Identifier: Apache-2.0
"""Exports a torch.nn.Module with its training step, for ga::ExportedModel to train and run in C++ without Python.

    from gradaccum.export import export
    loss = lambda output, batch: torch.nn.functional.cross_entropy(output, batch["labels"])
    export(module, {"x": images, "labels": labels}, loss, "model")

The command gradaccum-export exports models of Hugging Face. It needs Python's torch of the version that the C++ program is
built with, the package safetensors, and a C++ compiler (g++, or $CXX).
"""

import contextlib
import copy
import glob
import inspect
import json
import math
import os
import pathlib
import random
import re
import shutil
import sys
import traceback
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum
from gradaccum.compile_step import (DTYPES, PASSES, Code, Failure, Inputs, Manifest, capability_of, check_version,
                                    directory_to_compile_in, first_line, graph_of)
from gradaccum.python_state import PythonState

FORMAT = "gradaccum exported model"
ROWS_ARE_ITEMS, COMPUTED_ITEMS = 0.0, -1.0
NO_TARGET = -2
WRITTEN = ("manifest.json", "model.safetensors", "sample.safetensors")
HALF = (torch.bfloat16, torch.float16)
SEED = 20_261_127
TORCH_NAMES = {getattr(torch, python): cpp for cpp, python in DTYPES.items()}


def export(module, batches, loss, folder, *, forward=None, items=None, target="labels", rows="any", autocast=None,
           passes=PASSES, output=True, files=None, capability=None, source_only=False):
    """Writes `folder`, with the code of a training step, of an evaluation and of inference for each batch.

    module:  in training mode, on the device (a CPU or a CUDA device) and in the dtype in which it is to be trained.
             Parameters that do not require a gradient stay as they are. The module is afterwards as before. Values that
             change from step to step must be buffers.
    batches: a batch, which is a dict of tensors with as many rows each, or a list of batches of several shapes. Their
             values are the sample that the program is checked with.
    loss:    loss(output, batch) of the module's output, a mean; or None for a module whose output has a `.loss`, or is a
             dict with "loss" and "logits". It may use the module's parameters, and no others.
    forward: forward(module, batch); by default module(**batch), with what the module's `forward` has arguments for.
    items:   items(batch), a tensor: over how many items the loss is a mean. By default over the labels of cross_entropy
             or nll_loss but for ignore_index, each with the weight of its class, and over the average of these numbers
             if the pass has several such means; over the rows if it has none.
    target:  the name of the tensor that metrics compare the output with, and that inference does without.
    rows:    "any", or "these" for code of no other numbers of rows, which may be faster.
    autocast: a dtype, for mixed precision.
    passes:  which code is needed, of "training", "evaluation" and "inference".
    output:  whether training and evaluation have the output, for metrics. False saves its memory.
    files:   further files, contents by names, that belong to the weights and are saved with them, such as config.json.
    """
    exporter = _Exporter(module, loss, forward, items, target, autocast, pathlib.Path(folder))
    exporter.rows, exporter.passes, exporter.output, exporter.files = rows, passes, output, files or {}
    exporter.capability, exporter.source_only = capability, source_only
    exporter.write([batches] if isinstance(batches, dict) else list(batches))


class _Pass(torch.nn.Module):
    """A pass of a module with its loss. functional_call replaces the tensors wherever the pass reads them."""

    def __init__(self, exporter, kind):
        super().__init__()
        self.training = exporter.module.training
        self.module, self.run = exporter.module, lambda batch: exporter.results(kind, batch)

    def forward(self, batch):
        return self.run(batch)


class _Exporter:
    def __init__(self, module, loss, forward, items, target, autocast, folder):
        self.module, self.loss, self.forward, self.items = module, loss, forward, items
        self.target, self.autocast, self.folder, self.state = target, autocast, folder, None
        self.output = True
        self.parameters, self.buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.persistent = set(module.state_dict())
        self.device = next((value.device for value in (*self.parameters.values(), *self.buffers.values())), torch.device("cpu"))
        arguments = inspect.signature(module.forward).parameters
        takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
        self.accepts = lambda name: takes_all or name in arguments

    def check(self, batches):
        check_version(torch)
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
        """Returns a line for each parameter and buffer, as StepModel::text of C++ writes it."""
        lines = [f"{name} {layout_of(value)} {'parameter' if value.requires_grad else 'frozen parameter'}\n"
                 for name, value in self.parameters.items()]
        return "".join(lines + [f"{name} {layout_of(value)} buffer\n" for name, value in self.buffers.items()])

    def python_state(self):
        roots = {**dict(self.module.named_modules()), "loss": self.loss, "forward": self.forward, "items": self.items,
                 "random's numbers": random.getstate.__self__}
        if numpy := sys.modules.get("numpy"):
            roots["numpy.random's numbers"] = numpy.random.get_state.__self__
        return PythonState(roots, [*self.parameters.values(), *self.buffers.values()])

    @contextlib.contextmanager
    def mode(self, kind):
        """A scope in which the module has the mode of that kind of pass."""
        training = {name: module.training for name, module in self.module.named_modules()}
        if kind != "training":
            self.module.eval()
        self.state = self.python_state()
        try:
            yield
        finally:
            self.state.restore()
            for name, module in self.module.named_modules():
                module.training = training[name]

    def results(self, kind, batch):
        """Returns the results of a pass of that kind: loss, output and number of items, if it has them."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            with contextlib.nullcontext() if kind == "inference" or self.items else CountedClasses() as counted:
                output = (self.forward(self.module, batch) if self.forward else
                          self.module(**{name: tensor for name, tensor in batch.items() if self.accepts(name)}))
                tensor = tensor_of_output(output)
                if kind == "inference":
                    return (tensor,)
                loss = self.loss(output, batch) if self.loss else part_of(output, "loss")
        if not is_number(loss) or kind == "training" and not loss.requires_grad:
            raise Failure(f"export: the loss must be a tensor of one element that depends on parameters, got "
                          f"{text_of(loss)}{'' if self.loss else ': give export a loss, or a module whose output has one'}")
        items = [self.items(batch)] if self.items else counted.items
        if not all(map(is_number, items)):
            raise Failure(f"export: items must give a tensor of one element, got {text_of(items[0])}")
        outputs = (tensor,) if self.output else ()
        return (loss, *outputs, *([sum(number.to(torch.float64) for number in items) / len(items)] if items else []))

    def run(self, kind, state, batch):
        """Runs a pass with the given parameters and buffers, and copies buffers that the module replaced into them."""
        given = {f"module.{name}": value for name, value in state.items()}
        try:
            with torch.set_grad_enabled(kind == "training"), without_checkpoints():
                results = functional_call(_Pass(self, kind), given, (batch,))
        finally:
            self.state.restore()  # removes tensors of this trace from the module
        with torch.no_grad():
            for name in self.buffers:
                if given[f"module.{name}"] is not state[name]:
                    state[name].copy_(given[f"module.{name}"])
        return results

    def write(self, batches):
        """Writes a temporary folder, which then replaces an older one."""
        self.check(batches)
        self.check_folder()
        self.remove_leftovers()
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

    def remove_leftovers(self):
        """Removes the temporary folders of killed exports."""
        for what in ("tmp", "old") if self.folder.exists() else ("tmp",):
            for path in self.folder.parent.glob(f"{glob.escape(self.folder.name)}.{what}-*"):
                process = path.name.rpartition("-")[2]
                if process.isdigit() and (int(process) == os.getpid() or not is_running(int(process))):
                    shutil.rmtree(path)

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
            "crc32": "", "format": FORMAT, "format_version": 1, "gradaccum": gradaccum.version(),
            "libtorch": torch.__version__.split("+")[0], "files": {}, "values": {}})
        passes = [(kind, {name: batch[name].to(self.device) for name in sorted(batch)})
                  for batch in batches for kind in self.passes]
        manifest["graphs"] = len(passes)
        manifest["model"] = self.text()
        manifest["modes"] = f"training; {TORCH_NAMES[self.autocast] if self.autocast else 'no'} autocast"
        manifest["with_weights"] = "".join(f"{name}\n" for name in sorted(self.files))
        tied = {} if self.files else self.tied()  # Hugging Face's libraries expect only the first names
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
        from safetensors.torch import save
        manifest.add(name, save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, metadata))

    def tied(self):
        """Returns the further names of saved tensors, each with the first name."""
        first = {id(value): name for name, value in {**self.parameters, **self.buffers}.items()}
        both = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers(remove_duplicate=False))
        return {name: first[id(value)] for name, value in both if first[id(value)] != name and name in self.persistent}

    def add(self, code, name, kind, batch, samples):
        """Adds the code of a kind of pass, and its samples."""
        manifest = code.manifest
        if kind == "inference":
            batch = {key: value for key, value in batch.items()
                     if key != self.target and (self.forward or self.accepts(key))}
        has_items = "items" in self.repeated(kind, batch)
        with self.failures_of_torch(kind, batch):
            exported, gradients, inputs, any_rows = self.graph(kind, batch)
        manifest[f"{name}.kind"], manifest[f"{name}.names"] = kind, " ".join(batch)
        manifest[f"{name}.batch"] = layouts_of(batch)
        manifest[f"{name}.any_rows"] = layouts_of(batch, any_rows=True) if any_rows else ""
        manifest[f"{name}.least_rows"] = 2
        manifest[f"{name}.items"] = COMPUTED_ITEMS if has_items else ROWS_ARE_ITEMS
        manifest[f"{name}.output"] = kind != "inference" and self.output
        manifest[f"{name}.target"] = list(batch).index(self.target) if self.target in batch else NO_TARGET
        manifest[f"{name}.trace"] = ""
        with self.failures_of_torch(kind, batch):
            code.add(name, exported, gradients, inputs)
        samples.update(self.sample(name, kind, batch))
        if any_rows and not (problem := self.difference(exported, kind, rows_of(batch, 1))):
            manifest[f"{name}.least_rows"] = 1
            samples.update(self.sample(f"{name}-1", kind, rows_of(batch, 1)))
        elif any_rows:
            print(f"{self.folder}: {name} not of one row: {problem}")

    def repeated(self, kind, batch):
        """Returns the results of a pass. Fails if its second run depends on the first."""
        before, self.state = self.state, PythonState({})
        try:
            first = self.eager(kind, batch)
            between = self.python_state()
            other = difference_of(first, self.eager(kind, batch), 0.01 if self.in_16_bits() else 1e-5)
            changed = between.difference(self.python_state()) or other and before.difference(between)
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"export: the module must run in {kind} with {texts_of(batch)}, but: "
                          f"{first_line(error)}") from error
        finally:
            self.state = before
            before.restore()
        if other or changed:
            raise Failure(f"export: {kind} must do the same when it runs again, but the next run "
                          f"{'changes ' + ', '.join(changed[:3]) if changed else 'has ' + other}: compiled code would repeat the "
                          f"first run. Keep what counts in a buffer (register_buffer), and draw random numbers by torch")
        return first

    @contextlib.contextmanager
    def failures_of_torch(self, kind, batch):
        try:
            yield
        except Failure:
            raise
        except Exception as error:  # any of torch's
            raise Failure(f"export: torch cannot compile the {kind} of {texts_of(batch)}: {reason_of(error)}") from error

    def graph(self, kind, batch):
        """Returns the pass as a graph for any number of rows if possible, else for the batch's number."""
        count = len(next(iter(batch.values())))
        problem = "" if self.rows == "these" else "a batch of one row shows nothing of others" if count == 1 else None
        if problem is None:
            inputs = self.inputs(kind, batch, any_rows=True)
            try:
                exported, gradients = graph_of(self.function(kind, batch), inputs)
                # A branch of the module on the number of rows is traced for one number only.
                problem = next(filter(None, (self.difference(exported, kind, rows_of(batch, rows))
                                             for rows in (count, count - 1) if rows > 1)), None)
                if not problem:
                    return self.with_own_tensors_alone(exported), gradients, inputs, True
            except Failure:
                raise
            except Exception as error:  # any of torch's; a fixed number of rows may still work
                problem = first_line(error)
        inputs = self.inputs(kind, batch, any_rows=False)
        exported, gradients = graph_of(self.function(kind, batch), inputs)
        if problem:
            print(f"{self.folder}: {kind} only of {layouts_of(batch)}: {problem}")
        return self.with_own_tensors_alone(exported), gradients, inputs, False

    def with_own_tensors_alone(self, exported):
        constants = {**exported.state_dict, **exported.constants}
        others = [name for name, value in constants.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        if others:
            raise Failure(f"export: {len(others)} tensors that require grad are used and are not the module's parameters: make "
                          f"what has them a submodule, or a parameter of the module (nn.Parameter, nn.ParameterList)")
        return exported

    def inputs(self, kind, batch, any_rows):
        inputs = Inputs(self.text(), layouts_of(batch, any_rows))
        if kind != "training":
            inputs.learned = [False] * len(inputs.learned)
        return inputs

    def function(self, kind, batch):
        """Returns the pass as a function of parameters, buffers and the batch's tensors."""
        names = [*self.parameters, *self.buffers]
        return lambda *values: self.run(kind, dict(zip(names, values)), dict(zip(batch, values[len(names):])))

    def difference(self, exported, kind, batch):
        """Returns how a graph's results differ from the module's, or why the module fails; empty if they are equal."""
        tensors = [value.detach().clone() for value in (*self.parameters.values(), *self.buffers.values())]
        try:
            wanted = self.eager(kind, batch)
            with seeded():
                got = exported.module()(*tensors, *batch.values(), torch.ones((), device=self.device))
        except Exception as error:  # the module's, or torch's
            return first_line(error)
        results = dict(zip((name for name in wanted if not name.startswith("buffer.")), map(summary_of, got)))
        other = difference_of(wanted, results, 0.1 if self.in_16_bits() else 1e-3)
        return other and f"for {layouts_of(batch)} there is {other}"

    def in_16_bits(self):
        return self.autocast in HALF or any(value.dtype in HALF for value in self.parameters.values())

    def sample(self, name, kind, batch):
        """Returns a batch and eager PyTorch's results of it as summaries: the loss, the output, each gradient and each
        buffer. In 16 bits, adds the results of float32."""
        found = {f"{name}.batch.{key}": value for key, value in batch.items()}
        found.update({f"{name}.wanted.{key}": value for key, value in self.eager(kind, batch).items()})
        if self.in_16_bits():
            widened = _Exporter(copy.deepcopy(self.module).float(), self.loss, self.forward, self.items, self.target, None,
                                self.folder)
            widened.state, widened.output = self.state, self.output
            exact = widened.eager(kind, {key: value.float() if value.is_floating_point() else value
                                         for key, value in batch.items()})
            found.update({f"{name}.exact.{key}": value for key, value in exact.items()})
        return found

    def eager(self, kind, batch):
        """Returns summaries of a pass's results, in the order of a graph's outputs, and of the buffers."""
        state = {name: value.detach().clone().requires_grad_(value.requires_grad)
                 for name, value in {**self.parameters, **self.buffers}.items()}
        with seeded():
            results = self.run(kind, state, batch)
            learned = [name for name in self.parameters if kind == "training" and state[name].requires_grad]
            gradients = torch.autograd.grad(results[0], [state[name] for name in learned],
                                            allow_unused=True) if learned else ()
        names = ("output",) if kind == "inference" else ("loss", *(["output"] if self.output else []), "items")
        wanted = dict(zip(names, map(summary_of, results)))
        wanted.update({f"gradient.{name}": summary_of(gradient)
                       for name, gradient in zip(learned, gradients) if gradient is not None})
        return wanted | {f"buffer.{name}": summary_of(state[name]) for name in self.buffers}


class CountedClasses(TorchDispatchMode):
    """A scope that counts the labels of each mean of cross_entropy and nll_loss, with their weights."""

    def __init__(self):
        super().__init__()
        self.items = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        means = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
        if operation in means and arguments[3] == 1:  # reduction="mean"
            _, classes, weight, _, ignored = arguments
            counts = classes != ignored
            of_class = counts if weight is None else weight.double()[torch.where(counts, classes, 0)] * counts
            self.items.append(of_class.sum())
        return operation(*arguments, **(named or {}))


@contextlib.contextmanager
def without_checkpoints():
    """Makes checkpoints only call their functions. Recomputing in backward would read the module's own tensors."""
    once = {"CheckpointFunction": mock.Mock(apply=lambda function, _, *arguments: function(*arguments))}
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
        if hasattr(torch.utils.checkpoint, name):
            once[name] = lambda *_, **__: iter((None,))
    with mock.patch.multiple(torch.utils.checkpoint, **once):
        yield


@contextlib.contextmanager
def seeded():
    """A scope with seeded generators of random numbers, which are restored at its end."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(SEED)
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


def rows_of(batch, rows):
    return {name: tensor[:rows] for name, tensor in batch.items()}


def layout_of(tensor, any_rows=False):
    sizes = [str(size) for size in tensor.shape]
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{TORCH_NAMES[tensor.dtype]} [{', '.join(['*', *sizes[1:]] if any_rows else sizes)}]{place}"


def layouts_of(batch, any_rows=False):
    return ", ".join(layout_of(tensor, any_rows) for tensor in batch.values())


def texts_of(batch):
    return ", ".join(f"{name} {layout_of(tensor)}" for name, tensor in batch.items())


def tensor_of_output(output):
    """Returns the part of a module's output that is compared with a target."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    for tensor in (part_of(output, "logits"), first):
        if isinstance(tensor, torch.Tensor):
            return tensor
    raise Failure(f"export: the module's output must be a tensor, a tuple that begins with one, or have .logits or \"logits\"; "
                  f"got {text_of(output)}: give export a forward that returns one")


def part_of(output, name):
    """Returns an attribute of an output, or a dict's value; None if there is none."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def is_number(value):
    return isinstance(value, torch.Tensor) and value.numel() == 1


def text_of(value):
    if isinstance(value, torch.Tensor):
        return f"{layout_of(value)}{'' if value.requires_grad else ' without a gradient'}"
    return f"a dict with {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__


def difference_of(wanted, got, tolerance):
    """Returns the first result that differs by more than rounding; empty if none does."""
    # A gradient that is exactly 0 in theory, such as that of attention's key bias, has the others' rounding errors.
    rounding = tolerance * math.hypot(*(value[-1] for name, value in wanted.items() if name.startswith("gradient.")))
    rounding = rounding if math.isfinite(rounding) else 0
    for name in (name for name in wanted if name in got):
        least = rounding if name.startswith("gradient.") else 1e-6
        if (wanted[name] - got[name]).norm() > tolerance * (wanted[name].norm() + least):
            return f"another {name.replace('.', ' of ', 1)}"
    return ""


def reason_of(error):
    """Returns why torch cannot compile a pass, and the line in the module if the error comes from there."""
    frames, ours = traceback.extract_tb(error.__traceback__), (os.path.dirname(__file__), os.path.dirname(torch.__file__))
    in_module = any(frame.name == "results" for frame in frames)  # otherwise in torch's compiler
    line = next((f", in {frame.filename}:{frame.lineno}" for frame in reversed(frames)
                 if in_module and not frame.filename.startswith(ours)), "")
    depends = re.search(r"data.?dependent|Dynamic\w*Exception", f"{type(error).__name__}: {error}", re.IGNORECASE)
    return (f"{type(error).__name__}: {first_line(error)}{line}"
            + (": branches and shapes must not depend on the values of tensors" if depends else ""))


def summary_of(tensor):
    """Returns up to 64 evenly spaced elements, and the norm; summary_of in C++ computes the same."""
    flat = tensor.detach().reshape(-1).double()
    count = min(64, len(flat))
    at = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return torch.cat([flat[at], flat.norm().reshape(1)]).cpu()
