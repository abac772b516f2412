// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/progress_line.hpp>

#include "support/files.hpp"

#include <fmt/format.h>

#include <chrono>
#include <limits>
#include <memory>
#include <regex>
#include <thread>

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

using namespace std::chrono_literals;

constexpr double infinity = std::numeric_limits<double>::infinity();

// Replaces rate and remaining time, which depend on the clock.
std::string without_times(const std::string& text) {
  const auto rate = std::regex_replace(text, std::regex(R"([0-9.]+(e[+-][0-9]+)? samples/s)"), "N samples/s");
  return std::regex_replace(rate, std::regex(R"([0-9:]+ left)"), "T left");
}

// A terminal, and the text that was sent to it.
class Terminal {
 public:
  explicit Terminal(unsigned short columns) {
    grantpt(master_);
    unlockpt(master_);
    const int slave = open(ptsname(master_), O_RDWR | O_NOCTTY);
    termios raw{};
    tcgetattr(slave, &raw);
    cfmakeraw(&raw);
    tcsetattr(slave, TCSANOW, &raw);
    const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    ioctl(slave, TIOCSWINSZ, &size);
    slave_.reset(fdopen(slave, "w"));
  }
  ~Terminal() {
    slave_.reset();
    close(master_);
  }
  operator std::FILE*() const { return slave_.get(); }  // NOLINT(google-explicit-constructor): it is one

  /// Returns the text sent since the last call.
  std::string sent() {
    constexpr char end = '\1';
    std::fputc(end, slave_.get());
    std::fflush(slave_.get());
    std::string text;
    for (char c; read(master_, &c, 1) == 1 && c != end;) text += c;
    return text;
  }

 private:
  int master_ = posix_openpt(O_RDWR | O_NOCTTY);
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> slave_{nullptr, &std::fclose};
};

// The visible text of a terminal's row, and the cursor's position.
struct Row {
  std::string shown;
  std::size_t cursor = 0, widest = 0;
  void show(const std::string& text) {
    for (char c : text) {
      if (c == '\r') {
        cursor = 0;
        continue;
      }
      shown.resize(std::max(shown.size(), cursor + 1), ' ');
      shown[cursor++] = c;
      widest = std::max(widest, cursor);
    }
  }
  std::string text() const { return shown.substr(0, shown.find_last_not_of(' ') + 1); }
};

std::string line_of(std::optional<double> fraction, const std::string& text = "text") {
  const Scratch file;
  ga::ProgressLine progress({.to = file, .elsewhere = 0ms});
  progress.update(fraction, 10, [&] { return text; });
  return without_times(file.text());
}

}  // namespace

TEST_CASE("ProgressLine: without a terminal, prints plain lines") {
  CHECK(line_of(0.43) == " 43% | text | N samples/s | T left\n");
  CHECK(line_of(1.0) == "100% | text | N samples/s | T left\n");
  CHECK(line_of(0.001) == "  0% | text | N samples/s | T left\n");
  const Scratch file;
  {
    ga::ProgressLine progress({.to = file, .elsewhere = 0ms});
    for (int i = 1; i <= 3; ++i) progress.update(i / 3.0, i, [&] { return fmt::format("update {}", i); });
    progress.clear();
  }
  CHECK(without_times(file.text()) ==
        " 33% | update 1 | N samples/s | T left\n 67% | update 2 | N samples/s | T left\n"
        "100% | update 3 | N samples/s | T left\n");
}

TEST_CASE("ProgressLine: an unknown fraction, or an invalid one") {
  CHECK(line_of({}) == "text | N samples/s\n");
  CHECK(line_of(0.0) == "text | N samples/s\n");
  CHECK(line_of(-0.5) == "text | N samples/s\n");
  CHECK(line_of(std::numeric_limits<double>::quiet_NaN()) == "text | N samples/s\n");
  CHECK(line_of(1.5) == "100% | text | N samples/s | T left\n");
  CHECK(line_of(infinity) == "100% | text | N samples/s | T left\n");
  CHECK(line_of(1e-300) == "  0% | text | N samples/s | T left\n");
}

TEST_CASE("ProgressLine: the text is shown unchanged") {
  CHECK(line_of({}, "{} %s %n \"ü\"") == "{} %s %n \"ü\" | N samples/s\n");
  CHECK(line_of({}, "") == " | N samples/s\n");
}

