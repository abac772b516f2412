// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/policies/metrics_log.hpp>

#include "support/file_size_limit.hpp"
#include "support/files.hpp"
#include "support/warnings.hpp"

#include <bit>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <random>

namespace ga = gradaccum;
using namespace testing;

namespace {

using Fields = ga::MetricsFile::Fields;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

void write_one(const ga::MetricsFileOptions& options, const Fields& fields) { ga::MetricsFile(options).write(fields); }

}  // namespace

TEST_CASE("MetricsFile: CSV") {
  const Directory directory;
  const auto path = directory / "metrics.csv";
  ga::MetricsFile file({.path = path});
  CHECK(text_of(path).empty());
  file.write({{"epoch", 0}, {"loss", 0.5}, {"best", true}});
  CHECK(text_of(path) == "epoch,loss,best\n0,0.5,1\n");  // written immediately
  file.write({{"epoch", 1}, {"loss", not_a_number}, {"best", false}});
  file.write({{"epoch", 1}, {"loss", -not_a_number}, {"best", false}});
  file.write({{"epoch", -2}, {"loss", infinity}, {"best", false}});
  file.write({{"epoch", 3}, {"loss", -infinity}, {"best", false}});
  file.write({{"epoch", 4}, {"loss", 1.0}, {"best", false}});
  CHECK(text_of(path) == "epoch,loss,best\n0,0.5,1\n1,nan,0\n1,nan,0\n-2,inf,0\n3,-inf,0\n4,1,0\n");
}

TEST_CASE("MetricsFile: JSON Lines") {
  const Directory directory;
  const auto path = directory / "metrics.jsonl";
  ga::MetricsFile file({.path = path});
  file.write({{"epoch", 0}, {"loss", 0.5}, {"best", true}});
  CHECK(text_of(path) == "{\"epoch\": 0, \"loss\": 0.5, \"best\": 1}\n");
  file.write({{"loss", not_a_number}, {"low", -infinity}, {"high", infinity}});  // other names than before
  file.write({{"größe", 1e300}});
  CHECK(text_of(path) ==
        "{\"epoch\": 0, \"loss\": 0.5, \"best\": 1}\n{\"loss\": null, \"low\": null, \"high\": null}\n"
        "{\"größe\": 1e+300}\n");
}

TEST_CASE("MetricsFile: the largest integers") {
  const Directory directory;
  const Fields fields{{"low", std::numeric_limits<std::int64_t>::min()},
                      {"high", std::numeric_limits<std::int64_t>::max()},
                      {"seed", std::numeric_limits<std::uint64_t>::max()},
                      {"short", std::int16_t{-3}}};
  write_one({.path = directory / "metrics.csv"}, fields);
  CHECK(text_of(directory / "metrics.csv") ==
        "low,high,seed,short\n-9223372036854775808,9223372036854775807,18446744073709551615,-3\n");
  write_one({.path = directory / "metrics.jsonl"}, fields);
  CHECK(text_of(directory / "metrics.jsonl") ==
        "{\"low\": -9223372036854775808, \"high\": 9223372036854775807, \"seed\": 18446744073709551615, "
        "\"short\": -3}\n");
}

TEST_CASE("MetricsFile: reading a double gives the same bits") {
  const Directory directory;
  std::mt19937_64 random(1);
  std::vector<double> numbers{0.1, -0.0, std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::max(),
                              static_cast<double>(0.1f)};
  while (numbers.size() < 3000)
    if (const auto number = std::bit_cast<double>(random()); std::isfinite(number)) numbers.push_back(number);
  for (const std::string name : {"metrics.csv", "metrics.jsonl"}) {
    {
      ga::MetricsFile file({.path = directory / name});
      for (auto number : numbers) file.write({{"number", number}});
    }
    auto lines = split(text_of(directory / name), '\n');
    if (name == "metrics.csv") lines.erase(lines.begin());
    REQUIRE(lines.size() == numbers.size());
    int same = 0;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const auto from = name == "metrics.csv" ? 0 : lines[i].find(": ") + 2;
      const double read = std::strtod(lines[i].c_str() + from, nullptr);
      same += std::bit_cast<std::uint64_t>(read) == std::bit_cast<std::uint64_t>(numbers[i]);
    }
    CHECK(same == 3000);
  }
}

