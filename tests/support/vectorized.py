#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vectorized.py OBJDUMP OBJECT: checks that the optimizers' loops for aarch64 are vectors throughout.

Each function that steps parameters must have a loop of vector instructions without a call, and may call nothing but
what copies the last numbers of an array.
"""

import re
import subprocess
import sys

STEPS = re.compile(r"::(neon|portable)::(for_each_vector<(?!1,)\d+, .*(Sgd|Adam|Lion|Muon|Adafactor)|BlockStep::operator|encode_block|"
                   r"adafactor_squares<.*__vector|sum_of_squares<)")
BRANCH = re.compile(r"(?:b(?:\.\w+)?|cbn?z|tbn?z)\s.*?([0-9a-f]+) <")
CALL = re.compile(r"blr?\s")
VECTOR = re.compile(r"\b(?:v\d+\.|q\d+)")


def functions(text):
    """Yields the name of each function, and its instructions by address."""
    name, instructions = None, {}
    for line in text.splitlines():
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if name:
                yield name, instructions
            name, instructions = heading[1], {}
        elif instruction := re.match(r"\s+([0-9a-f]+):\t(.*)$", line):
            instructions[int(instruction[1], 16)] = instruction[2]
    if name:
        yield name, instructions


def has_vector_loop(instructions):
    for last, text in instructions.items():
        branch = BRANCH.match(text)
        first = int(branch[1], 16) if branch else last + 1
        if first in instructions and first <= last:
            body = [text for at, text in instructions.items() if first <= at <= last]
            if not any(map(CALL.match, body)) and sum(bool(VECTOR.search(text)) for text in body) >= 4:
                return True
    return False


def main():
    objdump, object_file = sys.argv[1:]
    text = subprocess.run([objdump, "-d", "-r", "-C", "--no-show-raw-insn", object_file], check=True,
                          capture_output=True, text=True).stdout
    calls = re.compile(r"R_AARCH64_CALL26\s+(.*)")
    problems, checked = [], 0
    called = {}
    name = None
    for line in text.splitlines():
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = heading[1]
        elif call := calls.search(line):
            called.setdefault(name, set()).add(call[1].strip())
    for name, instructions in functions(text):
        if not STEPS.search(name):
            continue
        checked += 1
        others = {callee for callee in called.get(name, ()) if not callee.startswith(("memcpy", "memset", "__stack_chk"))}
        if others:
            problems.append(f"{name} calls {', '.join(sorted(others))}")
        if not has_vector_loop(instructions):
            problems.append(f"{name} has no loop of vectors")
    for problem in problems:
        print(problem)
    print(f"{checked} functions, {len(problems)} problems")
    return 1 if problems or checked < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
