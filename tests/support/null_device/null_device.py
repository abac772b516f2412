#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that computes nothing, to rehearse on a machine without a GPU what a machine with one will run.

    null_device.py FOLDER PROGRAM_OR_LIBRARY...
    LD_LIBRARY_PATH=FOLDER:... LD_PRELOAD=FOLDER/libcuda.so.1 PROGRAM

The first command makes FOLDER/libcuda.so.1, with every function of CUDA that those files call; LibTorch's libtorch_cuda.so
is one of them. It needs g++ and CUDA 13's headers ($CUDA_HOME, /usr/local/cuda). With it Python's torch finds a GPU of compute
capability 9.0 and compiles for it, and programs capture graphs, launch kernels and copy. Everything runs but the kernels
themselves, so results are zeros, and timings are the host's.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess

SOURCE = pathlib.Path(__file__).with_name("null_device.cpp")
PREFIX = r"(__)?(cuda|cu[A-Z]|cublas|cudnn|cusolver|cusparse|cufft|cufile|nccl|nvrtc|nvshmem)"
# Looked up by name when Triton runs.
OF_TRITON = ("cuInit", "cuCtxSetCurrent", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuModuleUnload")


def symbols(of, kind):
    lines = subprocess.run(["nm", *kind, str(of)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def make(folder, asking):
    """Makes FOLDER/libcuda.so.1 with all functions of CUDA that the files `asking` have undefined."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    include = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    compiler, own, library = shlex.split(os.environ.get("CXX", "g++")), folder / "own.o", folder / "libcuda.so.1"
    subprocess.run([*compiler, "-std=c++20", "-fPIC", f"-I{include}", "-c", str(SOURCE), "-o", str(own)], check=True)
    wanted = set(OF_TRITON).union(*(symbols(file, ["-D", "--undefined-only"]) for file in asking))
    others = sorted(name for name in wanted - symbols(own, ["--defined-only"]) if re.match(PREFIX, name))
    (folder / "others.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
    subprocess.run([*compiler, "-shared", "-fPIC", "-w", "-fno-builtin", "-Wl,-soname,libcuda.so.1", str(own), "-x", "c",
                    str(folder / "others.c"), "-x", "none", "-ldl", "-o", str(library)], check=True)
    return library


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("asking", metavar="PROGRAM_OR_LIBRARY", nargs="+")
    arguments = parser.parse_args()
    print(make(arguments.folder, arguments.asking))


if __name__ == "__main__":
    main()
