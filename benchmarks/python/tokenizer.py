# SPDX-License-Identifier: Apache-2.0
"""Times tokenizer_ids (tests/bloom_classifier, C++) and Python's `tokenizers` in turn, on one thread, on the same texts.

    g++ -std=c++20 -O2 -pthread -I examples/bloom_classifier tests/bloom_classifier/tokenizer_ids.cpp -o /tmp/tokenizer_ids
    python benchmarks/python/tokenizer.py /tmp/tokenizer_ids --tokenizer bloom-560m/tokenizer.json

The texts are files below a folder, cut into pieces as long as film reviews.
"""
import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "bloom_classifier"))
import compare_tokenizers  # noqa: E402

from tokenizers import Tokenizer  # noqa: E402


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def python_programs(path, texts):
    tokenizer = Tokenizer.from_file(path)
    yield "Python: Tokenizer.from_file", lambda: Tokenizer.from_file(path)
    yield "Python: encode, one by one", lambda: [tokenizer.encode(text) for text in texts]
    yield "Python: encode_batch", lambda: tokenizer.encode_batch(texts)
    yield "Python: encode_batch_fast", lambda: tokenizer.encode_batch_fast(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json of BLOOM's kind")
    parser.add_argument("--documents", nargs="*", default=["/usr/share/doc"])
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--length", type=int, default=1300, help="characters of a text")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()

    whole = "".join(compare_tokenizers.documents(arguments.documents, 2 * arguments.texts * arguments.length))
    texts = [whole[i : i + arguments.length] for i in range(0, len(whole), arguments.length)][: arguments.texts]
    size = sum(len(text.encode()) for text in texts)
    times = {}
    for repeat in range(1 + arguments.repeats):
        output = compare_tokenizers.run(arguments.program, "time", arguments.tokenizer, "1", texts=texts)
        names = ["C++: from_file", "C++: encode, words not met before", "C++: encode"]
        measured = dict(zip(names, map(float, output.split()), strict=True))
        if repeat == 0:
            programs = dict(python_programs(arguments.tokenizer, texts))
        measured |= {name: seconds(run) for name, run in programs.items()}
        for name, elapsed in measured.items() if repeat > 0 else ():  # the first one warms up
            times.setdefault(name, []).append(elapsed)

    for name, elapsed in times.items():
        median = statistics.median(elapsed)
        spread = f"{min(elapsed):.4f} to {max(elapsed):.4f}"
        print(f"{name}: {median:.4f} s ({spread})" + ("" if "from_file" in name else f", {size / median / 1e6:.1f} MB/s"))
    best = min(statistics.median(times[name]) for name in times if "Python: encode" in name)
    for name in ("C++: encode", "C++: encode, words not met before"):
        print(f"{name}: {best / statistics.median(times[name]):.1f} times as fast as the fastest of Python's")


if __name__ == "__main__":
    main()
