# SPDX-License-Identifier: Apache-2.0
"""Compiles a training step that ga::save_step wrote, forward and backward, for ga::CompiledStep to run.

It needs Python's torch of the version that the program is built with, and a C++ compiler (g++, or $CXX). It does not
need the model's code: the recording becomes one graph of the loss and all gradients, for which torch.compile's compiler
generates C++. A step of a model on a CUDA device is compiled on a machine with such a device, to kernels for GPUs of
its compute capability.
"""

import argparse
import concurrent.futures
import contextlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zipfile
import zlib

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}
PASSES = ("training", "evaluation", "inference")  # of an exported model; a step that the program recorded is training
INSTRUCTIONS = {
    "AVX512": (512, ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"]),
    "AVX2": (256, ["-mavx2", "-mfma", "-mf16c"]),
    "DEFAULT": (1, []),  # any processor
}
CUDA = "CUDA "  # before the compute capability of a GPU


class Failure(Exception):
    """An error that the user can fix, described in a sentence."""


class Manifest:
    """The manifest of a folder: lists its files, and holds values by name."""

    def __init__(self, folder, content):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / "manifest.json"
        self.content = content

    @classmethod
    def of_step(cls, folder):
        """Reads the manifest of a saved step."""
        self = cls(folder, {})
        if not self.path.is_file():
            raise Failure(f"{folder}: there is no manifest.json, so it is not a folder that ga::save_step wrote")
        self.check(self.path.read_bytes())
        return self

    def check(self, text):
        self.content = json.loads(text)
        crc = self.content.get("crc32", "")
        if self.content.get("format") != "gradaccum step" or self.content.get("format_version") != 1:
            raise Failure(f"{self.path}: must be the manifest of a gradaccum step, version 1")
        if f"{zlib.crc32(text.replace(crc.encode(), b'00000000', 1)):08x}" != crc:
            raise Failure(f"{self.path}: must be as it was written, with the CRC-32 {crc}")

    def __getitem__(self, name):
        if name not in self.content["values"]:
            raise Failure(f"{self.path}: must have the value '{name}'; save the step again")
        return self.content["values"][name]

    def __setitem__(self, name, value):
        self.content["values"][name] = value

    def read(self, name):
        """Returns the bytes of one of its files. Fails if they have changed since they were written."""
        data = (self.folder / name).read_bytes()
        if self.content["files"][name] != entry_of(data):
            raise Failure(f"{self.folder / name}: must be as it was written; save the step again")
        return data

    def add(self, name, data):
        replace(self.folder / name, data)
        self.content["files"][name] = entry_of(data)

    def write(self):
        """Replaces the old manifest; then removes the files that are no longer listed."""
        self.content["crc32"] = "00000000"
        text = json.dumps(self.content, indent=2, ensure_ascii=False).encode()
        replace(self.path, text.replace(b"00000000", f"{zlib.crc32(text):08x}".encode(), 1))
        for file in self.folder.glob("graph-*"):
            if file.name not in self.content["files"]:
                file.unlink()


def entry_of(data):
    """Returns a manifest's entry for a file."""
    return {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def replace(path, data):
    """Replaces a file atomically: a crash leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def tensor_of(text, rows):
    """Returns a tensor of the layout in a text like `Float [64, 784] on cuda strides 1 64`."""
    import torch
    match = re.fullmatch(r"(\w+) \[([\d*, ]*)\]( on cuda)?(?: strides ([\d ]+))?", text)
    if not match or match[1] not in DTYPES:
        raise Failure(f"tensors must be on a CPU or a CUDA device, of a dtype among {', '.join(DTYPES)}, got '{text}'")
    options = {"dtype": getattr(torch, DTYPES[match[1]]), "device": "cuda" if match[3] else "cpu"}
    sizes = [rows if size == "*" else int(size) for size in match[2].split(", ") if size]
    if match[4]:
        return torch.empty_strided(sizes, [int(stride) for stride in match[4].split()], **options)
    return torch.empty(sizes, **options)


class Inputs:
    """The inputs of a step in their order: parameters, buffers, the batch's tensors, and the seed of backward."""

    def __init__(self, model, batch):
        """`model`, `batch`: their layouts as text, the batch's with * for any number of rows."""
        self.tensors, self.learned, self.any_rows = [], [], []
        kinds = []
        for line in model.splitlines():
            name, layout, kind = re.fullmatch(r"(\S+) (.*?) (frozen parameter|parameter|buffer)", line).groups()
            kinds.append(kind)
            self.add(tensor_of(layout, 0), kind == "parameter", False)
        self.parameters = range(len(kinds) - kinds.count("buffer"))
        self.buffers = range(len(self.parameters), len(kinds))
        # A number of rows that equals no other size, so that none is confused; above the limit of `attends_to_few`.
        self.rows = next(prime for prime in (131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181)
                         if str(prime) not in re.findall(r"\d+", model + batch))
        for layout in re.findall(r"\w+ \[[^\]]*\](?: on \w+)?", batch):
            self.add(tensor_of(layout, self.rows), False, "*" in layout)
        self.device = next((tensor.device.type for tensor in self.tensors), "cpu")

    def add(self, tensor, learned, any_rows):
        self.tensors.append(tensor)
        self.learned.append(learned)
        self.any_rows.append(any_rows)


def scripted(script):
    """Returns the program's recording as a function of all inputs."""
    import torch
    torch._C._jit_set_profiling_executor(False)
    torch._C._jit_set_profiling_mode(False)
    torch._C._set_graph_executor_optimize(False)
    return torch.jit.load(script)


def graph_of(forward, inputs):
    """Returns the loss, the other outputs of `forward` and the gradients as one exported graph, and which gradients
    exist. Without learned inputs, returns the graph of a pass without gradients."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend

    there = []

    def step(*values):
        *values, seed = values
        values = [value.detach().requires_grad_() if learned else value
                  for value, learned in zip(values, inputs.learned)]
        loss, *others = forward(*values)
        learned = [value for value, is_learned in zip(values, inputs.learned) if is_learned]
        gradients = torch.autograd.grad(loss, learned, grad_outputs=seed.to(loss.dtype).reshape(loss.shape),
                                        allow_unused=True) if learned else ()
        there[:] = [gradient is not None for gradient in gradients]
        return (loss.detach(), *(other.detach() for other in others),
                *(gradient for gradient in gradients if gradient is not None))

    def traced(mode):
        return make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)(*tensors)

    tensors = (*inputs.tensors, torch.ones((), device=inputs.device))
    any_rows = any(inputs.any_rows)
    graph = traced("fake")   # faster than for any number of rows
    few = attends_to_few(graph)
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH) if few else contextlib.nullcontext():
        if any_rows or few:
            graph = traced("symbolic" if any_rows else "fake")
    rows = torch.export.Dim("rows", min=2)
    shapes = tuple({0: rows} if of_any else {} for of_any in (*inputs.any_rows, False)) if any_rows else None
    exported = torch.export.export(graph, tensors, dynamic_shapes=shapes, strict=False)
    answers = iter(there)
    gradients = [learned and next(answers) for learned in inputs.learned[:len(inputs.parameters)]]
    return exported, gradients


def attends_to_few(graph):
    """Returns whether all flash attention is over at most 128 tokens, or in float64. At 128 tokens in 16 bits, matrix
    products and a softmax that is compiled with its surroundings are 1.4 times as fast; at 256 they are no faster. In
    float64, torch 2.11 compiles the sums of flash attention's softmax as float32."""
    import torch
    keys = [node.args[1].meta["val"] for node in graph.graph.nodes if "flash_attention_for_cpu.default" in str(node.target)]
    return bool(keys) and all(key.dtype == torch.float64 or key.shape[-2] <= 128 for key in keys)


def moved_buffers(exported, inputs):
    """Returns for each buffer whether the step changes it."""
    from torch.export.graph_signature import OutputKind
    if not any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in exported.graph.nodes):
        return [False] * len(inputs.buffers)  # saves another trace of the graph
    signature = exported.run_decompositions({}).graph_signature
    names = [spec.arg.name for spec in signature.input_specs]
    moved = {spec.target for spec in signature.output_specs
             if spec.kind == OutputKind.USER_INPUT_MUTATION}
    unexpected = moved - {names[i] for i in inputs.buffers}
    if unexpected:
        raise Failure(f"the objective must change only buffers, but changes {', '.join(sorted(unexpected))}")
    return [names[i] in moved for i in inputs.buffers]


def refuse_negative_indices():
    """Makes torch's compiler refuse negative indices in embedding and gather, as these operations do. Torch 2.11 counts
    them from the end."""
    import torch
    from torch._inductor import lowering

    class Operations:
        def __getattr__(self, name):
            return getattr(lowering.ops, name)

        def indirect_indexing(self, *arguments):
            return lowering.ops.indirect_indexing(*arguments, wrap_neg=False)

    for operation in (torch.ops.aten.embedding.default, torch.ops.aten.gather.default):
        function = inspect.unwrap(lowering.lowerings[operation])
        if "wrap_neg" not in inspect.getsource(function):
            lowering.register_lowering(operation, type_promotion_kind=None)(types.FunctionType(
                function.__code__, {**function.__globals__, "ops": Operations()}, function.__name__, function.__defaults__))


def keep_order_of_draws(nodes):
    """Makes each operation that draws random numbers depend on the previous one. For torch's compiler, before it orders
    operations for little memory."""
    import torch
    from torch._inductor.dependencies import WeakDep
    drawn = None
    for node in nodes:
        operation = getattr(node.node, "op_overload", None)
        if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
            continue
        output = node.get_outputs()[0].get_name()
        if drawn:
            node.add_fake_dep(WeakDep(drawn, mutating_buf=output))
        drawn = output
    return nodes


def generated_source(exported, capability):
    """Returns the graph's C++, its constants as bytes, a GPU's kernels by name, and the calls that it delegates to a
    proxy executor."""
    import torch
    refuse_negative_indices()
    draws = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in exported.graph.nodes)
    lstm = any("mkldnn_rnn_layer" in str(node.target) for node in exported.graph.nodes)
    settings = {
        "aot_inductor.package_cpp_only": True,
        "aot_inductor.link_libtorch": True,
        "aot_inductor.embed_kernel_binary": capability.startswith(CUDA),
        "cpp.dynamic_threads": True,  # obeys at::set_num_threads
        "cpp.threads": max(2, torch.get_num_threads()),  # 1 would omit the single regions of code outside loops
        "cpp.simdlen": instructions_of(capability)[0],
        "cpp.enable_kernel_profile": False,
        "fallback_random": True,  # draws the same random numbers as the objective
        "reorder_for_locality": not draws,  # torch 2.11 reorders them, too
        "_pre_fusion_custom_pass": keep_order_of_draws,
        "allow_buffer_reuse": not lstm,  # the compiler takes its workspace for float32
    }
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        package = os.path.join(directory, "step.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=settings)
        with zipfile.ZipFile(package) as files:
            names = files.namelist()
            sources = [files.read(name).decode() for name in names if name.endswith(".cpp")]
            arrays = {}
            for name in names:
                if name.endswith(".o"):
                    arrays |= arrays_of(files.read(name), directory)
            others = [json.loads(files.read(name)) for name in names if name.endswith(".json")]
        if len(sources) != 1:
            raise Failure(f"this version of torch generates unexpected files: {', '.join(names)}")
    constants = arrays.pop("_binary_constants_bin_start", b"")
    return sources[0], constants, arrays, [call["node"] for other in others for call in other.get("nodes", [])]


def arrays_of(object_file, directory):
    """Returns the arrays of an object file with no other content, by the symbols NAME_start; NAME_end is the end."""
    path, data = pathlib.Path(directory, "data.o"), pathlib.Path(directory, "data.bin")
    path.write_bytes(object_file)
    run(["objcopy", "-O", "binary", "--only-section=.lrodata", "--only-section=.ldata", "--only-section=.rodata",
         "--set-section-flags", ".lrodata=alloc,load,readonly", str(path), str(data)])
    symbols = map(str.split, run(["nm", "--defined-only", str(path)]).splitlines())
    at = {symbol: int(address, 16) for address, _, symbol in symbols}
    ends = {start: at.get(start.removesuffix("_start") + "_end") for start in at if start.endswith("_start")}
    if not ends or None in ends.values():
        raise Failure(f"this version of torch generates an unexpected object file, with {', '.join(at) or 'no symbols'}")
    section = data.read_bytes()
    return {start: section[at[start]:end] for start, end in ends.items()}


def number(value):
    """Returns the C++ of a float, which JSON may hold as a text such as "-Infinity"."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    limit = "quiet_NaN()" if math.isnan(value) else "infinity()"
    return f"{'-' if value < 0 else ''}std::numeric_limits<double>::{limit}"


def taken(form, value, real_type):
    """Returns the C++ of an operation's argument, and the numbers of given integers and tensors that it uses."""
    if form == "as_optional_tensor":
        (form, value), = value.items()
    integral = "float" not in str(real_type)
    if form == "as_tensor":
        return "given.tensor()", 0, 1
    if form == "as_tensors":
        return f"given.list({len(value)})", 0, len(value)
    if form == "as_optional_tensors":
        there = [int("as_tensor" in tensor) for tensor in value]
        return f"given.list({{{', '.join(map(str, there))}}})", 0, sum(there)
    if form in ("as_int", "as_sym_int") and integral:
        return "*given.integers++", 1, 0
    if form in ("as_ints", "as_sym_ints") and integral:
        return f"given.integer_list({len(value)})", len(value), 0
    numbers = {"as_none": lambda: "c10::IValue()", "as_bool": lambda: json.dumps(value),
               "as_string": lambda: f"std::string({json.dumps(value)})",
               "as_int": lambda: number(value), "as_float": lambda: number(value),
               "as_bools": lambda: f"c10::List<bool>({{{', '.join(map(json.dumps, value))}}})",
               "as_floats": lambda: f"c10::List<double>({{{', '.join(map(number, value))}}})"}
    return numbers[form](), 0, 0


def call_of(number, call):
    """Returns C++ that calls an operation through LibTorch's dispatcher, for lack of a generated function."""
    import torch
    name, _, overload = call["target"].partition(".")
    given = {argument["name"]: argument["arg"] for argument in call["inputs"]}
    lines, integers, tensors = [], 0, 0
    try:
        for i, argument in enumerate(torch._C._get_schema(name, overload).arguments):
            if argument.name not in given:
                lines.append(f"stack.push_back(*operation.schema().arguments()[{i}].default_value());")
                continue
            (form, value), = given[argument.name].items()
            text, more_integers, more_tensors = taken(form, value, argument.real_type)
            lines.append(f"stack.emplace_back({text});")
            integers, tensors = integers + more_integers, tensors + more_tensors
        lines.append("operation.callBoxed(stack);")
        for i, output in enumerate(call["outputs"]):
            (form, value), = output.items()
            if form == "as_tensors":
                lines.append(f"for (const at::Tensor& tensor : stack[{i}].toTensorVector()) given.tensor() = tensor;")
                tensors += len(value)
            elif form == "as_tensor" or form == "as_optional_tensor" and "as_tensor" in value:
                lines.append(f"given.tensor() = stack[{i}].toTensor();")
                tensors += 1
            elif form not in ("as_none", "as_optional_tensor"):
                raise KeyError(form)
    except (KeyError, RuntimeError, TypeError, ValueError):
        raise Failure(f"the objective uses an operation that compiled code cannot call: {call['target']}") from None
    body = "\n  ".join(lines)
    return f"""void call_{number}(Given& given, int integers, int tensors) {{
  if (integers != {integers} || tensors != {tensors}) throw std::runtime_error("{name} is given other arguments");
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("{name}", "{overload}");
  std::vector<c10::IValue> stack;
  {body}
}}
"""


def dispatched(calls):
    """Returns the C++ of the calls for a proxy executor; they use LibTorch's dispatcher instead."""
    if not calls:
        return ""
    names = ", ".join(f"call_{number}" for number in range(len(calls)))
    return f"""#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <limits>
{GIVEN}
{"".join(call_of(*numbered) for numbered in enumerate(calls))}
AOTITorchError call(int number, int integers, int64_t* first_integer, int tensors, AtenTensorHandle* first_tensor) {{
  constexpr void (*calls[])(Given&, int, int) = {{{names}}};
  Given given{{first_integer, first_tensor}};
  calls[number](given, integers, tensors);
  return AOTI_TORCH_SUCCESS;
}}
}}  // namespace
#define aoti_torch_proxy_executor_call_function(executor, ...) call(__VA_ARGS__)
"""


GIVEN = """
namespace {
struct Given {
  int64_t* integers;
  AtenTensorHandle* tensors;
  at::Tensor& tensor() { return *reinterpret_cast<at::Tensor*>(*tensors++); }
  std::vector<at::Tensor> list(int count) {
    std::vector<at::Tensor> all;
    while (count-- > 0) all.push_back(tensor());
    return all;
  }
  c10::List<std::optional<at::Tensor>> list(std::initializer_list<int> there) {
    c10::List<std::optional<at::Tensor>> all;
    for (const int one : there) all.push_back(one ? std::optional(tensor()) : std::nullopt);
    return all;
  }
  std::vector<int64_t> integer_list(int count) {
    integers += count;
    return {integers - count, integers};
  }
};
"""


def array(declaration, data):
    """Returns the C++ of an array of bytes; a byte is appended, because an array must not be empty."""
    return f"alignas(64) {declaration}[] = {{{','.join(map(str, data + bytes(1)))}}};\n"


KERNEL = re.compile(r'^extern "C" +void +cpp_fused_\w+\([^{;]*\)\n\{\n.*?^\}$', re.MULTILINE | re.DOTALL)
CHECK = re.compile(r'AOTI_TORCH_CHECK\((.*), "index out of bounds: (?:(.+) <= )?(\w+)(?: < (.+))?"\);')

OUT_OF_RANGE = """
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
namespace {
template <class Index>
[[noreturn]] void out_of_range(const Index& index, int64_t lower, int64_t upper) {
  int64_t value = 0;
  if constexpr (requires { Index::size(); }) {  // a vector
    typename Index::value_type values[Index::size()];
    index.store(values);
    for (auto one : values)
      if (value = one; value < lower || value >= upper) break;
  } else {
    value = index;
  }
  throw std::out_of_range("index " + std::to_string(value) + " must be in [" + std::to_string(lower) + ", " +
                          std::to_string(upper) + ")");
}
}  // namespace
"""


KEPT_MEMORY = """
namespace {
/// The program's function and its argument: returns a tensor, or null if LibTorch should create it.
using Empty = void* (*)(void* memory, int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype);
thread_local Empty empty_in_kept_memory = nullptr;
thread_local void* kept_memory = nullptr;

AOTITorchError empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device,
                             int32_t index, AtenTensorHandle* tensor) {
  void* const kept = empty_in_kept_memory && device == aoti_torch_device_type_cpu()
                         ? empty_in_kept_memory(kept_memory, dims, sizes, strides, dtype) : nullptr;
  if (!kept) return aoti_torch_empty_strided(dims, sizes, strides, dtype, device, index, tensor);
  *tensor = static_cast<AtenTensorHandle>(kept);
  return AOTI_TORCH_SUCCESS;
}
}  // namespace
#define aoti_torch_empty_strided empty_strided
"""


def with_checks_that_throw(kernel):
    """Returns the kernel with checks of indices that throw an exception. An exception must not leave a parallel region,
    so the loop around a check stores it, and the kernel throws it at its end."""
    def check(match):
        condition, lower, index, upper = match.groups()
        limits = "std::numeric_limits<int64_t>::min()", "std::numeric_limits<int64_t>::max()"
        return f"if (!({condition})) out_of_range({index}, {lower or limits[0]}, {upper or limits[1]});"

    loops = {loop_around(kernel, found.start()) for found in CHECK.finditer(kernel)} - {None}
    if not loops:
        return CHECK.sub(check, kernel)
    begin, end = kernel.index("{\n") + 1, len(kernel) - 1
    added = [(begin, "\nstd::exception_ptr failure;"), (end, "if (failure) std::rethrow_exception(failure);\n")]
    for begin, end in loops:
        added += [(begin, " try {"), (end, "} catch (...) {\n#pragma omp critical(gradaccum_failure)\n"
                                           "failure = std::current_exception();\n}")]
    for at, text in sorted(added, reverse=True):
        kernel = kernel[:at] + text + kernel[at:]
    return CHECK.sub(check, kernel)


def loop_around(code, at):
    """Returns where the body of the innermost loop or single region around a position begins and ends, or None."""
    depth = 0
    while (at := max(code.rfind("{", 0, at), code.rfind("}", 0, at))) >= 0:
        depth += 1 if code[at] == "}" else -1
        if depth >= 0:
            continue
        depth = 0
        if code[:at].rstrip().rpartition("\n")[2].lstrip().startswith(("for", "#pragma omp single")):
            open_blocks = itertools.accumulate({"{": 1, "}": -1}.get(sign, 0) for sign in code[at:])
            return at + 1, at + next(i for i, blocks in enumerate(open_blocks) if blocks == 0)
    return None


def self_contained(source, constants, kernels, calls, capability):
    """Returns the source with its constants and kernels, an interface of five functions, and names that end in UNIQUE,
    so that a program can hold several."""
    _, interface, tail = source.partition('#include <torch/csrc/inductor/aoti_runtime/model_container.h>\n')
    tail = tail.partition('} // extern "C"\n')[2]  # without LibTorch's interface of about forty functions
    if not interface or "AOTInductorModel::run_impl" not in tail:
        raise Failure("this version of torch generates unexpected code")
    tail = re.sub(r"(?m)^//.*\n", "", tail)  # comments, some with names of temporary files
    lstm = "aoti_torch_cpu_mkldnn_rnn_layer"  # saves tensors for its backward, a later call, only in grad mode
    tail = tail.replace(f"{lstm}(", f"(at::AutoGradMode(true), {lstm})(") if calls else tail
    tail = KERNEL.sub(lambda kernel: with_checks_that_throw(kernel[0]), tail)
    renamed = sorted({"AOTInductorModel", "AOTInductorModelContainer", "AOTInductorModelKernels",
                      "_binary_constants_bin_start", "_binary_constants_bin_end", *kernels,
                      *re.findall(r"\bcpp_fused_\w+", tail)})
    defines = "".join(f"#define {name} {name}_UNIQUE\n" for name in renamed)
    data = array("uint8_t _binary_constants_bin_start", constants)
    for name, kernel in kernels.items():  # a const array is local to its file without extern
        data += f'extern "C" {{ {array(f"extern const unsigned char {name}", kernel)}}}\n'
    on_cuda = capability.startswith(CUDA)
    interface_of_device = CUDA_INTERFACE if on_cuda else CPU_INTERFACE
    for name, part in zip(("MAJOR", "MINOR"), capability.removeprefix(CUDA).split(".")):
        interface_of_device = interface_of_device.replace(name, part)
    return f"""// Generated by gradaccum-compile-step from a recorded training step: the loss and all gradients.
{defines}
#include <torch/csrc/inductor/aoti_include/{'cuda' if on_cuda else 'cpu'}.h>
{interface}{OUT_OF_RANGE}{KEPT_MEMORY}{dispatched(calls)}{tail}
{data}
namespace {{

using Container = torch::aot_inductor::AOTInductorModelContainer;
{interface_of_device}{INTERFACE}"""


CPU_INTERFACE = """
void check(const std::string&) {}

void run_on_device(Container& container, AtenTensorHandle* inputs, AtenTensorHandle* outputs) {
  container.run(inputs, outputs, nullptr, nullptr);
}
"""

CUDA_INTERFACE = """
void check(const std::string& device) {
  const int index = std::stoi(device.substr(device.find(':') + 1));
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (major != MAJOR || minor < MINOR || (MAJOR >= 9 && minor > MINOR))  // from 9.0 on for that one alone
    throw std::runtime_error("it is compiled for GPUs of compute capability MAJOR.MINOR, and " + device + " has " +
                             std::to_string(major) + "." + std::to_string(minor) + ": compile it for that one");
}

void run_on_device(Container& container, AtenTensorHandle* inputs, AtenTensorHandle* outputs) {
  int32_t index = 0;  // of the seed, the last input
  void* stream = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(inputs[container.num_inputs() - 1], &index));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  container.run_single_threaded(inputs, outputs, static_cast<cudaStream_t>(stream), nullptr);  // asks no events
}
"""


INTERFACE = """
thread_local std::string error_UNIQUE;

const char* failed(const char* what) {
  error_UNIQUE = what;
  return error_UNIQUE.c_str();
}

const char* create(void** container, const char* device) try {
  check(device);
  *container = new Container(1, device, std::nullopt);
  return nullptr;
} catch (const std::exception& error) {
  return failed(error.what());
}

void destroy(void* container) { delete static_cast<Container*>(container); }

const char* run(void* container, void** inputs, void** outputs, Empty empty, void* memory) try {
  empty_in_kept_memory = empty;
  kept_memory = memory;
  run_on_device(*static_cast<Container*>(container), reinterpret_cast<AtenTensorHandle*>(inputs),
                reinterpret_cast<AtenTensorHandle*>(outputs));
  return nullptr;
} catch (const std::exception& error) {
  return failed(error.what());
}

size_t inputs(void* container) { return static_cast<Container*>(container)->num_inputs(); }
size_t outputs(void* container) { return static_cast<Container*>(container)->num_outputs(); }

}  // namespace

extern "C" __attribute__((visibility("default"))) void* const gradaccum_code_UNIQUE[] = {
    reinterpret_cast<void*>(&create), reinterpret_cast<void*>(&destroy), reinterpret_cast<void*>(&run),
    reinterpret_cast<void*>(&inputs), reinterpret_cast<void*>(&outputs)};
"""


def library_of(source, capability, directory):
    """Compiles the source to a shared library, and returns its bytes."""
    import torch
    root = pathlib.Path(torch.__file__).parent
    library = pathlib.Path(directory, "step.so")
    pathlib.Path(directory, "step.cpp").write_text(source)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    run([*compiler, *flags_of(capability), "-shared", "-fPIC",
         f"-ffile-prefix-map={root}=torch", f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", "step.cpp",
         *(of_cuda(compiler, directory) if capability.startswith(CUDA) else []), "-o", str(library)], directory)
    return library.read_bytes()


def of_cuda(compiler, directory):
    """Returns flags to compile with CUDA's headers and to link with an empty library instead of CUDA's driver."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME
    folders = [pathlib.Path(CUDA_HOME or "/", "include"), *pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/include")]
    headers = [f"-I{folder}" for folder in folders  # some wheels have only a part of the headers
               if (folder / "cuda_runtime.h").is_file() and (folder / "crt/host_defines.h").is_file()]
    if not headers:
        raise Failure("the headers of CUDA's toolkit were not found: install it, or set CUDA_HOME to its folder")
    run([*compiler, "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", "libcuda.so"], directory)
    return [headers[0], f"-L{directory}", "-Wl,--no-as-needed", "-lcuda"]


def instructions_of(capability):
    """Returns the width of vectors, and the compiler's flags. A GPU's code runs on any CPU."""
    return INSTRUCTIONS["DEFAULT" if capability.startswith(CUDA) else capability]


def flags_of(capability):
    """Returns the flags of torch.compile's compiler, with only the capability's instructions. Code that launches a
    GPU's kernels is long and need not be fast, so it is optimized less."""
    processor, optimization = ("DEFAULT", "-O1") if capability.startswith(CUDA) else (capability, "-O3")
    return ["-std=c++20", optimization, "-DNDEBUG", "-g0", "-w", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off",
            "-fno-tree-loop-vectorize", "-fopenmp", "-fvisibility=hidden",
            "-DTORCH_INDUCTOR_CPP_WRAPPER", "-DSTANDALONE_TORCH_HEADER", "-DC10_USING_CUSTOM_GENERATED_MACROS",
            f"-DCPU_CAPABILITY_{processor}", *instructions_of(capability)[1],
            *(["-DUSE_CUDA"] if capability.startswith(CUDA) else [])]


def run(command, directory=None):
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    except FileNotFoundError:
        raise Failure(f"{command[0]} was not found; install it (Debian: g++), or set CXX to another compiler") from None
    if result.returncode:
        raise Failure(f"{command[0]} failed:\n{result.stderr[:3000]}")
    return result.stdout


def first_line(error):
    """Returns an error's first line, or its cause with the operation if TorchScript names it."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    for code, marks in zip(lines, lines[1:]):
        if marks.endswith("<--- HERE"):
            cause = next((line for line in lines if re.match(r"\w*Error: ", line)), lines[0])
            return f"{code[marks.index('~'):].partition('(')[0]}: {cause}"
    return lines[0]


def exported_graph(manifest, name, directory):
    """Returns a graph for any number of rows if possible, else for the batch's number."""
    from gradaccum.linear_cross_entropy import as_operation  # imports torch
    script, recorded = pathlib.Path(directory, "trace.pt"), manifest[f"{name}.batch"]
    script.write_bytes(manifest.read(manifest[f"{name}.trace"]))

    def graph(batch):
        inputs = Inputs(manifest["model"], batch)
        rows = (inputs.rows, int(re.search(r"\[(\d+)", recorded)[1])) if "*" in batch else None
        with as_operation(rows):
            return graph_of(scripted(str(script)), inputs), inputs

    if manifest[f"{name}.any_rows"]:
        try:
            return graph(manifest[f"{name}.any_rows"])
        except Exception as error:  # any of torch's; a fixed number of rows may still work
            print(f"{manifest.folder}: {name} only of {recorded}: {first_line(error)}", file=sys.stderr)
            manifest[f"{name}.any_rows"] = ""
    return graph(recorded)


class Code:
    """Generates and compiles the code of a folder's graphs. While the next graph is generated, at most two libraries
    are compiled, because a compiler takes 2 GB. Leaving the scope waits for the compilers. `title`: for messages."""

    def __init__(self, manifest, title, capability, directory, library):
        self.manifest, self.title = manifest, title
        self.capability, self.directory, self.library = capability, directory, library
        self.pool, self.libraries, self.files = concurrent.futures.ThreadPoolExecutor(2), {}, set()
        manifest["flags"] = " ".join(flags_of(capability))  # for gradaccum_compile_step of CMake

    def add(self, name, exported, gradients, inputs):
        """Adds a graph and its values to the manifest."""
        began = time.monotonic()
        moved = moved_buffers(exported, inputs)
        source = self_contained(*generated_source(exported, self.capability), self.capability)
        unique = f"{zlib.crc32(source.encode()):08x}"
        source = source.replace("UNIQUE", unique)
        self.put(f"{name}.{unique}.cpp", source.encode())
        if self.library:
            of_library = pathlib.Path(self.directory, name)
            of_library.mkdir()
            self.libraries[f"{name}.{unique}.so"] = self.pool.submit(library_of, source, self.capability, of_library)
        manifest = self.manifest
        manifest[f"{name}.code"] = unique
        manifest[f"{name}.gradients"] = "".join("ny"[there] for there in gradients)
        manifest[f"{name}.moved"] = "".join("ny"[moves] for moves in moved)
        manifest[f"{name}.capability"] = self.capability
        print(f"{self.title}: {name} of {manifest[name + '.any_rows'] or manifest[name + '.batch']}: "
              f"{len(source) / 1e6:.2f} MB of C++ in {time.monotonic() - began:.0f} s", flush=True)

    def put(self, file, content):
        self.manifest.add(file, content)
        self.files.add(file)

    def finish(self):
        """Waits for the libraries. Returns the names of all files."""
        for file, library in self.libraries.items():
            self.put(file, library.result())
        return self.files

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown(cancel_futures=True)


def add_arguments(parser):
    parser.add_argument("--capability", choices=sorted(INSTRUCTIONS), default=None,
                        help="the processors to compile for; by default those like this one")
    parser.add_argument("--source-only", action="store_true",
                        help="generate C++, for gradaccum_compile_step of CMake, and compile no library of it")
    parser.add_argument("--traceback", action="store_true", help="show where torch fails, if it does")


@contextlib.contextmanager
def failures_told(program, traceback):
    """Prints one line for errors that the user can fix and for torch's limitations, and exits."""
    warnings.filterwarnings("ignore")
    try:
        yield
    except Failure as failure:
        if traceback and failure.__cause__:
            raise
        sys.exit(f"{program}: {failure}")
    except Exception as error:
        if traceback or not (type(error).__module__.startswith("torch") or "TorchScript" in str(error)):
            if not multiprocessing.parent_process():
                raise
            sys.excepthook(type(error), error, error.__traceback__)  # the other process could not read every exception
        sys.exit(f"{program}: torch cannot compile this step: {first_line(error)} (--traceback shows where)")


def main():
    parser = argparse.ArgumentParser(prog="gradaccum-compile-step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="folder", nargs="+",
                        help="what ga::save_step wrote; the compiled code is put there")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 4, 1),
                        help="processes that compile graphs side by side, 4 GB each (%(default)s)")
    add_arguments(parser)
    arguments = parser.parse_args()
    with failures_told("gradaccum-compile-step", arguments.traceback), directory_to_compile_in():
        compile_steps(arguments)