TEST_CASE("MetricsFile: starts again, or continues an existing file") {
  const Directory directory;
  for (const bool append : {false, true})
    for (const std::string name : {"metrics.csv", "metrics.jsonl"}) {
      const auto path = directory / name;
      write_one({.path = path}, {{"epoch", 0}});
      write_one({.path = path, .append = append}, {{"epoch", 1}});
      write_one({.path = path, .append = append}, {{"epoch", 2}});
      const std::string csv = append ? "epoch\n0\n1\n2\n" : "epoch\n2\n";
      const std::string json = append ? "{\"epoch\": 0}\n{\"epoch\": 1}\n{\"epoch\": 2}\n" : "{\"epoch\": 2}\n";
      CHECK(text_of(path) == (name == "metrics.csv" ? csv : json));
    }
}

TEST_CASE("MetricsFile: continuing without a file, or with an empty one, starts one") {
  const Directory directory;
  for (const std::string before : {"none", "", "\n"}) {
    const auto path = directory / ("after_" + std::to_string(before.size()) + ".csv");
    if (before != "none") write_text(path, before);
    write_one({.path = path, .append = true}, {{"epoch", 0}, {"loss", 0.5}});
    CHECK(text_of(path) == (before == "\n" ? "\n" : "") + std::string("epoch,loss\n0,0.5\n"));
  }
}

TEST_CASE("MetricsFile: a CSV file has the same columns in all lines") {
  const Directory directory;
  const auto path = directory / "metrics.csv";
  ga::MetricsFile file({.path = path});
  file.write({{"epoch", 0}, {"loss", 0.5}});
  const std::string before = text_of(path);
  REQUIRE_ERROR("MetricsFile: " + path.string() + ": its columns are 'epoch,loss', got 'loss,epoch'",
                file.write({{"loss", 0.5}, {"epoch", 0}}));
  REQUIRE_ERROR("its columns are 'epoch,loss', got 'epoch'", file.write({{"epoch", 0}}));
  CHECK(text_of(path) == before);
  ga::MetricsFile again({.path = path, .append = true});
  REQUIRE_ERROR("its columns are 'epoch,loss', got 'epoch,error'", again.write({{"epoch", 0}, {"error", 0.5}}));
  CHECK(text_of(path) == before);
  again.write({{"epoch", 1}, {"loss", 0.25}});
  CHECK(text_of(path) == before + "1,0.25\n");
  write_text(path, "\n" + before);
  write_one({.path = path, .append = true}, {{"epoch", 1}, {"loss", 0.25}});
  CHECK(text_of(path) == "\n" + before + "1,0.25\n");
}

TEST_CASE("MetricsFile: a truncated line is ended before the next") {
  const Directory directory;
  const auto csv = directory / "metrics.csv", json = directory / "metrics.jsonl";
  write_text(csv, "epoch,loss\n0,0.5\n1,0.2");
  write_text(json, "{\"epoch\": 0}\n{\"epo");
  {
    ga::MetricsFile file({.path = csv, .append = true});
    CHECK(text_of(csv) == "epoch,loss\n0,0.5\n1,0.2");  // unchanged before the first line
    file.write({{"epoch", 2}, {"loss", 0.125}});
    file.write({{"epoch", 3}, {"loss", 0.25}});
  }
  write_one({.path = json, .append = true}, {{"epoch", 2}});
  CHECK(text_of(csv) == "epoch,loss\n0,0.5\n1,0.2\n2,0.125\n3,0.25\n");
  CHECK(text_of(json) == "{\"epoch\": 0}\n{\"epo\n{\"epoch\": 2}\n");

  write_text(csv, "epoch,loss");  // the line of names is truncated, too
  write_one({.path = csv, .append = true}, {{"epoch", 0}, {"loss", 0.5}});
  CHECK(text_of(csv) == "epoch,loss\n0,0.5\n");
}

