# SPDX-License-Identifier: Apache-2.0
"""Prints where pip installed gradaccum, for CMake and other build systems."""

import argparse
import sys
from importlib import metadata

import gradaccum


def main():
    parser = argparse.ArgumentParser(prog="python -m gradaccum", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cmake-dir", action="store_true", help="the folder for -Dgradaccum_DIR=...")
    what.add_argument("--include-dir", action="store_true", help="the folder for -I, with the headers")
    what.add_argument("--version", action="store_true", help="the version of headers and tools")
    arguments = parser.parse_args()
    prefix = gradaccum.prefix()
    if not prefix:
        sys.exit("gradaccum: this is a checkout, and not installed: pip install the folder that has its pyproject.toml")
    if arguments.version:
        print(metadata.version("gradaccum"))
    else:
        print(prefix / ("include" if arguments.include_dir else "share/cmake/gradaccum"))


if __name__ == "__main__":
    main()
