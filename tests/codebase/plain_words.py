#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts turns of phrase that plain technical English rarely needs, per 1,000 words of comments.

    plain_words.py           counts the project's folders, and fails above a ceiling
    plain_words.py PATH...   shows each line with such a turn
    plain_words.py --test    tests the counting itself

A high count marks a text to rewrite; a low count proves nothing. The turns are allowed, but not many of them.
"""

import pathlib
import re
import sys

# Each folder's ceiling, and that of its worst file with at least 60 words of comments.
CEILINGS = {"include": (1, 6), "examples": (3, None), "tools": (3, None), "python": (3, None), "cmake": (3, None), "benchmarks": (3, None),
            "bootstrap.sh": (3, None), "README.md": (3, None), "CONTRIBUTING.md": (3, None), "CHANGELOG.md": (3, None), "SECURITY.md": (3, None), "docs": (3, None), "tests": (3, None)}
ENOUGH = 60

TURNS = re.compile(r"\b(?:" + "|".join([
    "who(?:so)?ever", "what(?:so)?ever", "whichever", "wherever", "nobody", "somebody", "no one",
    "go(?:es)? on", "going on from", "went on", "gone through", "goes through its (?:batches|epochs)",
    "in hand", "at hand", "in the hands", "tells?", "told", "hears?", "heard", "speaks?", "asks? for it", "knows? of",
    "so often", "so many", "as many as there", "becomes? of", "what becomes", "as it were", "be it", "be they",
    "besides?", "apart from that", "anew", "at once", "meanwhile", "by itself", "of (?:its|their|one's|the user's) own",
    "(?:at|from) the begin", "those (?:that|which|who|of)", "that of (?:the|an?|its|each)",
    "what (?:is|are|was|were|has|have|had|it|they|stands|goes|comes|remains|lies|holds|fits)",
    "where (?:it|they|there|this|that|somebody|nobody) (?:is|are|has|have|had|was|were|do|does|can)",
    "takes? fright", "gives? away", "is (?:there|left) (?:already|alone)", "the ones? (?:that|which)",
    "with all that", "all that (?:is|are|its|has|it)"]) + r")\b|, say(?=[,.)])", re.IGNORECASE)


def prose(name, text):
    """The lines of a file, reduced to comments and docstrings; a page without its code; the names of test cases."""
    is_page = name.endswith(".md")
    if is_page:
        text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    if is_page:
        return text.splitlines()
    mark = r"#+" if name.endswith((".py", ".cmake", ".sh", "CMakeLists.txt")) else r"//[/!]?<?"
    text = re.sub(r'^(?:TEMPLATE_)?TEST_CASE\((\s*)"', r'\1TEST_CASE("', text, flags=re.MULTILINE)
    docstring, lines = False, []
    for line in text.splitlines():
        quotes = line.count('"""') if name.endswith(".py") else 0
        if docstring or quotes:
            lines.append(line.replace('"""', ""))
            docstring ^= quotes % 2 == 1
            continue
        comment = re.search(rf"(?:^|\s){mark}\s?(.*)", line)
        case = re.match(r'\s*TEST_CASE\("([^"]*)"', line)
        words = comment[1] if comment else case[1] if case else ""
        is_code = words.startswith("    ") or "SPDX" in words or words.startswith("namespace")
        lines.append("" if is_code else words)
    return lines


def count(lines):
    """The numbers of turns and of words."""
    text = " ".join(" ".join(lines).split())  # a turn may go over the end of a line
    return len(TURNS.findall(text)), len(re.findall(r"[A-Za-z']+", text))


def files_of(path):
    kinds = re.compile(r"\.(hpp|ipp|inl|cuh?|h|cpp|py|cmake|sh|md)$|CMakeLists\.txt$")
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [one for one in found if one.is_file() and kinds.search(one.name) and one.name != "plain_words.py"]


def check(project):
    failed = False
    for folder, (ceiling, of_file) in CEILINGS.items():
        counts = {path: count(prose(path.name, path.read_text())) for path in files_of(project / folder)}
        turns, words = (sum(numbers) for numbers in zip(*counts.values()))
        if words < 100:
            sys.exit(f"{project / folder} must have comments, and has {words} words of them")
        rate = 1000 * turns / words
        worst = max(counts, key=lambda path: counts[path][0] / counts[path][1] if counts[path][1] >= ENOUGH else 0)
        of_worst = 1000 * counts[worst][0] / max(counts[worst][1], 1)
        above = rate > ceiling or (of_file is not None and of_worst > of_file)
        failed |= above
        print(f"{folder}: {rate:.1f} turns per 1,000 words (at most {ceiling}), most in {worst.relative_to(project)}: {of_worst:.1f}"
              f"{'' if of_file is None else f' (at most {of_file})'}{', too many' if above else ''}")
    sys.exit(failed)


def show(paths):
    for path in (file for given in paths for file in files_of(pathlib.Path(given))):
        for number, line in enumerate(prose(path.name, path.read_text()), 1):
            if TURNS.search(line):
                print(f"{path}:{number}: {TURNS.sub(lambda turn: f'[{turn[0]}]', line.strip())}")


def test():
    code = 'int nobody;  // Nobody is told.\n//     whatever(sample);\nTEST_CASE("Window: what is left, say") {\n/// Plain `anew`.\n'
    assert prose("a.hpp", code) == ["Nobody is told.", "", "Window: what is left, say", "Plain code."], prose("a.hpp", code)
    assert count(prose("a.hpp", code)) == (3, 10), count(prose("a.hpp", code))
    assert count(["a number, say, of all that is", "goes on", "he said, says"]) == (3, 12)
    script = '"""Whoever reads\nthis at once."""\nmost = 3  # of those that\n'
    assert count(prose("a.py", script)) == (3, 8), count(prose("a.py", script))
    assert count(prose("a.md", "Beside it.\n```\nwhatever\n```\nOver.")) == (1, 3)


if __name__ == "__main__":
    if sys.argv[1:] == ["--test"]:
        test()
    elif sys.argv[1:]:
        show(sys.argv[1:])
    else:
        check(pathlib.Path(__file__).resolve().parents[2])
