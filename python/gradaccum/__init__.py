# SPDX-License-Identifier: Apache-2.0
"""Tools of the C++ library gradaccum: exports of models, compiled training steps, and templates of programs. This module
only finds the headers and the CMake package; the others import torch where they need it."""

import pathlib
import re
import sys


def place_of(file):
    """Returns the folder that has this file: the environment that pip installed to, or a checkout of the source; or None."""
    places = (*pathlib.Path(__file__).parents, pathlib.Path(sys.prefix))
    return next((place for place in places if (place / file).is_file()), None)


def include_dir():
    return place_of("include/gradaccum/version.hpp") / "include"


def prefix():
    """Returns the folder for CMAKE_PREFIX_PATH, or None in a checkout that is not installed."""
    return place_of("share/cmake/gradaccum/gradaccumConfig.cmake")


def version():
    text = (include_dir() / "gradaccum/version.hpp").read_text()
    return ".".join(re.findall(r"define GRADACCUM_VERSION_\w+ (\d+)", text))