TEST_CASE("MetricsFile: a full disk is an error, and later lines are complete") {
  const Directory directory;
  const auto path = directory / "metrics.csv";
  ga::MetricsFile file({.path = path});
  SECTION("in the first line") {
    {
      const FileSizeLimit limit(3);
      REQUIRE_ERROR("MetricsFile: " + path.string() + ": File too large", file.write({{"epoch", 0}, {"loss", 0.5}}));
    }
    file.write({{"epoch", 0}, {"loss", 0.5}});
    CHECK(text_of(path) == "epo\nepoch,loss\n0,0.5\n");
  }
  SECTION("in a later one, again and again") {
    file.write({{"epoch", 0}, {"loss", 0.5}});
    {
      const FileSizeLimit limit(19);
      REQUIRE_ERROR("File too large", file.write({{"epoch", 1}, {"loss", 0.25}}));
      REQUIRE_ERROR("File too large", file.write({{"epoch", 1}, {"loss", 0.25}}));
    }
    file.write({{"epoch", 1}, {"loss", 0.25}});
    CHECK(text_of(path) == "epoch,loss\n0,0.5\n1,\n1,0.25\n");
  }
  SECTION("between two lines") {
    file.write({{"epoch", 0}, {"loss", 0.5}});
    {
      const FileSizeLimit limit(17);
      REQUIRE_ERROR("File too large", file.write({{"epoch", 1}, {"loss", 0.25}}));
    }
    file.write({{"epoch", 1}, {"loss", 0.25}});
    CHECK(text_of(path) == "epoch,loss\n0,0.5\n1,0.25\n");
  }
}

TEST_CASE("MetricsFile: lines that cannot be written at the end are a warning") {
  const Directory directory;
  const auto path = directory / "metrics.csv";
  const Warnings warnings;
  {
    ga::MetricsFile file({.path = path, .flush_every = std::chrono::hours(1)});
    file.write({{"epoch", 0}});
    file.write({{"epoch", 1}});
    const FileSizeLimit limit(8);
    { const auto moved = std::move(file); }
  }
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], "MetricsFile: " + path.string() + ": File too large"));
}

TEST_CASE("MetricsFile: a full device") {
  const Directory directory;
  const auto path = directory / "full.csv";
  std::filesystem::create_symlink("/dev/full", path);
  ga::MetricsFile file({.path = path});
  REQUIRE_ERROR("MetricsFile: " + path.string() + ": No space left on device", file.write({{"epoch", 0}}));
}

