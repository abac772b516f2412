# SPDX-License-Identifier: Apache-2.0
"""Encodes texts by Python's `tokenizers` on one thread, as tokenizer.cpp does in C++; with --make makes the texts first.

The texts are the documentation in numpy and torch, cut into pieces as long as film reviews, and the tokenizer,
of BLOOM's kind, is trained on a fifth of them.
"""
import ast
import json
import os
import pathlib
import sys
import time

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # read when tokenizers is imported

import numpy  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from record import parse, record  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "bloom_classifier"))
from tokenizer_values import trained  # noqa: E402

LENGTH, TEXTS, VOCABULARY, REPEATS = 1300, 2500, 30_000, 7


def documentation():
    """Collects texts of the packages' documentation, up to the needed number."""
    documented, size = (ast.Module, ast.ClassDef, ast.FunctionDef), 0
    paths = (path for package in (numpy, torch) for path in sorted(pathlib.Path(package.__file__).parent.rglob("*.py")))
    for path in (path for path in paths if "tests" not in path.parts):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text + "\n\n"
                size += len(text)
        if size > LENGTH * TEXTS:
            return


def make(folder):
    whole = "".join(documentation())
    texts = [whole[i : i + LENGTH] for i in range(0, LENGTH * TEXTS, LENGTH)]
    (folder / "texts.json").write_text(json.dumps(texts))
    trained(texts[::5], VOCABULARY).save(str(folder / "tokenizer.json"))


def checksum(encodings):
    """Returns the checksum of tokenizer.cpp."""
    value = 0xCBF29CE484222325
    for encoding in encodings:
        for number in [*encoding.ids, 0xFFFFFFFF]:
            value = (value ^ number) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def main():
    arguments = parse(__doc__, lambda parser: parser.add_argument("folder", type=pathlib.Path),
                      lambda parser: parser.add_argument("--make", action="store_true"))
    if arguments.make:
        return make(arguments.folder)
    texts = json.loads((arguments.folder / "texts.json").read_text())
    for name in ("encode_batch", "encode_batch_fast"):
        times = []
        for _ in range(1 + REPEATS):
            tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))  # with an empty cache
            encodings = None  # freed before the time is measured
            start = time.perf_counter()
            encodings = getattr(tokenizer, name)(texts)
            times.append(time.perf_counter() - start)
        record(arguments, f"Python: tokenizers, {name}", times[1:], ids=checksum(encodings))  # the first one warms up


main()
