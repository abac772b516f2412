// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "support/files.hpp"
#include "support/models.hpp"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

// Typical programs, before and after gradaccum is adopted: with windows of one they give the same bits, with windows of
// four the large batch. docs/from_python.md has the numbers of changed lines.

using namespace testing;

namespace {

void run(const std::string& command) {
  INFO(command);
  REQUIRE(std::system(command.c_str()) == 0);
}

/// A program in one of its forms, "original" or "adopted".
struct Form {
  std::string program, name;

  /// Returns the final parameters in one vector.
  at::Tensor parameters(const std::string& arguments) const {
    const Directory directory;
    const auto file = directory / "parameters";
    run(std::string(ADOPTION_PROGRAMS " ") + program + "/" + name + " '" + file.string() + "' " + arguments +
        " > /dev/null");
    std::vector<at::Tensor> parameters;
    torch::load(parameters, file.string());
    for (auto& parameter : parameters) parameter = parameter.flatten();
    return torch::cat(parameters);
  }
  std::filesystem::path source() const { return std::filesystem::path(ADOPTION_SOURCES) / program / (name + ".cpp"); }
};

/// Returns `+4 −1`: the numbers of added and removed lines, without changes of indentation.
std::string changed_lines(const Form& before, const Form& after) {
  const Directory directory;
  const auto file = directory / "diff";
  const auto command =
      "diff -w '" + before.source().string() + "' '" + after.source().string() + "' > '" + file.string() + "'";
  REQUIRE(std::system(command.c_str()) != 0);  // they differ
  std::ifstream diff(file);
  int added = 0, removed = 0;
  for (std::string line; std::getline(diff, line);) {
    added += line[0] == '>';
    removed += line[0] == '<';
  }
  return "+" + std::to_string(added) + " −" + std::to_string(removed);
}

}  // namespace

TEST_CASE("adoption: the same bits in windows of one, the large batch in windows of four") {
  const std::string program = GENERATE("cnn", "dcgan", "lstm", "actor_critic", "fine_tuning", "scheduler", "cpp17");
  const Form original{program, "original"}, adopted{program, "adopted"};
  INFO(program);

  const bool lstm = program == "lstm";  // its rows are the batch, and its clipping was replaced

  const auto before = original.parameters("8"), after = adopted.parameters("8 1");
  if (lstm)  // LibTorch's clipping adds 1e-6 to the norm, and rounds differently
    CHECK(distance(after, before) < 1e-5);
  else
    CHECK(at::equal(after, before));

  const auto large = original.parameters(lstm ? "8 1 double" : "32 1 double");
  const auto windows = adopted.parameters(lstm ? "2 4 double" : "8 4 double");
  const auto small = original.parameters("8 1 double");
  CHECK(distance(windows, large) < (lstm ? 1e-5 : 1e-9));
  if (!lstm) CHECK(distance(small, large) > 1e-3);
}

TEST_CASE("adoption: the changed lines match the documentation") {
  const auto table = text_of(ADOPTION_TABLE);
  for (const std::string program : {"cnn", "dcgan", "lstm", "actor_critic", "fine_tuning", "scheduler", "cpp17"}) {
    const auto changed = changed_lines({program, "original"}, {program, "adopted"});
    INFO(program << " " << changed);
    const auto row = table.find("| `" + program + "` |");
    REQUIRE(row != std::string::npos);
    CHECK(contains(table.substr(row, table.find('\n', row) - row), "| " + changed + " |"));
  }
}
