#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests docs/site: how it reads headers, and that all kinds of outdated content are errors that name the file."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/site"))
sys.dont_write_bytecode = True

import figures  # noqa: E402
import headers  # noqa: E402
import reference  # noqa: E402

HEADER = """// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <gradaccum/gradients.hpp>
#define MACRO(name) \\
  struct name {};
namespace torch { class Forward; }
namespace gradaccum {
class Later;
namespace detail { struct Hidden {}; }
/// Runs. Twice.
///
///     for (int i = 0; i < 2; ++i) {
///       run(i);
///     }
///
/// - a point
///   that goes on
///
/// @note Waits for
/// nobody.
template <class T, class U = std::vector<T>>
class Runner : public detail::Base<T>, public Other {
  static_assert(true, "Runner: never; {");
  int first_ = 1;
 public:
  /// Begins.
  explicit Runner(T& t, std::function<void(int)> f = [](int) {}) : t_(t), f_{f}, g_(1) { run(); }
  bool operator==(const Runner&) const { return true; }
  double operator()(int i) const;
  double operator()(double d) const;  ///< the same
  std::map<int, std::string> names = {{1, "a;b"}};  ///< by number,
                                                    ///< from 1
  int a = 0, b = 0;  ///< both
  static constexpr bool has = requires(T t) { t.go(); };
  template <class V>
  requires requires(V v) {
    { v.x() } -> std::same_as<int>;
  }
  void take(V&& v) { v.x(); }
 protected:
  void hidden();
 private:
  struct Part { int x; };
  T& t_;
};
template <class T> Runner(T&) -> Runner<T>;
/// Two.
enum class Kind {
  one,  ///< the first
  two,
};
/// Sums.
[[nodiscard]] inline double sum(const std::vector<double>& all, char separator = ';') { return all.size() > 1 ? 1'000 : 0; }
inline double sum(int one) { return one; }
/// What runs.
template <class T>
concept runs = requires(T t) {
  { t.run() } -> std::same_as<void>;
};
/// Numbers.
using Numbers = std::vector<double>;
/// Bytes.
inline constexpr std::int64_t KiB = 1024;
struct SumOptions {
  bool fast = true;
  bool slow = false;  ///< not
};
namespace inner {
void undocumented();
}
}  // namespace gradaccum
"""


def copied(folder):
    """Copies all inputs of the pages."""
    for path in ("docs", "include", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "packaging/README.md",
                 "tests/support/layering.cmake",
                 *(path.relative_to(ROOT) for files in ("examples/*/README.md", "examples/*/*/README.md", "examples/*/*.cpp")
                   for path in ROOT.glob(files))):
        there = folder / path
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / path, there) if (ROOT / path).is_dir() else shutil.copy(ROOT / path, there)
    return folder


class Headers(unittest.TestCase):
    def setUp(self):
        names = headers.inherit(headers.Reader("gradaccum/runner.hpp", HEADER).scope(""))
        self.names = {name.name: name for name in names if name.space.startswith("gradaccum") and "detail" not in name.space}
        self.sums = [name for name in names if name.name == "sum"]

    def test_finds_every_public_name(self):
        self.assertEqual(list(self.names), ["Runner", "Kind", "sum", "runs", "Numbers", "KiB", "SumOptions", "undocumented"])
        self.assertEqual([self.names[name].kind for name in ("Runner", "Kind", "sum", "runs", "Numbers", "KiB")],
                         ["record", "enum", "function", "concept", "alias", "field"])
        self.assertEqual(self.names["undocumented"].full, "ga::inner::undocumented")
        self.assertEqual([sum.shared for sum in self.sums], [False, True])

    def test_reads_members(self):
        members = [member for member in self.names["Runner"].members if member.access == "public"]
        self.assertEqual([member.name for member in members],
                         ["Runner", "operator==", "operator()", "operator()", "names", "a", "has", "take"])
        self.assertEqual(members[0].text, "explicit Runner(T& t, std::function<void(int)> f = [](int) {})")
        self.assertEqual(members[0].doc, ["Begins."])
        self.assertEqual(members[4].doc, ["by number,", "from 1"])
        self.assertEqual(reference.field_parts(members[5]), (["a", "b"], "int", "0, b = 0"))
        self.assertEqual(reference.field_parts(members[4])[1:], ("std::map<int, std::string>", '{{1, "a;b"}}'))
        self.assertEqual([member.doc for member in self.names["Kind"].members], [["the first"], []])

    def test_shows_code_lists_and_notes(self):
        runner = self.names["Runner"]
        text = reference.markdown(runner.doc)
        self.assertIn("```cpp\nfor (int i = 0; i < 2; ++i) {\n  run(i);\n}\n```", text)
        self.assertIn("- a point\n  that goes on", text)
        self.assertIn('!!! note "Waits and memory"\n\n    Waits for\n    nobody.', text)
        self.assertEqual(reference.declaration(runner), "template <class T, class U = std::vector<T>>\nclass Runner : public Other;")
        self.assertNotIn("hidden", reference.members(runner))

    def test_wraps_declarations(self):
        count = ("template <std::convertible_to<std::int64_t> Number> requires(!std::floating_point<Number> && !std::same_as<Number, bool>) "
                 "constexpr Count( Number value);")
        self.assertEqual(reference.wrapped(count), "template <std::convertible_to<std::int64_t> Number>\n"
                         "requires(!std::floating_point<Number> && !std::same_as<Number, bool>)\nconstexpr Count(Number value);")
        self.assertEqual(reference.wrapped("bool operator<(const A<B, C>& a, int b) const;"), "bool operator<(const A<B, C>& a, int b) const;")
        self.assertEqual(reference.wrapped("void f(std::function<void(int, int)> g, std::map<int, int> names, int x);", 60),
                         "void f(std::function<void(int, int)> g,\n    std::map<int, int> names, int x);")

    def test_names_what_is_undocumented(self):
        said = list(headers.undocumented({"": list(self.names.values())}))
        self.assertEqual([line.split(": ")[1] for line in said],
                         ["ga::Kind::two has no documentation comment", "ga::SumOptions has no documentation comment",
                          "ga::SumOptions::fast has no documentation comment",
                          "ga::inner::undocumented has no documentation comment"])

    def test_finds_errors(self):
        found = headers.errors(ROOT / "include")
        self.assertGreater(sum(map(len, found.values())), 250)
        self.assertIn("steps must be >= 1, got …", found["Accumulate"])