@contextlib.contextmanager
def directory_to_compile_in():
    """Gives torch's compiler a temporary cache directory, which would otherwise stay."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as directory:
        os.environ[name] = os.path.join(directory, "cache")
        try:
            yield directory
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def capability_of(asked, model):
    """Returns the requested CPU capability, or that of this CPU; for a model on a CUDA device the compute capability of
    this GPU."""
    import torch
    if "] on cuda" in model:
        if not torch.cuda.is_available():
            raise Failure("the step's model is on a CUDA device: compile it on a machine with a GPU of the same kind")
        return CUDA + ".".join(map(str, torch.cuda.get_device_capability()))
    capability = asked or torch.backends.cpu.get_cpu_capability()
    return capability if capability in INSTRUCTIONS else "DEFAULT"


def compile_steps(arguments):
    manifests = {folder: manifest_to_compile(folder) for folder in arguments.folders}

    def task(folder, names):
        capability = capability_of(arguments.capability, manifests[folder]["model"])
        return folder, names, capability, not arguments.source_only, arguments.traceback

    graphs = {folder: [f"graph-{number}" for number in range(manifest["graphs"])] for folder, manifest in manifests.items()}
    jobs = min(arguments.jobs, sum(map(len, graphs.values())))
    if jobs <= 1:
        for folder, names in graphs.items():
            complete(manifests[folder], [compile_graphs(*task(folder, names))])
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        parts = {folder: [pool.submit(compile_graphs, *task(folder, [name])) for name in names]
                 for folder, names in graphs.items()}
        for folder, manifest in manifests.items():
            complete(manifest, [part.result() for part in parts[folder]])
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure no further graph is started


def check_version(torch):
    """Throws for a torch whose compiler lacks what is needed here."""
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 11):
        raise Failure(f"compiled steps and exported models need torch 2.11 or newer, and {sys.executable} has "
                      f"torch {torch.__version__}")


def manifest_to_compile(folder):
    """Returns the manifest of a step that this Python's torch can compile."""
    manifest = Manifest.of_step(folder)
    try:
        import torch
    except ImportError:
        raise Failure(f"{sys.executable} has no torch; use a Python with torch {manifest.content['libtorch']}") from None
    check_version(torch)
    version = torch.__version__.split("+")[0]
    if version != manifest.content["libtorch"]:
        raise Failure(f"the step was made with LibTorch {manifest.content['libtorch']}, but {sys.executable} has "
                      f"torch {version}: use a Python with that version")
    return manifest