TEST_CASE("ProgressLine: the remaining time, and the rate") {
  constexpr double fraction = 1e-11;
  constexpr std::int64_t samples = 1'000'000'000;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  const Scratch file;
  const auto before_start = now();
  ga::ProgressLine progress({.to = file, .elsewhere = 0ms});
  const auto after_start = now();
  const auto before_update = now();
  progress.update(fraction, samples, [] { return "text"; });
  const auto most = seconds(now() - before_start), least = seconds(before_update - after_start);
  std::smatch found;
  const auto text = file.text();
  REQUIRE(std::regex_search(text, found, std::regex(R"(([0-9.]+) samples/s \| (?:([0-9]+):)?([0-9]+):([0-9]+) left)")));
  const double left =
      (found[2].matched ? std::stod(found[2]) : 0) * 3600 + std::stod(found[3]) * 60 + std::stod(found[4]);
  CHECK(left <= most / fraction + 1);
  CHECK(left >= least / fraction - 1);
  CHECK(std::stod(found[1]) >= samples / most - 1);
  CHECK(std::stod(found[1]) <= samples / least + 1);
  CHECK(left * fraction * std::stod(found[1]) == Approx(samples).epsilon(0.01));  // both use the same clock
}

TEST_CASE("rate_text: three digits for small rates, integers for large ones") {
  CHECK(ga::rate_text(0) == "0");
  CHECK(ga::rate_text(0.0123456) == "0.0123");
  CHECK(ga::rate_text(0.42) == "0.42");
  CHECK(ga::rate_text(0.99949) == "0.999");
  CHECK(ga::rate_text(8.8552) == "8.86");
  CHECK(ga::rate_text(31.44) == "31.4");
  CHECK(ga::rate_text(99.949) == "99.9");
  CHECK(ga::rate_text(99.95) == "100");
  CHECK(ga::rate_text(31024.4) == "31024");
  CHECK(ga::rate_text(12345678) == "12345678");
  CHECK(ga::rate_text(infinity) == "inf");
}

TEST_CASE("ProgressLine: counts in the given unit") {
  const Scratch file;
  ga::ProgressLine progress({.to = file, .elsewhere = 0ms, .unit = "MB"});
  progress.update({}, 0, [] { return "none"; });
  CHECK(file.text() == "none | 0 MB/s\n");
}

TEST_CASE("ProgressLine: rates below one per second are shown") {
  const Scratch file;
  ga::ProgressLine progress({.to = file, .elsewhere = 0ms});
  std::this_thread::sleep_for(20ms);
  progress.update({}, 0, [] { return "none"; });
  CHECK(file.text() == "none | 0 samples/s\n");
  std::this_thread::sleep_for(1001ms);
  progress.update({}, 1, [] { return "one"; });  // takes more than a second
  CHECK(std::regex_search(file.text(), std::regex(R"(one \| 0\.[0-9]+ samples/s)")));
}