TEST_CASE("MetricsFile: a line is written by one call of the operating system") {
  const auto calls = [] {  // this process's calls of write()
    for (auto& line : split(text_of("/proc/self/io"), '\n'))
      if (line.starts_with("syscw: ")) return std::atoll(line.c_str() + 7);
    return -1LL;
  };
  if (calls() < 0) SKIP("needs /proc/self/io");
  const Directory directory;
  ga::MetricsFile file({.path = directory / "metrics.csv"});
  Fields fields;  // larger than any buffer
  for (int i = 0; i < 10'000; ++i) fields.emplace_back("column_" + std::to_string(i), 1.0 / (i + 3));
  const auto before = calls();
  file.write(fields);
  file.write(fields);
  CHECK(calls() - before == 2);
}

TEST_CASE("MetricsFile: lines can be buffered") {
  const Directory directory;
  const auto path = directory / "metrics.csv";
  {
    ga::MetricsFile file({.path = path, .flush_every = std::chrono::hours(1)});
    file.write({{"epoch", 0}});
    CHECK(text_of(path) == "epoch\n0\n");  // the first lines are not buffered
    file.write({{"epoch", 1}});
    file.write({{"epoch", 2}});
    CHECK(text_of(path) == "epoch\n0\n");
    file.flush();
    CHECK(text_of(path) == "epoch\n0\n1\n2\n");
    file.write({{"epoch", 3}});
    file.remove_lines_at_end("epoch", 1);
    CHECK(text_of(path) == "epoch\n0\n1\n");
    file.write({{"epoch", 4}});
    REQUIRE_ERROR("its columns are 'epoch', got 'loss'", file.write({{"loss", 0.5}}));
  }
  CHECK(text_of(path) == "epoch\n0\n1\n4\n");
}

TEST_CASE("MetricsFile: refuses a path that cannot be written to") {
  const Directory directory;
  const auto refused = [](const std::filesystem::path& path, const std::string& why) {
    for (const bool append : {false, true})
      REQUIRE_ERROR("MetricsFile: " + path.string() + ": " + why, ga::MetricsFile({.path = path, .append = append}));
  };
  std::filesystem::create_directory(directory / "directory.csv");
  refused(directory / "directory.csv", "Is a directory");
  refused("/proc/metrics.jsonl", "No such file or directory");  // no file can be created there
  for (const std::string name : {"", "metrics", "metrics.txt", "metrics.CSV", ".csv"})
    refused(name, "the name must end in .csv or .jsonl");
}

TEST_CASE("MetricsFile: names that would need quotes are refused, and nothing is written") {
  const Directory directory;
  for (const std::string extension : {"csv", "jsonl"}) {
    const auto path = directory / ("metrics." + extension);
    ga::MetricsFile file({.path = path});
    for (const std::string& name : {std::string("a,b"), std::string("a\"b"), std::string("a\nb"), std::string("a\\b"),
                                    std::string("a\rb"), std::string("a\tb"), std::string()})
      REQUIRE_ERROR("MetricsFile: " + path.string() +
                        ": a name must have no comma, quote, backslash or control character, got '" + name + "'",
                    file.write({{"epoch", 0}, {name, 1.0}}));
    REQUIRE_ERROR("control character, got 'a", file.write({{std::string("a\0b", 3), 1.0}}));
    REQUIRE_ERROR("two fields of a line are named 'loss'", file.write({{"loss", 0.5}, {"loss", 0.5}}));
    REQUIRE_ERROR("a line must have a field", file.write({}));
    CHECK(text_of(path).empty());
    file.write({{"learning rate (Ω)", 0.5}});
    CHECK(contains(text_of(path), "learning rate (Ω)"));
  }
}

TEST_CASE("MetricsFile: lines at the end are removed by a number") {
  const Directory directory;
  const auto kept = [&](const std::string& name, const std::string& before, double last) {
    write_text(directory / name, before);
    ga::MetricsFile file({.path = directory / name, .append = true});
    file.remove_lines_at_end("b", last);
    file.write({{"a", 9}, {"b", 9}});
    return text_of(directory / name);
  };
  CHECK(kept("x.csv", "a,b\n1,2\n1,3\n1,4\n", 2) == "a,b\n1,2\n9,9\n");
  CHECK(kept("x.csv", "a,b\n1,2\n1,3\n1,4\n", 3.5) == "a,b\n1,2\n1,3\n9,9\n");
  CHECK(kept("x.csv", "a,b\n1,2\n1,3\n", 0) == "a,b\n9,9\n");
  CHECK(kept("x.csv", "a,b\n1,2\n", 2) == "a,b\n1,2\n9,9\n");
  CHECK(kept("x.csv", "a,b\n1,5\n1,2\n1,3\n", 2) == "a,b\n1,5\n1,2\n9,9\n");       // only at the end
  CHECK(kept("x.csv", "a,b\n1,2\n1,3\n1,", 2) == "a,b\n1,2\n9,9\n");               // the last one is truncated
  CHECK(kept("x.csv", "a,b\n1,7\n1,8\n1,1\n1,2\n", 0) == "a,b\n1,7\n1,8\n9,9\n");  // of another run
  write_text(directory / "y.jsonl", "{\"b\": 1, \"moved\": 1}\n{\"b\": 2}\n{\"b\": 2}\n");
  ga::MetricsFile({.path = directory / "y.jsonl", .append = true}).remove_lines_at_end("b", 0, "moved");
  CHECK(text_of(directory / "y.jsonl") == "{\"b\": 1, \"moved\": 1}\n");
  CHECK(kept("x.csv", "", 2) == "a,b\n9,9\n");
  CHECK(kept("x.jsonl", "{\"a\": 1, \"b\": 2}\n{\"b\": 3, \"a\": 1}\n", 2) ==
        "{\"a\": 1, \"b\": 2}\n{\"a\": 9, \"b\": 9}\n");
  CHECK(kept("x.jsonl", "{\"a\": 1}\n{\"b\": 3}\n", 2) == "{\"a\": 1}\n{\"a\": 9, \"b\": 9}\n");
  CHECK(kept("x.jsonl", "{\"b\": null}\n", 2) == "{\"b\": null}\n{\"a\": 9, \"b\": 9}\n");
}
