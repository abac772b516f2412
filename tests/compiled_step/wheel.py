# SPDX-License-Identifier: Apache-2.0
"""Loads the torch that the build fetched for its LibTorch, for scripts of the tests.

The wheel mostly lacks the CUDA libraries that it is linked with. The scripts call none of their functions, so empty
libraries replace the missing ones.
"""

import ctypes
import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Loading requires one variable, of this version; functions are resolved when they are called.
VARIABLE, VERSION = "int nvshmem_selected_device_transport;", "NVSHMEM { global: *; };"


def stand_in(name, directory):
    """Builds a shared library of that name, without functions."""
    source, versions, library = (pathlib.Path(directory, file) for file in ("empty.c", "versions", name))
    has_versions = "nvshmem" in name
    source.write_text(VARIABLE if has_versions else "")
    versions.write_text(VERSION)
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-nostdlib", "-x", "c", str(source), "-o", str(library),
                    f"-Wl,-soname,{name}", *([f"-Wl,--version-script={versions}"] if has_versions else [])], check=True)
    return library


def load_libraries_of_torch():
    """Loads torch's library and stand-ins for missing ones, for the module torch to find."""
    sys.setdlopenflags(os.RTLD_LAZY)
    folder = next(path for path in map(pathlib.Path, sys.path) if (path / "torch/lib/libtorch_python.so").exists())
    loader = ctypes.CDLL(None)
    loader.dlopen.restype, loader.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p

    def load(library):
        return None if loader.dlopen(os.fsencode(library), os.RTLD_LAZY) else loader.dlerror().decode()

    with tempfile.TemporaryDirectory() as directory:
        while problem := load(folder / "torch/lib/libtorch_python.so"):
            missing = re.match(r"(\S+): cannot open shared object file", problem)
            if not missing or load(stand_in(missing[1], directory)):
                sys.exit(f"wheel.py: torch cannot be loaded: {problem}")


logging.disable(logging.WARNING)  # about libraries that only GPUs need
load_libraries_of_torch()
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # skips tests of this CPU, because the code is for any CPU
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
