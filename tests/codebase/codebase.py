#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts figures that show whether the library stays small and readable. Prints them, and fails above a ceiling.

    codebase.py              counts the library, and test files outside of folders
    codebase.py --test       tests the counting

Lines and files have no ceiling. Other ceilings only decrease: a change that lowers a figure lowers its ceiling here.
"""

import pathlib
import re
import sys

CEILINGS = {
    "comments that open with a fragment, in %": 1.0,
    "lines with detail:: in public signatures": 0,
    "macros that gradaccum.hpp leaves behind, but the version's": 0,
    "circles of includes": 0,
    "files of tests that lie loose": 0,
}

# A comment that begins with such a word is a fragment of a sentence.
FRAGMENT = re.compile(r"(of|the same|those|whose|what|where|whether|who)\b", re.IGNORECASE)
COMMENT = re.compile(r"\s*//[/!]?(?!/)<?\s?(.*)")


def comment_blocks(text):
    """Returns the first line of each comment on a separate line, and of each `///<` after code."""
    blocks, inside = [], False
    for line in text.splitlines():
        match = COMMENT.match(line)
        if match and not match[1].startswith("SPDX"):
            if not inside:
                blocks.append(match[1])
            inside = True
        else:
            inside = False
            if "///<" in line:
                blocks.append(line.split("///<", 1)[1].strip())
    return [block for block in blocks if block]


def fragments(blocks):
    return [block for block in blocks if FRAGMENT.match(block)]


def lines_with_detail(text):
    """Returns the lines in a public header's public part whose declaration names detail::. Bodies do not count, nor do
    member initializers of constructors."""
    found, public = [], True
    for line in text.splitlines():
        code = line.split("//", 1)[0]
        if re.match(r"namespace gradaccum::detail\b|class \w[^;]*$", code):
            public = False
        elif re.match(r"}|struct \w|  public:| public:", code):
            public = True
        elif re.match(r" (private|protected):", code):
            public = False
        signature = re.split(r" \{|(?<=\)) : ", code, maxsplit=1)[0]
        declares = re.match(r"(template|class|struct|using)\b|  (?!return|static_assert)\w", signature) and "friend " not in signature
        if (public or re.match(r"(class|struct)\b", signature)) and declares and "detail::" in signature.replace("namespace gradaccum::detail", ""):
            found.append(line)
    return found


def macros_left(texts):
    """Returns the library's macros that are defined and not undefined in the same file."""
    left = set()
    for path, text in texts.items():
        if path.endswith((".hpp", ".ipp")) and not re.search(r"/(begin\.ipp|on_device\.hpp)$", path):
            # These two files are included for their macros, which the including file undefines.
            defined = set(re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M))
            left |= defined - set(re.findall(r"^\s*#\s*undef\s+(\w+)", text, re.M))
            for file, macro in (("begin.ipp", "GRADACCUM_INLINE"), ("on_device.hpp", "GRADACCUM_ON_DEVICE")):
                if re.search(rf"#include <[^>]*/{file}>", text) and f"#undef {macro}" not in text:
                    left.add(f"{macro} of {path}")
    return {name for name in left if not name.startswith("GRADACCUM_VERSION_")}


def included_too_early(texts, header):
    """Finds circles of includes in a header-only program that includes `header` first. Returns pairs of a file and an
    include that its code needs, which `#pragma once` skips because it is still being read."""
    found, begun, seen = [], [], set()

    def visit(path):
        lines = texts[path].splitlines()
        seen.add(path)
        begun.append(path)
        last[path] = max((number for number, line in enumerate(lines) if line and not line.startswith(("#", "//"))), default=0)
        for number, line in enumerate(lines):
            match = re.match(r"#\s*include <([^>]+)>", line)
            if match and match[1] in texts:
                at[path] = number
                if match[1] not in seen:
                    visit(match[1])
                elif match[1] in begun and number < last[path] and at[match[1]] < last[match[1]]:
                    found.append((path, match[1]))
        begun.pop()

    at, last = {}, {}
    visit(header)
    return found


