#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/options.md: the options of every class in the order in which designated initialisers want them.

    options.py            writes the page
    options.py --check    fails if it is not what the headers say
"""

import pathlib
import re
import sys

import headers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/options.md"
HEAD = """# Options

All option structs. Members are listed in declaration order, which designated initializers must follow:
`ga::SaveState{.keep_best = 1, .every_updates = 10}` is an error, since `every_updates` comes first. The third column is the default.
`docs/site/options.py` generates this page from the headers, which say more.
"""
# A policy's options end before its first pointer, and every struct's before the first field whose comment says this.
NO_OPTION = "not an option"
POINTER = re.compile(r"^(const )?[\w:]+\* |_ptr<")


def is_options(header, record):
    of_policy = header.startswith("gradaccum/policies/") and re.match(r"(template <[^{]*> )?struct\b", record.text)
    of_metric = header == "gradaccum/metrics.hpp" and any(member.name == "higher_is_better" or member.name == "ignore_index"
                                                          for member in record.members)
    is_set_by_calls = header.startswith("gradaccum/optim/")
    return record.kind == "record" and not is_set_by_calls and (record.name.endswith("Options") or of_policy or of_metric)


def options(record):
    """Yields name, default, type and comment of each option."""
    for member in record.members:
        comment = " ".join(line.strip() for line in member.doc).strip()
        if member.kind != "field" or member.access != "public" or member.text.startswith("static"):
            continue
        if NO_OPTION in comment:
            return
        declared = re.fullmatch(r"(?:mutable )?(.+?)\s*\b(\w+)(?:\s*=\s*(.+?)|\{(.*)\})?;?", member.text)
        kind, name, default = declared[1], declared[2], declared[3] or declared[4]
        if not record.name.endswith("Options") and POINTER.search(kind + " "):
            return
        yield name, default, kind.replace("detail::Count", "std::int64_t"), comment


def row(name, default, kind, comment):
    given = "none" if default in (None, "{}") else f"`{default}`"
    return f"| `.{name}` | `{kind}` | {given} | {comment} |".replace("||", "\\|\\|")


def title(record, names):
    """Returns a class's name, or the names of a template's aliases."""
    aliases = [name.full for name in names if name.kind == "alias" and f"{record.name}<" in name.text]
    return ", ".join(aliases) or record.full


def page(found):
    tables = {}
    for header, names in found.items():
        for record in names:
            rows = [row(*option) for option in options(record)] if is_options(header, record) else []
            if rows:
                tables[title(record, names)] = [f"`#include <{header}>`", "", "| option | type | if not given | |", "|---|---|---|---|", *rows]
    return HEAD + "".join("\n".join(["", f"## {name}", "", *table, ""]) for name, table in sorted(tables.items()))


def main(arguments):
    made = page(headers.read(ROOT / "include"))
    if arguments == ["--check"]:
        if PAGE.read_text() != made:
            sys.exit("docs/options.md is not what the headers say: run docs/site/options.py")
    elif not arguments:
        PAGE.write_text(made)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
