# SPDX-License-Identifier: Apache-2.0
r"""Compares the ids of tokenizer_ids (C++) with those of Python's `tokenizers`, on random strings and on documents.

    g++ -std=c++20 -O2 -pthread -I examples/bloom_classifier \
        tests/bloom_classifier/tokenizer_ids.cpp -o /tmp/tokenizer_ids
    python tests/bloom_classifier/compare_tokenizers.py /tmp/tokenizer_ids --strings 100000 --documents /usr/share/doc

Texts must decode to themselves; with random tokenizers, which lack bytes, to Python's result. Prints the numbers of
texts and of differences, and ends with status 1 if there is any.
"""
import argparse
import gzip
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

from tokenizers import AddedToken, Tokenizer

import tokenizer_values


def packed(texts):
    return b"".join(struct.pack("<I", len(text)) + text for text in (text.encode() for text in texts))


def run(program, *arguments, texts):
    return subprocess.run([program, *arguments], input=packed(texts), stdout=subprocess.PIPE, check=True).stdout


def encoded_in_cpp(program, path, texts):
    """Returns the ids of each text, and the text that they decode to."""
    output, at = run(program, "ids", path, texts=texts), 0
    for _ in texts:
        (count,) = struct.unpack_from("<I", output, at)
        *ids, size = struct.unpack_from(f"<{count}II", output, at + 4)
        at += 8 + 4 * count
        yield ids, output[at : at + size].decode()
        at += size


def documents(folders, limit):
    """Returns the texts of all files below the folders, zipped ones too, up to a number of bytes."""
    found, size = [], 0
    for path in (path for folder in folders for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file()):
        try:
            content = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError):
            continue
        found.append(content.decode(errors="replace"))
        size += len(content)
        if size > limit:
            break
    return found


def differences(program, tokenizer, texts, decoded_in_python):
    """Returns the texts that are encoded or decoded differently from Python, and the number of ids."""
    in_python = Tokenizer.from_str(tokenizer)
    expected = [encoding.ids for encoding in in_python.encode_batch(texts)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(tokenizer)
        file.flush()
        found = list(encoded_in_cpp(program, file.name, texts))
    decoded = in_python.decode_batch(expected, skip_special_tokens=False) if decoded_in_python else texts
    different = [text for text, *pairs in zip(texts, zip(expected, decoded), found, strict=True) if pairs[0] != pairs[1]]
    return different, sum(map(len, expected))


def random_tokenizer(rnd):
    """Makes a small tokenizer of BLOOM's kind with random merges, added tokens and options."""
    tokens = rnd.sample(["a", "b", "c", "d", "Ġ", ".", "Ã", "©", "Ċ", "<", ">"], rnd.randint(3, 11))
    merges = []
    for _ in range(rnd.randint(0, 40)):
        pair = [rnd.choice(tokens), rnd.choice(tokens)]
        merges.append(pair)
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
    rnd.shuffle(merges)
    tokens += {"".join(rnd.choices("abcdĠ.", k=rnd.randint(2, 5))) for _ in range(rnd.randint(0, 4))} - set(tokens)
    rnd.shuffle(tokens)
    contents = dict.fromkeys("".join(rnd.choices("abcd .<>\n", k=rnd.randint(1, 5))) for _ in range(rnd.randint(0, 5)))
    added = [AddedToken(content, normalized=rnd.random() < 0.5, special=rnd.random() < 0.5) for content in contents]
    return json.dumps(tokenizer_values.by_hand(
        tokens, merges if rnd.random() < 0.5 else [" ".join(merge) for merge in merges], added,
        ignore_merges=rnd.random() < 0.3, unk_token=rnd.choice([None, rnd.choice(tokens)])))


def compare_random_tokenizers(program, count, seed):
    rnd, different = random.Random(seed), 0
    for _ in range(count):
        tokenizer = random_tokenizer(rnd)
        texts = ["".join(rnd.choices("aabbccdd  .é<>\n", k=rnd.randint(0, 100))) for _ in range(100)]
        wrong, _ = differences(program, tokenizer, texts, decoded_in_python=True)
        different += len(wrong)
        if wrong:
            print(f"    {wrong[0]!r} by {tokenizer}")
    print(f"{count} tokenizers by chance, 100 texts each: {different} differences")
    return different


def compare(program, name, tokenizer, texts):
    different, ids = differences(program, tokenizer, texts, decoded_in_python=False)
    size = sum(len(text.encode()) for text in texts)
    print(f"{name}: {len(texts)} texts, {size} bytes, {ids} ids, {len(different)} differences", flush=True)
    for text in different[:3]:
        print("   ", repr(text[:200]))
    return len(different)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--tokenizers", type=int, default=300, help="how many are made by chance")
    parser.add_argument("--documents", nargs="*", default=[])
    parser.add_argument("--document-bytes", type=int, default=30_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    strings = tokenizer_values.strings(random.Random(arguments.seed), arguments.strings)
    texts = documents(arguments.documents, arguments.document_bytes)
    committed = (tokenizer_values.DATA / "tokenizer.json").read_text(encoding="utf-8")
    larger = tokenizer_values.trained([*strings[:2000], *texts[::5]], 20_000)
    in_cpp = run(arguments.program, "train", "2000", texts=[*strings[:2000], *texts[:20]]).decode()

    different = compare_random_tokenizers(arguments.program, arguments.tokenizers, arguments.seed)
    for name, tokenizer in (("committed", committed), ("trained in Python", larger.to_str()), ("trained in C++", in_cpp)):
        different += compare(arguments.program, f"{name}, random strings", tokenizer, strings)
        if texts:
            different += compare(arguments.program, f"{name}, documents", tokenizer, texts)
    sys.exit(different != 0)


if __name__ == "__main__":
    main()
