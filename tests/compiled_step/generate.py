# SPDX-License-Identifier: Apache-2.0
"""generate.py FOLDER NAME...: has gradaccum-compile-step generate the C++ of the steps FOLDER/NAME as FOLDER/NAME.cpp."""

import pathlib
import shutil
import sys

import wheel  # noqa: F401: finds python/ and torch


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    from gradaccum import compile_step
    sys.argv[1:] = ["--capability", "DEFAULT", "--source-only", *(str(folder / name) for name in names)]
    compile_step.main()
    for name in names:
        code, = (folder / name).glob("graph-0.*.cpp")
        shutil.copyfile(code, folder / f"{name}.cpp")


if __name__ == "__main__":
    main()
