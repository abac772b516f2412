# SPDX-License-Identifier: Apache-2.0
"""Writes csv_values.hpp: what Python's csv module makes of rows (writer) and of hard texts (reader, strict)."""
import csv
import io
import pathlib
import random

PIECES = ["a", "long word", " ", ",", '"', '""', "\n", "\r\n", "\r", "é", "\ufeff", "<br />"]
LABEL_FIRST = "label,id,text"


def written(rows, head, **dialect):
    """Returns the file that Python writes."""
    file = io.StringIO(newline="")
    file.write(head + dialect["lineterminator"])
    writer = csv.writer(file, **dialect)
    writer.writerows([label, i, text] if head == LABEL_FIRST else [text, label] for i, (text, label) in enumerate(rows))
    return file.getvalue()


def read(text):
    """Returns the rows that Python reads, without empty lines; None for an error."""
    try:
        return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error:
        return None


def make_rows(generator):
    """Makes texts that are not blank, with labels."""
    return [("".join(generator.choices(PIECES, k=generator.randint(0, 8))) + "x", generator.randint(0, 3))
            for _ in range(40)]


def quoted(text):
    """Returns a C++ literal: special bytes in octal with three digits, so that no digit after them joins."""
    plain = [chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode()]
    return '"' + "".join(plain) + '"'


def row_list(rows):
    """Returns rows as a C++ initializer."""
    return "Rows{" + ", ".join("Row{" + ", ".join(map(quoted, row)) + "}" for row in rows) + "}"


def main():
    generator = random.Random(1)
    rows = make_rows(generator)
    files = {
        "written_as_ours": written(rows, "text,label", quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n"),
        "written_minimal": written(rows, "text,label", quoting=csv.QUOTE_MINIMAL, lineterminator="\r\n"),
        "written_all_lf": written(rows, "text,label", quoting=csv.QUOTE_ALL, lineterminator="\n"),
        "written_label_first": written(rows, LABEL_FIRST, quoting=csv.QUOTE_MINIMAL, lineterminator="\r\n"),
    }
    hard = ["".join(generator.choices(['"', ",", "a", "\n", "\r\n", "\r", "bc", " "], [6, 4, 4, 2, 2, 1, 2, 1],
                                      k=generator.randint(1, 10))) for _ in range(400)]
    hard = sorted(set(hard), key=hard.index)
    lines = ["// SPDX-License-Identifier: Apache-2.0", "#pragma once", "",
             "// Written by csv_values.py. Do not edit.", "",
             "#include <optional>", "#include <string>", "#include <utility>", "#include <vector>", "",
             "namespace csv_values {", "",
             "// clang-format off",
             "inline const std::vector<std::pair<std::string, int>> rows = {"]
    lines += [f"    {{{quoted(text)}, {label}}}," for text, label in rows] + ["};"]
    for name, text in files.items():
        lines += ["", f"inline const std::string {name} ="]
        lines += ["    " + quoted(line) for line in text.splitlines(keepends=True)]
        lines[-1] += ";"
    lines += ["", "using Row = std::vector<std::string>;", "using Rows = std::vector<Row>;", "", "/// A text, and its rows as Python reads them, if it does.",
              "struct Hard {", "  std::string text;",
              "  std::optional<Rows> rows;", "};", "",
              "inline const std::vector<Hard> hard = {"]
    for text in hard:
        rows = read(text)
        value = "std::nullopt" if rows is None else row_list(rows)
        lines.append(f"    {{{quoted(text)}, {value}}},")
    lines += ["};", "// clang-format on", "", "}  // namespace csv_values", ""]
    pathlib.Path(__file__).with_suffix(".hpp").write_text("\n".join(lines))


main()