def figures(project):
    include = project / "include"
    paths = [path for path in include.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(include)): path.read_text() for path in paths}
    library = {path: text for path, text in texts.items() if path.startswith("gradaccum/")}
    headers = {path: text for path, text in library.items() if not path.endswith((".cu", ".inl", "begin.ipp"))}
    first = [path for path in headers if re.match(r"gradaccum/(?!detail|impl)", path) and not path.endswith("/compiled.hpp")]
    first.append("gradaccum/detail/compilation/step_description.hpp")  # gradaccum_compile_step's code includes it
    early = {pair for path in first for pair in included_too_early(headers, path)}
    for pair in sorted(early):
        print("{} includes {}, which is still being read if a program includes some header first".format(*pair))
    blocks = [block for text in library.values() for block in comment_blocks(text)]
    public = [text for path, text in library.items()
              if path.endswith(".hpp") and not re.match(r"gradaccum/(detail|impl)/", path)]
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "files": len(texts),
        "comments that open with a fragment, in %": round(100 * len(fragments(blocks)) / max(1, len(blocks)), 1),
        "lines with detail:: in public signatures": sum(len(lines_with_detail(text)) for text in public),
        "macros that gradaccum.hpp leaves behind, but the version's": len(macros_left(library)),
        "circles of includes": len(early),
        "files of tests that lie loose": len(list((project / "tests").glob("*.test.cpp"))),
    }


def check(project):
    found = figures(project)
    failed = False
    for name, figure in found.items():
        ceiling = CEILINGS.get(name)
        above = ceiling is not None and figure > ceiling
        failed |= above
        print(f"{name}: {figure}{'' if ceiling is None else f' (at most {ceiling})'}{', too many' if above else ''}")
    if found["lines"] < 1000:
        sys.exit(f"{project}/include must have the library's headers, and has {found['lines']} lines")
    sys.exit(failed)


def test():
    text = """// SPDX-License-Identifier: Apache-2.0
#include <x>  // why

/// Of a window.
/// The rest is no beginning.
struct Loss {
  int a;  ///< What it is.
  // Counts micro-batches.
  detail::Window b;
  Loss(int a) : a(detail::of(a)) {}
  Loss(detail::Window of) : b(of) {}
  int one() { return detail::one(); }
  int two() {
    return detail::two();
  }

 private:
  detail::Window hidden_;
};
namespace gradaccum::detail {
detail::Window c;
}  // namespace gradaccum::detail
// Offers nothing.
"""
    blocks = comment_blocks(text)
    assert blocks == ["Of a window.", "What it is.", "Counts micro-batches.", "Offers nothing."], blocks
    assert fragments(blocks) == ["Of a window.", "What it is."]
    assert fragments(["of a window", "Offers", "The sample", "who else"]) == ["of a window", "who else"]
    assert lines_with_detail(text) == ["  detail::Window b;", "  Loss(detail::Window of) : b(of) {}"]
    leaves = {"gradaccum/a.hpp": "#define A\n#define B 1\n#undef A\n#define GRADACCUM_VERSION_MAJOR 0\n",
              "gradaccum/b.ipp": "#include <gradaccum/impl/begin.ipp>\n"}
    assert macros_left(leaves) == {"B", "GRADACCUM_INLINE of gradaccum/b.ipp"}, macros_left(leaves)
    circle = {"a.hpp": "#include <b.hpp>\nint a();\n#include <a.ipp>\n", "a.ipp": "#include <a.hpp>\nint b() { return a(); }\n",
              "b.hpp": "#include <c.hpp>\nint b();\n", "c.hpp": "#include <b.hpp>\nint c();\n"}
    assert included_too_early(circle, "a.hpp") == [("c.hpp", "b.hpp")], included_too_early(circle, "a.hpp")
    assert included_too_early({**circle, "c.hpp": "int c();\n"}, "a.hpp") == []
    leaves["gradaccum/b.ipp"] += "#undef GRADACCUM_INLINE\n"
    assert macros_left(leaves) == {"B"}


if __name__ == "__main__":
    if sys.argv[1:] == ["--test"]:
        test()
    elif not sys.argv[1:]:
        check(pathlib.Path(__file__).resolve().parents[2])
    else:
        sys.exit(__doc__)
