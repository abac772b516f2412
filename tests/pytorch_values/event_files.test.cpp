// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/summary_writer.hpp>

#include "support/event_files.hpp"
#include "support/files.hpp"

#include "pytorch_values/event_files.hpp"

// The calls of event_files.py: records equal the bytes of PyTorch's SummaryWriter, and TensorBoard has read them.

namespace ga = gradaccum;

namespace {

std::filesystem::path write_first(const std::filesystem::path& directory) {
  ga::SummaryWriter writer({.directory = directory});
  writer.add_text("settings", "learning rate **0.1**, größe", 0);
  writer.add_scalar("train/loss", 0.1, 1);
  writer.add_scalar("train/loss", 0.25, 2);
  writer.add_scalar("größe", -INFINITY, 2);
  writer.add_scalar("zero", 0, 0);
  writer.add_histogram("weights", torch::arange(8, 24) / 8, 1);
  writer.add_histogram("small", torch::tensor({-4, -1, 0, 1, 3}, at::kDouble) / std::pow(2, 40), 2);
  writer.add_histogram("half", torch::tensor({1.5, 2.5, 2.5}, at::kHalf), 2);
  writer.add_histogram("whole", torch::tensor({{3, 1}, {2, 3}}), 2);
  writer.add_histogram("zeros", torch::zeros({2}), 0);
  writer.add_scalar("train/loss", NAN, 3);
  writer.add_scalar("train/loss", 5, 4);
  return writer.path();
}

std::filesystem::path write_resumed(const std::filesystem::path& directory) {
  ga::SummaryWriter writer({.directory = directory, .purge_step = 3});
  writer.add_scalar("train/loss", 0.125, 3);
  writer.add_scalar("train/loss", 0.0625, 4);
  writer.add_scalar("train/loss", 16777217, 5);
  return writer.path();
}

/// Returns records without their time.
std::vector<std::string> untimed_records(const std::filesystem::path& path) {
  auto records = testing::records_of(testing::text_of(path)).whole;
  for (auto& record : records) record.erase(0, 9);
  return records;
}

}  // namespace

TEST_CASE("PyTorch's values: event files have the records of PyTorch's SummaryWriter") {
  const testing::Directory directory;
  REQUIRE(pytorch_values::event_records.size() == 2);
  const auto first = untimed_records(write_first(directory / "run")),
             resumed = untimed_records(write_resumed(directory / "run"));
  CHECK(first == pytorch_values::event_records[0]);
  CHECK(resumed == pytorch_values::event_records[1]);
  CHECK(first != resumed);
}

TEST_CASE(
    "PyTorch's values: TensorBoard reads the written values from event files, and nothing twice of a killed training") {
  const testing::Directory directory;
  write_first(directory / "run");
  write_resumed(directory / "run");
  std::map<std::string, std::vector<std::pair<std::int64_t, double>>> scalars;
  std::map<std::string, std::vector<std::pair<std::int64_t, std::string>>> texts;
  std::map<std::string, std::size_t> histograms;
  for (auto& event : testing::events_in(directory / "run")) {
    INFO(event.tag);
    if (event.number) scalars[event.tag].emplace_back(event.step, *event.number);
    if (event.text) texts[event.tag].emplace_back(event.step, *event.text);
    if (!event.histogram) continue;
    const auto& found = *event.histogram;
    const auto& read = pytorch_values::read_histograms.at(event.tag).at(histograms[event.tag]++);
    CHECK(event.step == read.step);
    CHECK(std::vector{found.min, found.max, found.num, found.sum, found.sum_squares} ==
          std::vector{read.min, read.max, read.num, read.sum, read.sum_squares});
    CHECK(found.limits == read.limits);
    CHECK(found.counts == read.counts);
  }
  CHECK(scalars == pytorch_values::read_scalars);
  CHECK(texts == pytorch_values::read_texts);
  CHECK(histograms.size() == pytorch_values::read_histograms.size());
  CHECK(scalars.at("train/loss").size() == 5);
}

TEST_CASE("PyTorch's values: write the folder that event_files.py reads", "[.][write]") {
  std::filesystem::remove_all("event_files");
  const auto name = [](auto begun) { return "event_files/events.out.tfevents." + std::to_string(begun) + ".cpp.1.0"; };
  std::filesystem::rename(write_first("event_files"), name(1'700'000'000));
  std::filesystem::rename(write_resumed("event_files"), name(1'700'000'001));
}
