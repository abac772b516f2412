# SPDX-License-Identifier: Apache-2.0
"""Draws bar charts in HTML from results of the benchmarks and from tables of the guides, readable on a phone."""

import html
import json
import re

# Tables of guides that are drawn: the page, the heading, the table's index below it, a title, the columns of labels and
# of numbers, their unit, further columns shown after the number, and the machine and command that measured them.
TABLES = [
    ("costs.md", "What it costs, and what it gains", 0, "AdamW for 27 M parameters: times of others, ours is 1", "AdamW", "27 M", "x ours",
     [], "two cores with AVX-512, ./bootstrap.sh bench (adamw_step, amp_tail)"),
    ("costs.md", "What it costs, and what it gains", 0, "AdamW for 67 M parameters: times of others, ours is 1", "AdamW", "67 M", "x ours",
     [], "two cores with AVX-512, ./bootstrap.sh bench (adamw_step, amp_tail)"),
    ("costs.md", "What it costs, and what it gains", 3, "An epoch of FashionMNIST", "", "seconds", "s",
     ["of ours"], "two cores with AVX-512, a process each, ./bootstrap.sh bench (compare_processes.py)"),
    ("memory.md", "Training in less memory", 0, "Peak memory of a transformer of 26.9 M parameters", "use", "peak MiB", "MiB",
     ["less memory", "time"], "two cores with AVX-512, ./bootstrap.sh bench (memory_techniques --model small)"),
    ("memory.md", "All together", 0, "Peak memory of a transformer of 99.2 M parameters", "", "peak MiB", "MiB",
     ["less memory", "time"], "two cores with AVX-512, memory_techniques --model large --steps 0 --keep-memory"),
]


def bars(title, rows, caption, kind):
    """Draws `rows`: label, number, its text, a note, and the class ours, peer or bound."""
    most = max(number for _, number, _, _, _ in rows)
    lines = [f'<figure class="bars" data-kind="{kind}">', f"<figcaption>{html.escape(title)}</figcaption>"]
    for label, number, text, beside, who in rows:
        lines.append(
            f'<div class="bar {who}"><span class="label">{html.escape(label)}</span>'
            f'<span class="track"><span class="fill" style="width:{100 * number / most:.1f}%"></span></span>'
            f'<span class="number">{html.escape(text)}</span><span class="beside">{html.escape(beside)}</span></div>'
        )
    lines += [f'<p class="source">{html.escape(caption)}</p>', "</figure>", ""]
    return "\n".join(lines)


def seconds_text(seconds):
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def measured(lines):
    """Returns the runs of `./bootstrap.sh bench --json`: the line that describes a run, and the benchmarks after it."""
    runs = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SystemExit(f"docs/figures/bench.jsonl:{number}: {error}")
        if "run" in row:
            runs.append((row["run"], {}))
        elif not runs:
            raise SystemExit('docs/figures/bench.jsonl must begin with {"run": {"date": …, "processor": …}}, as bench --json writes')
        else:
            title = row.get("benchmark")
            if title and ("median_s" in row or "step_s" in row):
                runs[-1][1].setdefault((title, row.get("machine", "")), []).append(row)
    return runs


def contest(title, machine, rows, run):
    """Draws the times of one benchmark: ours is the first; a bound is a lower limit of the time."""
    drawn = []
    for place, row in enumerate(rows):
        time = row.get("median_s", row.get("step_s"))
        ratio = row.get("time_over_ours", row.get("time_over_plain"))
        if row.get("bound"):
            beside = f"a bound: ours reaches {100 * ratio:.0f} % of it" if ratio else "a bound"
        else:
            beside = "" if place == 0 or not ratio else f"{ratio:.2f} x the first one's time"
        if "peak_bytes" in row:
            beside = ", ".join(filter(None, [beside, f"{row['peak_bytes'] / 2**20:.0f} MiB"]))
        who = "bound" if row.get("bound") else "ours" if place == 0 else "peer"
        drawn.append((row.get("contestant", row.get("technique", "")), time, seconds_text(time), beside, who))
    cores = f"{run['cores']} cores" if "cores" in run else ""
    caption = " · ".join(filter(None, [run.get("processor", ""), cores, machine, run.get("date", "")]))
    return bars(title, drawn, caption, "bench")


def table_rows(text, heading, place):
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", section[1] if section else "", re.MULTILINE)
    if place >= len(tables):
        raise SystemExit(f"no table {place} is under '{heading}': docs/site/figures.py draws it")
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in tables[place].splitlines()]
    return [dict(zip(rows[0], row)) for row in rows[2:]]


def who_is(label, before):
    """Returns whether a row is ours or a peer's; "the same in bfloat16" belongs to the row before it."""
    if label.startswith("the same"):
        return before
    return "peer" if re.match(r"LibTorch|Python|plain loop|step, against|unscale|…", label) else "ours"


def stated(text, heading, place, title, names, column, unit, beside, caption):
    drawn, who = [("ga::optim::AdamW", 1.0, "1", "", "ours")] if unit == "x ours" else [], "ours"
    for row in table_rows(text, heading, place):
        label, value = row[names].replace("`", ""), row[column]
        if value.endswith("%") and unit == "x ours":  # a lower limit of the time, in percent of ours
            drawn.append((label, float(value.split()[0]) / 100, f"{value}", "a bound", "bound"))
            continue
        who = who_is(label, who)
        words = ", ".join(f"{row[name].removesuffix(' x')} x {({'time': 'the time', 'of ours': 'ours'}).get(name, name)}" for name in beside)
        drawn.append((label, float(value), f"{value} {unit}", words if len(drawn) else "", who))
    return bars(title, drawn, caption, "table")


def page(docs):
    lines = [
        "# Figures", "",
        "What ours and others take for the same work, in one process or in turn, on the machine that stands below each picture. Shorter is "
        "better. Ours are filled, peers are grey, and a bound is a time that no implementation can beat, such as a pass over "
        "the same memory by ATen's simplest operations.", "",
    ]
    results = docs / "figures" / "bench.jsonl"
    if results.exists():
        for run, contests in measured(results.read_text().splitlines()):
            lines += [f"## {run.get('date', 'A run')}, {run.get('processor', '')}", "",
                      f"`{run.get('command', './bootstrap.sh bench --json docs/figures/bench.jsonl')}`", ""]
            if "without" in run:
                lines += [f"Without {run['without']}.", ""]
            lines += [contest(title, machine, rows, run) for (title, machine), rows in contests.items()]
    else:
        lines += ["No run of all benchmarks is kept in `docs/figures/bench.jsonl` yet. `./bootstrap.sh bench --json docs/figures/bench.jsonl` "
                  "makes one, which is then drawn here.", ""]
    lines += ["## From the guides", "", "The tables of [what it costs](costs.md) and [memory](memory.md#all-together) as pictures. Unless "
              "noted there, they are from two cores with AVX-512. The title of a run above names its processor; ratios differ between "
              "processors.", ""]
    lines += [stated((docs / name).read_text(), *rest) for name, *rest in TABLES]
    return "\n".join(lines)
