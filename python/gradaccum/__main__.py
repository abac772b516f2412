# SPDX-License-Identifier: Apache-2.0
"""Prints where gradaccum is, for CMake and other build systems."""

import argparse
import sys

import gradaccum


def main():
    parser = argparse.ArgumentParser(prog="python -m gradaccum", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cmake-dir", action="store_true", help="the folder for -Dgradaccum_DIR=...")
    what.add_argument("--include-dir", action="store_true", help="the folder for -I, with the headers")
    what.add_argument("--version", action="version", version=gradaccum.version())
    arguments = parser.parse_args()
    if arguments.include_dir:
        print(gradaccum.include_dir())
    elif prefix := gradaccum.prefix():
        print(prefix / "share/cmake/gradaccum")
    else:
        sys.exit("gradaccum: this is a checkout, which has no CMake package: install it by pip")


if __name__ == "__main__":
    main()