class Figures(unittest.TestCase):
    def test_draws_contests(self):
        lines = ['{"run": {"date": "2026-01-02", "processor": "P", "cores": 2}}',
                 '{"benchmark": "B", "contestant": "ours", "bound": false, "median_s": 0.002, "time_over_ours": 1, "machine": "m"}',
                 '{"benchmark": "B", "contestant": "<peer>", "bound": false, "median_s": 0.004, "time_over_ours": 2, "machine": "m"}',
                 '{"benchmark": "B", "contestant": "limit", "bound": true, "median_s": 0.001, "time_over_ours": 0.5, "machine": "m"}']
        ((run, contests),) = figures.measured(lines)
        text = figures.contest("B", "m", contests["B", "m"], run)
        for part in ("P · 2 cores · m · 2026-01-02", "width:50.0%", "2.00 x the first one", "&lt;peer&gt;", "ours reaches 50 % of it"):
            self.assertIn(part, text)

    def test_refuses_results_of_nowhere(self):
        for lines in (['{"benchmark": "B", "contestant": "ours", "median_s": 1}'], ["{"]):
            self.assertRaises(SystemExit, figures.measured, lines)
        self.assertRaises(SystemExit, figures.table_rows, "## A\n\n| |\n|---|\n| 1 |\n", "B", 0)


class Pages(unittest.TestCase):
    """The unchanged repository passes; each change in one file fails."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        copied(self.folder)

    def run_pages(self):
        return subprocess.run([sys.executable, "-B", self.folder / "docs/site/pages.py", self.folder / "out"], capture_output=True, text=True)

    def change(self, path, old, new):
        text = (self.folder / path).read_text()
        self.assertIn(old, text)
        (self.folder / path).write_text(text.replace(old, new, 1))

    def fails(self, *words):
        result = self.run_pages()
        self.assertNotEqual(result.returncode, 0, result.stdout)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_pages(self):
        result = self.run_pages()
        self.assertEqual(result.returncode, 0, result.stderr)
        pages = self.folder / "out/pages"
        page = (pages / "reference/grad_accumulator.md").read_text()
        headings = [line for line in page.splitlines() if line.startswith("## ")]
        self.assertEqual(headings, [f"## {name} {{#{name.removeprefix('optim::')}}}" for name in
                                    ("GradAccumulator", "Accumulator", "GradAccumulatorOptions", "optim::ParamGroupRef",
                                     "optim::NamedOptimizer", "model", "Count")])
        self.assertIn("### `step` {#Accumulator.step}", page)
        self.assertNotRegex(page, "NamedWindow|others_continue")
        self.assertNotRegex((pages / "reference/policies/report.md").read_text(), "attach|on_validation")
        self.assertEqual([path for path in pages.glob("reference/**/*.md") if "not an option" in path.read_text()], [])
        self.assertIn("(reference/policies/accumulate.md#Accumulate)", (pages / "trainer.md").read_text())
        self.assertIn('<a href="reference/index.html#window">', (pages / "architecture.md").read_text())
        self.assertNotIn("](docs/", (pages / "index.md").read_text())

    def test_a_dead_link(self):
        self.change("docs/machine.md", "\n\n", "\n\n[nowhere](no_such_page.md)\n\n")
        self.fails("docs/machine.md: the link no_such_page.md leads nowhere")

    def test_an_internal_name_that_is_gone(self):
        self.change("docs/site/reference.py", '"NamedWindow"', '"NamedWindows"')
        self.fails("INTERNAL names Accumulator::NamedWindows, which no header has")

    def test_a_guide_that_nobody_lists(self):
        (self.folder / "docs/secret.md").write_text("# Secret\n")
        self.fails("docs/README.md does not list docs/secret.md")

    def test_a_name_without_documentation(self):
        self.change("include/gradaccum/metrics.hpp", "enum class", "void quiet();\nenum class")
        self.fails("include/gradaccum/metrics.hpp", "has no documentation comment")

    def test_an_option_without_documentation(self):
        self.change("include/gradaccum/training_state.hpp", "struct LoadOptions {", "struct LoadOptions {\n  bool extra = false;")
        self.fails("ga::LoadOptions::extra has no documentation comment")

    def test_a_header_in_no_room(self):
        (self.folder / "include/gradaccum/homeless.hpp").write_text("namespace gradaccum {\n/// A.\nstruct A {};\n}\n")
        self.fails("gradaccum/homeless.hpp is in no module")


if __name__ == "__main__":
    unittest.main()
