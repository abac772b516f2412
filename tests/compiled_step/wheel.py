# SPDX-License-Identifier: Apache-2.0
"""Loads the torch that the build fetched for its LibTorch, for scripts of the tests.

The wheel is most often without the CUDA libraries that its own are linked with. Nothing of them is called here, so empty
libraries stand in for those that are missing.
"""

import ctypes
import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Loading looks for one variable, of this version; functions are looked for when they are called.
VARIABLE, VERSION = "int nvshmem_selected_device_transport;", "NVSHMEM { global: *; };"


def stand_in(name, directory):
    """A shared library of that name, without functions."""
    source, versions, library = (pathlib.Path(directory, file) for file in ("empty.c", "versions", name))
    has_versions = "nvshmem" in name
    source.write_text(VARIABLE if has_versions else "")
    versions.write_text(VERSION)
    subprocess.run([os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-nostdlib", "-x", "c", str(source), "-o", str(library),
                    f"-Wl,-soname,{name}", *([f"-Wl,--version-script={versions}"] if has_versions else [])], check=True)
    return library


def load_libraries_of_torch():
    """Loads the library behind the module torch, and stand-ins for what it misses, which the module then finds."""
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


logging.disable(logging.WARNING)  # of what only GPUs need
load_libraries_of_torch()
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # the code is for any processor: nothing is tried on this one
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
