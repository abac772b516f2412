# SPDX-License-Identifier: Apache-2.0
"""Tools of the C++ library gradaccum: exports of models, compiled training steps, and templates of programs. This module
only finds the installed headers; the others import torch where they need it."""

import pathlib
import sys


def prefix():
    """Returns the folder that pip installed include/ and share/cmake/gradaccum to: the virtual environment's, or that
    of `pip install --target` or `--user`; None in a checkout of the source."""
    places = (*pathlib.Path(__file__).parents, pathlib.Path(sys.prefix))
    return next((place for place in places if (place / "share/cmake/gradaccum/gradaccumConfig.cmake").is_file()), None)
