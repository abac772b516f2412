# SPDX-License-Identifier: Apache-2.0
"""on_null_device.py FOLDER RECORD...: tests that gradaccum-compile-step's code for a GPU is loaded and launches kernels.

The program RECORD... records a step into a folder inside of FOLDER, on the emulated device. A device that computes
nothing (tests/support/null_device) replaces the GPU: results have no meaning; everything before a kernel is real.
"""

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys

folder, record = pathlib.Path(sys.argv[1]), sys.argv[2:]
sys.path.append(str(pathlib.Path(__file__).parents[1] / "support/null_device"))
import null_device  # noqa: E402

torch_libraries = next(path for path in (pathlib.Path(path, "torch/lib") for path in sys.path) if path.exists())
ASKING = [torch_libraries / f"lib{name}.so" for name in ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg",
                                                        "caffe2_nvrtc", "torch_nvshmem")]
os.environ.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_CACHE_DIR=str(folder / "triton"), TORCHINDUCTOR_COMPILE_THREADS="1")
device = ctypes.CDLL(str(null_device.make(folder, ASKING)), ctypes.RTLD_GLOBAL)

import wheel  # noqa: E402, F401: finds python/ and torch
import torch  # noqa: E402

from gradaccum import compile_step  # noqa: E402


class Functions(ctypes.Structure):
    """The interface of compiled code."""
    _fields_ = [("create", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p)),
                ("destroy", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
                ("run", ctypes.CFUNCTYPE(ctypes.c_char_p, *[ctypes.c_void_p] * 5)),
                ("inputs", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)),
                ("outputs", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p))]


pointer_of, capsule_of = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
capsule_of.argtypes, capsule_of.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


def compiled(step):
    """Compiles a step. Returns its manifest and the functions of its code."""
    sys.argv[1:] = ["--traceback", "--jobs", "1", str(step)]
    compile_step.main()
    manifest = compile_step.Manifest.of_step(step)
    for name in ("c10", "torch_cpu", "c10_cuda", "torch_cuda"):  # the code uses their functions
        ctypes.CDLL(str(torch_libraries / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    code = ctypes.CDLL(str(next(step.glob("graph-0.*.so"))), os.RTLD_NOW)  # an error if a symbol is missing
    return manifest, Functions.in_dll(code, f"gradaccum_code_{manifest['graph-0.code']}")


def launches_of(functions, inputs):
    """Runs the code. Returns the number of launched kernels, and the code's return value."""
    container = ctypes.c_void_p()
    assert functions.create(container, b"cuda:0") is None
    assert functions.inputs(container) == len(inputs)
    given = [pointer_of(capsule, None) for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)]
    outputs = (ctypes.c_void_p * functions.outputs(container))()
    before = device.null_device_launches()
    problem = functions.run(container, (ctypes.c_void_p * len(given))(*given), outputs, None, None)
    assert problem is None, problem
    functions.destroy(container)
    results = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule_of(output, None, None) for output in outputs])
    return device.null_device_launches() - before, results


def main():
    step = folder / "step"
    shutil.rmtree(step, ignore_errors=True)
    subprocess.run([*record, str(step)], check=True)
    manifest, functions = compiled(step)
    assert manifest["graph-0.capability"] == "CUDA 9.0", json.dumps(manifest.content)
    kernels = torch.backends.cuda
    assert kernels.flash_sdp_enabled() and not kernels.cudnn_sdp_enabled()  # as in the program; not the default
    assert not torch.are_deterministic_algorithms_enabled()
    compile_step.take_settings(["math_sdp", "deterministic"])
    assert not kernels.flash_sdp_enabled() and torch.are_deterministic_algorithms_enabled()

    inputs = compile_step.Inputs(manifest["model"], manifest["graph-0.batch"]).tensors
    inputs.append(torch.ones((), device="cuda"))
    launches, results = launches_of(functions, inputs)
    gradients = [parameter.shape for parameter, there in zip(inputs, manifest["graph-0.gradients"]) if there == "y"]
    assert [result.shape for result in results][-len(gradients):] == gradients and results[0].shape == ()
    assert launches > len(gradients) / 2, launches

    os.environ["NULL_DEVICE_MINOR"] = "3"
    refused = functions.create(ctypes.c_void_p(), b"cuda:0").decode()
    assert refused == ("it is compiled for GPUs of compute capability 9.0, and cuda:0 has 9.3: compile it for that one"), refused
    print(f"{launches} launches")


main()
