// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/machine/findings.hpp>
#include <gradaccum/detail/machine/screen.hpp>
#include <gradaccum/machine_report.hpp>

#include <algorithm>
#include <sstream>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::size_t width(const std::string& text) {
  const auto lines = lines_of(text);
  return std::ranges::max_element(lines, {}, &std::string::size)->size();
}

/// All that can be lost, in long words.
ga::MachineReport worst_report(double loss) {
  inner::MachineFacts facts;
  facts.processor = "AMD Ryzen Threadripper PRO 7995WX s 96-Cores";
  facts.instructions = "AVX512";
  facts.libtorch = "2.15.0+cpu.cxx11.abi";
  facts.memory_bytes = std::int64_t{1} << 42;
  facts.cpus = 1024;
  facts.allowed_cpus = 512;
  facts.cpu_limit = 100.125;
  facts.threads = 1000;
  facts.has_mkl = facts.has_glibc = facts.flash_attention = true;
  facts.mkl_trusts_it = facts.bfloat16_fast = false;
  facts.huge_pages = inner::HugePages::on_request;
  facts.openmp_runtimes = {"/a/libgomp-0123456789abcdef.so.1.0.0", "/b/libgomp.so.1.0.0", "/c/libiomp5.so"};
  const inner::Comparison lost{1e-3 * loss, 1e-3};
  return {inner::described(facts), inner::findings_of(facts, {lost, lost, lost, lost, lost, lost, lost})};
}

}  // namespace

TEST_CASE("MachineReport: prints what is well, what is lost and how to mend it") {
  ga::MachineReport report{"a machine", {{"one thing", "as it should be"}}};
  CHECK(report.ok());
  CHECK(to_string(report) == "a machine\n\nok                one thing: as it should be\n");
  report.findings.push_back({"another", "not so", 2.34, "line(); of code"});
  report.findings.push_back({"a third", "not measured", 1, "another(); line"});
  CHECK_FALSE(report.ok());
  std::ostringstream stream;
  stream << report;
  CHECK(stream.str() == R"(a machine

ok                one thing: as it should be
2.3 times slower  another: not so
                    line(); of code
to mend           a third: not measured
                    another(); line
)");
}

TEST_CASE("MachineReport: one screen, however much is lost") {
  for (const double loss : {1.0, 2.0, 9.96, 80.0, 1234.5, 1e5}) {
    const auto text = to_string(worst_report(loss));
    INFO(text);
    CHECK(width(text) <= 100);
    CHECK(lines_of(text).size() <= 30);
  }
}

TEST_CASE("MachineReport: text that no machine has") {
  const std::string endless(1000, 'x'), control = "a\nb\tc\x1b[31m\r";
  const ga::MachineReport report{endless + control, {{endless, control, 1e300, endless}, {"", "", 2, control}}};
  const auto text = to_string(report);
  CHECK(width(text) <= 100);
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.find('\t') == std::string::npos);
  CHECK(to_string(ga::MachineReport()) == "\n\n");
}

TEST_CASE("in_column: words, and blanks below the head") {
  CHECK(inner::in_column("ok  ", "a bc def", 9) == "ok  a bc\n    def\n");
  CHECK(inner::in_column("ok  ", "a  bc", 9) == "ok  a bc\n");
  CHECK(inner::in_column("", "", 9) == "\n");
  CHECK(inner::in_column("> ", "abcdefgh i", 5) == "> abc\n  def\n  gh\n  i\n");
}

TEST_CASE("machine_report: of this machine, on one screen") {
  const auto report = ga::machine_report();
  const auto text = to_string(report);
  INFO(text);
  CHECK(width(text) <= 100);
  CHECK(lines_of(text).size() <= 30);
  for (auto& finding : report.findings) CHECK(finding.ok() == finding.cure.empty());
  for (auto& finding : report.findings) CHECK((finding.loss == 1 || finding.loss >= inner::noticeable_loss));
}