def complete(manifest, parts):
    """Writes the values and files of all graphs that `compile_graphs` returned."""
    manifest.content["files"] = {}
    for values, files in parts:
        manifest.content["values"].update(values)
        manifest.content["files"].update(files)
    manifest.write()


def take_settings(settings):
    """Lets torch choose the same kernels for attention as in the program, and deterministic ones if the program did."""
    import torch
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        getattr(torch.backends.cuda, f"enable_{name}")(name in settings)  # affects CPUs, too
        # Only warns, because the program itself refuses operations without a deterministic kernel.
    torch.use_deterministic_algorithms("deterministic" in settings, warn_only=True)


def compile_graphs(folder, names, capability, library, traceback):
    """Compiles some graphs of a saved step. Returns their values and files for the manifest."""
    manifest = Manifest.of_step(folder)
    with failures_told("gradaccum-compile-step", traceback), tempfile.TemporaryDirectory() as directory, Code(
            manifest, folder, capability, directory, library) as code:
        take_settings(manifest["settings"].split())
        for name in names:
            (exported, gradients), inputs = exported_graph(manifest, name, directory)
            code.add(name, exported, gradients, inputs)
        kept = code.finish() | {manifest[f"{name}.trace"] for name in names}
    own = tuple(f"{name}." for name in names)
    return ({name: value for name, value in manifest.content["values"].items() if name == "flags" or name.startswith(own)},
            {name: file for name, file in manifest.content["files"].items() if name in kept})


if __name__ == "__main__":
    main()