TEST_CASE("duration_text: minutes, and hours if there are any") {
  CHECK(inner::duration_text(0) == "0:00");
  CHECK(inner::duration_text(0.49) == "0:00");
  CHECK(inner::duration_text(59.5) == "1:00");
  CHECK(inner::duration_text(187) == "3:07");
  CHECK(inner::duration_text(3599.4) == "59:59");
  CHECK(inner::duration_text(3600) == "1:00:00");
  CHECK(inner::duration_text(3729) == "1:02:09");
  CHECK(inner::duration_text(360'000) == "100:00:00");
  CHECK(inner::duration_text(1e300) == inner::duration_text(infinity));
}

TEST_CASE("ProgressLine: calls for the text only when it is shown") {
  const Scratch file;
  int asked = 0;
  const auto text = [&] { return fmt::format("asked {}", ++asked); };
  const auto show_twice = [&](const ga::ProgressLineOptions& options) {
    ga::ProgressLine progress(options);
    for (int i = 0; i < 2; ++i) progress.update(0.5, 1, text);
    return std::exchange(asked, 0);
  };
  CHECK(show_twice({.to = file, .elsewhere = 1h}) == 0);
  CHECK(show_twice({.to = file, .elsewhere = std::chrono::milliseconds::max()}) == 0);
  CHECK(show_twice({.to = file, .only_on_terminal = true, .elsewhere = 0ms}) == 0);
  CHECK(show_twice({.to = nullptr, .on_terminal = 0ms, .elsewhere = 0ms}) == 0);
  CHECK(show_twice({.to = file, .on_terminal = 0ms, .elsewhere = 1h}) == 0);
  CHECK(file.text().empty());
  CHECK(show_twice({.to = file, .on_terminal = 1h, .elsewhere = 0ms}) == 2);
  Terminal terminal(80);
  CHECK(show_twice({.to = terminal, .on_terminal = 1h, .elsewhere = 0ms}) == 0);
  CHECK(terminal.sent().empty());
  CHECK(show_twice({.to = terminal, .only_on_terminal = true, .on_terminal = 0ms, .elsewhere = 1h}) == 2);
}

TEST_CASE("ProgressLine: time and samples count from restart()") {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const Scratch file;
  ga::ProgressLine progress({.to = file, .elsewhere = 0ms});
  std::this_thread::sleep_for(20ms);
  const auto start = now();
  progress.restart();
  progress.update({}, 1'000'000, [] { return "text"; });
  const double most = std::chrono::duration<double>(now() - start).count();
  std::smatch found;
  const auto text = file.text();
  REQUIRE(std::regex_search(text, found, std::regex("([0-9.]+) samples/s")));
  CHECK(std::stod(found[1]) >= 1'000'000 / most - 1);
}

TEST_CASE("ProgressLine: on a terminal, one line is rewritten and erased") {
  Terminal terminal(80);
  Row row;
  const auto see = [&] {
    const auto sent = terminal.sent();
    CHECK_FALSE(contains(sent, "\n"));
    row.show(sent);
    return without_times(row.text());
  };
  {
    ga::ProgressLine progress({.to = terminal, .on_terminal = 0ms});
    const auto update = [&](const std::string& text) { progress.update({}, 0, [&] { return text; }); };
    update("a long text that comes first");
    CHECK(see() == "a long text that comes first | N samples/s");
    update("short");
    CHECK(see() == "short | N samples/s");
    update("longer, ü");
    CHECK(see() == "longer, ü | N samples/s");
    progress.clear();
    CHECK(see().empty());
    CHECK(row.cursor == 0);
    progress.clear();
    CHECK(terminal.sent().empty());  // nothing to erase
    update("again");
    CHECK(see() == "again | N samples/s");
  }
  CHECK(see().empty());
  CHECK(row.cursor == 0);
}

TEST_CASE("ProgressLine: a line wider than the terminal is cut") {
  Terminal terminal(20);
  ga::ProgressLine progress({.to = terminal, .on_terminal = 0ms});
  Row row;
  for (int i = 0; i < 3; ++i) {
    progress.update(0.5, 0, [] { return std::string(300, 'x'); });
    row.show(terminal.sent());
    CHECK(row.text() == " 50% | xxxxxxxxxxxx");
  }
  progress.clear();
  row.show(terminal.sent());
  CHECK(row.text().empty());
  CHECK(row.widest < 20);  // the last column would move some terminals to the next row

  Terminal unknown(0);  // reports no width
  ga::ProgressLine whole({.to = unknown, .on_terminal = 0ms});
  whole.update({}, 0, [] { return std::string(300, 'x'); });
  CHECK(contains(unknown.sent(), std::string(300, 'x') + " | "));
}

TEST_CASE("ProgressLine: a stream that cannot be written to does no harm") {
  SECTION("without a buffer, on a device without room") {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> full(std::fopen("/dev/full", "w"), &std::fclose);
    std::setvbuf(full.get(), nullptr, _IONBF, 0);  // unbuffered, like stderr
    ga::ProgressLine progress({.to = full.get(), .elsewhere = 0ms});
    int asked = 0;
    for (int i = 0; i < 3; ++i) progress.update(0.5, 1, [&] { return ++asked, "text"; });
    CHECK(asked == 3);
    CHECK(std::ferror(full.get()) != 0);
  }
  SECTION("whose descriptor was closed") {
    const Scratch file;
    const int descriptor = dup(fileno(file));
    std::FILE* const closed = fdopen(descriptor, "w");
    close(descriptor);
    {
      ga::ProgressLine progress({.to = closed, .elsewhere = 0ms});
      progress.update(0.5, 1, [] { return "text"; });
    }
    CHECK(std::ferror(closed) != 0);
    std::fclose(closed);
  }
  SECTION("a terminal that has gone away") {
    auto terminal = std::make_unique<Terminal>(80);
    std::FILE* const copy = fdopen(dup(fileno(*terminal)), "w");
    {
      ga::ProgressLine progress({.to = copy, .on_terminal = 0ms});
      progress.update(0.5, 1, [] { return "text"; });
      terminal.reset();
      progress.update(0.5, 1, [] { return "text"; });
    }
    CHECK(std::ferror(copy) != 0);
    std::fclose(copy);
  }
}
