# SPDX-License-Identifier: Apache-2.0
"""gradaccum for Conan 2: headers and the CMake package.

LibTorch is the machine's (`pip install torch`, or CMAKE_PREFIX_PATH), because Conan's center has none from 2.8.0 on. The
option system_json takes the system's nlohmann_json, too. Only that has been run, since Conan's center was out of reach."""

import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy

ROOT = pathlib.Path("..", "..")  # the checkout, as seen from this file


class Gradaccum(ConanFile):
    name = "gradaccum"
    description = "Training utilities for LibTorch: gradient accumulation, mixed precision, optimizers, states"
    license = "Apache-2.0"
    topics = ("pytorch", "libtorch", "machine-learning")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"  # those of the test's program; the package has none
    options = {"system_json": [True, False]}
    default_options = {"system_json": False}
    no_copy_source = True

    def set_version(self):
        text = (pathlib.Path(self.recipe_folder) / ROOT / "include/gradaccum/version.hpp").read_text()
        self.version = ".".join(re.findall(r"define GRADACCUM_VERSION_\w+ (\d+)", text))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, pathlib.Path(self.recipe_folder) / ROOT, self.export_sources_folder)

    def requirements(self):
        if not self.options.system_json:
            self.requires("nlohmann_json/[>=3.11 <4]", transitive_headers=True)

    def package_id(self):
        self.info.clear()

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["GRADACCUM_INSTALL"] = "ONLY"
        toolchain.generate()

    def package(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.install()
        copy(self, "LICENSE", self.source_folder, pathlib.Path(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
        self.cpp_info.builddirs = ["share/cmake/gradaccum"]
        self.cpp_info.set_property("cmake_find_mode", "none")  # the library's own CMake package finds LibTorch
