#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures a run of the tests: wall and processor seconds of its stages, and seconds of each file and each test.

    ledger.py FOLDER begin                  forgets earlier stages
    ledger.py FOLDER stage NAME COMMAND...  runs a command as a stage, and ends with its status
    ledger.py FOLDER print                  prints the table, and writes it to FOLDER/ledger.txt

The operating system measures a stage, with all child processes. The build tool's FOLDER/.ninja_log has the time of each
file, and CTest's FOLDER/tests.xml that of each test; on a busy machine these two include waiting for a core.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import xml.etree.ElementTree

# The first pattern that matches an output of the build tool names its part of the build.
PARTS = [
    (r"/gradaccum_compiled\.dir/|/libgradaccum_compiled|^libgradaccum_compiled", "the library"),
    (r"\.(gch|pch)$", "precompiled headers"),
    (r"gradaccum\.tests\.(compiled_step|exported_model)\.\w+\.dir/", "code that Python exported"),
    (r"/exported/|/steps/", "exports by Python"),
    (r"emulated_cuda", "the emulated device"),
    (r"snippets", "snippets of the documents"),
    (r"^examples/|examples\.", "examples"),
    (r"\.o$", "tests"),
    (r"", "linking"),
]


def ran_as_stage(command):
    """Returns the status of a command, and its wall and processor seconds. An interrupt ends the command, which ends this."""
    begin = time.monotonic()
    process = subprocess.Popen(command)
    while True:
        try:
            _, status, usage = os.wait4(process.pid, 0)
            break
        except KeyboardInterrupt:
            pass
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code, time.monotonic() - begin, usage.ru_utime + usage.ru_stime


def built_since(folder, begin):
    """Returns the seconds of each command of the build tool, by its first output."""
    log, seconds = folder / ".ninja_log", {}
    if not log.exists():
        return seconds
    commands = {}
    for line in log.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) == 5:  # neither a comment nor cut off
            start, end, _, output, command = fields
            commands.setdefault((start, end, command), output)
    for (start, end, _), output in commands.items():
        path = folder / output
        if path.exists() and path.stat().st_mtime >= begin:
            seconds[output] = (int(end) - int(start)) / 1000
    return seconds


def tested_since(folder, begin):
    """Returns the seconds of each test that ran, and the labels of all tests."""
    results = folder / "tests.xml"
    if not results.exists() or results.stat().st_mtime < begin:
        return {}, {}
    cases = xml.etree.ElementTree.parse(results).getroot().iter("testcase")
    seconds = {case.get("name"): float(case.get("time")) for case in cases if case.get("status") in ("run", "fail")}
    listed = subprocess.run(["ctest", "--test-dir", str(folder), "--show-only=json-v1"], capture_output=True, text=True, check=True)
    labels = {}
    for test in json.loads(listed.stdout)["tests"]:
        properties = {each["name"]: each["value"] for each in test.get("properties", [])}
        labels[test["name"]] = properties.get("LABELS", [])
    return seconds, labels


def slowest(seconds):
    return sorted(seconds.items(), key=lambda item: -item[1])[:10]


def sums(pairs):
    total = collections.Counter()
    for name, seconds in pairs:
        total[name] += seconds
    return total.most_common()


def part_of(output):
    return next(name for pattern, name in PARTS if re.search(pattern, output))


def table(folder):
    stages = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    begin = min(stage["begin"] for stage in stages)
    built = built_since(folder, begin)
    tested, labels = tested_since(folder, begin)
    lines = [f"{'stage':<44}{'wall':>10}{'processor':>12}"]
    for stage in stages:
        lines.append(f"{stage['name']:<44}{stage['wall']:>8.0f} s{stage['processor']:>10.0f} s")
    total = [sum(stage[which] for stage in stages) for which in ("wall", "processor")]
    lines.append(f"{'all':<44}{total[0]:>8.0f} s{total[1]:>10.0f} s")
    for title, rows in (
        ("built, seconds of the compiler, the linker and Python", sums((part_of(output), took) for output, took in built.items())),
        ("the ten slowest to build", slowest(built)),
        ("tests by label", sums((label, took) for test, took in tested.items() for label in labels.get(test, []))),
        ("the ten slowest tests", slowest(tested)),
    ):
        if rows:
            lines += ["", title] + [f"  {shortened(name):<62}{took:>8.1f} s" for name, took in rows]
    return "\n".join(lines) + "\n"


def shortened(name):
    name = name.replace("CMakeFiles/", "").removesuffix(".o")
    return name if len(name) <= 60 else "..." + name[-57:]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, verb, arguments = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    stages = folder / "ledger.jsonl"
    if verb == "begin" and not arguments:
        folder.mkdir(parents=True, exist_ok=True)
        stages.write_text("")
        (folder / "ledger.txt").unlink(missing_ok=True)
    elif verb == "stage" and len(arguments) > 1:
        begin = time.time()
        status, wall, processor = ran_as_stage(arguments[1:])
        with stages.open("a") as file:
            file.write(json.dumps({"name": arguments[0], "begin": begin, "wall": wall, "processor": processor}) + "\n")
        sys.exit(status)
    elif verb == "print" and not arguments:
        text = table(folder)
        (folder / "ledger.txt").write_text(text)
        print(text, end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
