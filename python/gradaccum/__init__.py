# SPDX-License-Identifier: Apache-2.0
"""Tools of the C++ library gradaccum: exports of models, compiled training steps, and templates of programs. This module
only finds the headers and the CMake package; the others import torch where they need it."""

import pathlib
import re
import sys


def prefix():
    """Returns the folder that has include/: the environment that pip installed to, or a checkout of the source."""
    places = (*pathlib.Path(__file__).parents, pathlib.Path(sys.prefix))
    return next(place for place in places if (place / "include/gradaccum/version.hpp").is_file())


def cmake_dir():
    """Returns the folder of the CMake package, or None in a checkout."""
    folder = prefix() / "share/cmake/gradaccum"
    return folder if folder.is_dir() else None


def version():
    text = (prefix() / "include/gradaccum/version.hpp").read_text()
    return ".".join(re.findall(r"define GRADACCUM_VERSION_\w+ (\d+)", text))
