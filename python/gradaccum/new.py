# SPDX-License-Identifier: Apache-2.0
"""Begins a program: makes a folder with a template and a CMakeLists.txt, ready to build."""

import argparse
import pathlib
import shlex

import gradaccum

HERE = pathlib.Path(__file__).parent
TEMPLATES = next(folder for folder in (HERE / "templates", HERE.parents[1] / "examples/templates") if folder.is_dir())
BUILD_FILE = """cmake_minimum_required(VERSION 3.25)
set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug")
project({name} LANGUAGES CXX)
{gradaccum}
add_executable({name} {name}.cpp)
target_compile_features({name} PRIVATE cxx_std_20)
target_link_libraries({name} PRIVATE gradaccum::compiled)
"""
FETCHED = """include(FetchContent)
FetchContent_Declare(gradaccum GIT_REPOSITORY "{repository}" GIT_TAG "{tag}")
FetchContent_MakeAvailable(gradaccum)"""


def names_of_templates():
    return sorted(file.stem for file in TEMPLATES.glob("*.cpp"))


def arguments_of_command():
    parser = argparse.ArgumentParser(prog="gradaccum-new", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="the folder to make")
    parser.add_argument("--template", choices=names_of_templates(), default="trainer", help="default: %(default)s")
    parser.add_argument("--repository", default="", metavar="ADDRESS",
                        help="fetch gradaccum from this git repository, instead of taking an installed one")
    parser.add_argument("--tag", default="main", help="the repository's branch, tag or commit; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; name a new folder")
    return arguments


def main():
    arguments = arguments_of_command()
    folder, template = arguments.folder, arguments.template
    folder.mkdir(parents=True)
    (folder / f"{template}.cpp").write_bytes((TEMPLATES / f"{template}.cpp").read_bytes())
    fetched = FETCHED.format(repository=arguments.repository, tag=arguments.tag)
    gradaccum_found = fetched if arguments.repository else "find_package(gradaccum 0.1 REQUIRED)"
    (folder / "CMakeLists.txt").write_text(BUILD_FILE.format(name=template, gradaccum=gradaccum_found))
    prefix = None if arguments.repository else gradaccum.prefix()
    found = f" -DCMAKE_PREFIX_PATH={shlex.quote(str(prefix))}" if prefix else ""
    name = shlex.quote(str(folder))
    print(f"{folder} has {template}.cpp and CMakeLists.txt. The first build takes minutes, since it compiles gradaccum:\n"
          f"    cmake -S {name} -B {name}/build{found}\n"
          f"    cmake --build {name}/build --parallel 2\n"
          f"    {name}/build/{template} --help")


if __name__ == "__main__":
    main()
