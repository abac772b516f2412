# SPDX-License-Identifier: Apache-2.0
"""wheel.py SOURCE FOLDER BACKEND LIBTORCH: makes the wheel of SOURCE in FOLDER with the packages in BACKEND, and compares its
content with the source. Installs it in an empty environment, FOLDER/venv, and by `pip install --target` in FOLDER/target,
both with the torch that has LIBTORCH."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

source, folder, backend, libtorch = map(pathlib.Path, sys.argv[1:])
venv = folder / "venv"
python = venv / "bin/python"
CMAKE_FILES = {"gradaccumConfig.cmake", "gradaccumConfigVersion.cmake", "gradaccumTargets.cmake", "GradaccumLibTorch.cmake",
               "GradaccumCompiled.cmake", "GradaccumCudaKernels.cmake", "GradaccumCompileStep.cmake", "without_openmp/omp.h"}


def run(*command, **environment):
    """Returns what a command prints."""
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}).stdout


def pip(*arguments, **environment):
    return run(python, "-m", "pip", *arguments, **environment)


def built():
    """Returns the wheel, made without a network and without a compiler."""
    pip("wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, PYTHONPATH=str(backend),
        CC="no compiler", CXX="no compiler")
    wheel, = folder.glob("*.whl")
    return wheel


def files_of(root, pattern="**/*"):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob(pattern)
            if path.is_file() and "__pycache__" not in path.parts}


def check_content(wheel):
    """Compares the files of a wheel with the source's, byte for byte, except for files that CMake writes."""
    version = ".".join(re.findall(r"VERSION_\w+ (\d+)", (source / "include/gradaccum/version.hpp").read_text()))
    assert wheel.name == f"gradaccum-{version}-py3-none-any.whl" and wheel.stat().st_size < 2e6, (wheel, wheel.stat().st_size)
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    parts = {f"gradaccum-{version}.data/data/include/": files_of(source / "include"),
             "gradaccum/": files_of(source / "python/gradaccum", "*.py"),
             "gradaccum/templates/": {name: text for name, text in files_of(source / "examples/templates").items() if name.endswith(".cpp")}}
    wanted = {place + name: content for place, files in parts.items() for name, content in files.items()}
    wrong = [name for name, content in wanted.items() if packed.get(name) != content]
    assert not wrong and len(wanted) > 250, f"the wheel must have these files as they are: {wrong}"
    others = {name.removeprefix(f"gradaccum-{version}") for name in packed.keys() - wanted.keys()}
    assert others == {f".data/data/share/cmake/gradaccum/{name}" for name in CMAKE_FILES} | {
        f".dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}, others
    check_requirements(packed[f"gradaccum-{version}.dist-info/METADATA"].decode())
    return version


def check_requirements(metadata):
    """Without its extra the wheel needs nothing, and the extra's torch is at most the newest that CMake accepts."""
    newest, = re.findall(r"LIBTORCH_NEWEST ([\d.]+)", (source / "cmake/GradaccumLibTorch.cmake").read_text())
    needs = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert all("extra == " in need for need in needs) and any(f"torch<={newest}," in need for need in needs), needs


def files_in_venv():
    return {path for path in venv.rglob("*") if not path.is_dir()}  # pip leaves folders whose folders it emptied


def check_commands(version):
    """The commands run in an environment without torch."""
    asked = [run(python, "-m", "gradaccum", f"--{what}").strip() for what in ("version", "cmake-dir", "include-dir")]
    assert asked == [version, f"{venv}/share/cmake/gradaccum", f"{venv}/include"], asked
    for name in ("gradaccum-export", "gradaccum-compile-step", "gradaccum-new"):
        assert run(venv / "bin" / name, "--help").startswith(f"usage: {name} ")
    shutil.rmtree(folder / "mine", ignore_errors=True)
    text = run(venv / "bin/gradaccum-new", folder / "mine", "--template", "ppo")
    assert f"-DCMAKE_PREFIX_PATH={venv}\n" in text and files_of(folder / "mine").keys() == {"ppo.cpp", "CMakeLists.txt"}, text


def link(packages):
    """Makes the torch of the tests one of these packages, with its CUDA libraries."""
    (packages / "torch").symlink_to(libtorch)
    if (libtorch.parent / "nvidia").exists():
        (packages / "nvidia").symlink_to(libtorch.parent / "nvidia")


def main():
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", venv)
    wheel = built()
    version = check_content(wheel)
    run(sys.executable, source / "tools/sbom.py", wheel, folder / "sbom.json")
    before = files_in_venv()
    pip("install", "--quiet", "--no-index", wheel)
    check_commands(version)
    pip("uninstall", "--quiet", "--yes", "gradaccum")
    left = [path for path in files_in_venv() - before if "gradaccum" in str(path.relative_to(venv))]
    assert not left, f"pip uninstall must leave nothing, but leaves {left}"
    pip("install", "--quiet", "--no-index", wheel)
    packages, = venv.glob("lib/python3*/site-packages")
    pip("install", "--quiet", "--no-index", "--target", folder / "target", wheel)
    link(packages)
    link(folder / "target")
    (folder / "target/nlohmann_json").symlink_to(backend / "nlohmann_json")


if __name__ == "__main__":
    main()
