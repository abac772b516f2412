// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/summary_writer.hpp>

#include "support/event_files.hpp"
#include "support/file_size_limit.hpp"
#include "support/files.hpp"
#include "support/warnings.hpp"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include <unistd.h>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;
using namespace std::chrono_literals;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr auto late = std::chrono::hours(1);  // only flush() writes

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::vector<Event> summaries_in(const std::filesystem::path& path) {
  auto events = events_of(text_of(path));
  std::erase_if(events, [](const Event& event) { return event.tag.empty(); });
  return events;
}

/// Writes a histogram of a tensor, and reads it.
std::optional<Histogram> histogram_of(const at::Tensor& tensor) {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run"});
  writer.add_histogram("h", tensor, 1);
  writer.flush();
  const auto events = summaries_in(writer.path());
  return events.empty() ? std::nullopt : events.at(0).histogram;
}

/// Computes the histogram by definition: searches for each number among all limits.
Histogram counted(const std::vector<double>& numbers) {
  std::vector<double> limits;
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) limits.insert(limits.begin(), -limit);
  limits.push_back(0);
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) limits.push_back(limit);
  limits.push_back(*std::max_element(numbers.begin(), numbers.end()));  // the bucket above all limits
  std::vector<double> counts(limits.size());
  Histogram histogram{numbers[0], numbers[0], 0, 0, 0, {}, {}};
  for (const double number : numbers) {
    std::size_t place = 0;
    while (place + 1 < limits.size() && number >= limits[place]) ++place;
    ++counts[place];
    histogram.min = std::min(histogram.min, number);
    histogram.max = std::max(histogram.max, number);
    ++histogram.num;
    histogram.sum += number;
    histogram.sum_squares += number * number;
  }
  std::size_t first = 0, last = counts.size() - 1;
  while (counts[first] == 0) ++first;
  while (counts[last] == 0) --last;
  for (auto i = first > 0 ? first - 1 : 0; i <= last; ++i) {
    histogram.limits.push_back(limits[i]);
    histogram.counts.push_back(counts[i]);
  }
  return histogram;
}

std::vector<double> numbers_of(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kDouble).flatten().contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

void check_same(const std::optional<Histogram>& found, const Histogram& expected) {
  REQUIRE(found);
  CHECK(found->min == expected.min);
  CHECK(found->max == expected.max);
  CHECK(found->num == expected.num);
  CHECK(found->sum == Approx(expected.sum).margin(1e-9));
  CHECK(found->sum_squares == Approx(expected.sum_squares));
  CHECK(found->limits == expected.limits);
  CHECK(found->counts == expected.counts);
}

void check_histogram(const at::Tensor& tensor) { check_same(histogram_of(tensor), counted(numbers_of(tensor))); }

}  // namespace

TEST_CASE("crc32c: known values, and the definition") {
  CHECK(inner::crc32c("123456789", 9) == 0xe3069283);
  CHECK(inner::crc32c("", 0) == 0);
  CHECK(inner::crc32c(nullptr, 0) == 0);
  CHECK(inner::crc32c(std::string(32, '\0').data(), 32) == 0x8a9136aa);  // these two are in RFC 3720
  CHECK(inner::crc32c(std::string(32, '\xff').data(), 32) == 0x62a8ab43);
  std::string text;
  for (int i = 0; i < 600; ++i) {
    CHECK(std::rotr(inner::crc32c(text.data(), text.size()), 15) + 0xa282ead8 == masked_checksum(text));
    text += static_cast<char>(i * 37);
  }
}

TEST_CASE("SummaryWriter: the bytes of a record") {
  const auto event = inner::scalar_event(1.5, 300, "a/b", 0.25F);
  const std::string expected(
      "\x09\x00\x00\x00\x00\x00\x00\xf8\x3f"  // wall_time
      "\x10\xac\x02"                          // step
      "\x2a\x0c\x0a\x0a"                      // summary, value
      "\x0a\x03"
      "a/b"                    // tag
      "\x15\x00\x00\x80\x3e",  // simple_value
      9 + 3 + 4 + 5 + 5);
  CHECK(event == expected);
  CHECK(inner::scalar_event(1.5, 0, "a/b", 0) !=  // a step of 0 is omitted, a value of 0 is not
        inner::scalar_event(1.5, 1, "a/b", 0));
  CHECK(event_of(inner::scalar_event(1.5, 0, "a", 0)).number == 0.0F);
  const auto beginning = [](double time, std::int64_t step) {  // returns a record up to its summary
    const auto text = inner::scalar_event(time, step, "a/b", 0.25F);
    return text.substr(0, text.size() - 14);
  };
  CHECK(beginning(0, -1) == "\x10" + std::string(9, '\xff') + "\x01");
  CHECK(beginning(0, 0).empty());
  CHECK(beginning(-0.0, 0) == std::string("\x09\0\0\0\0\0\0\0\x80", 9));
}

TEST_CASE("SummaryWriter: written values can be read") {
  const Directory directory;
  const double before = now();
  ga::SummaryWriter writer({.directory = directory / "runs/a"});  // neither folder exists
  writer.add_scalar("train/loss", 0.1, 7);
  writer.add_text("settings", "learning rate **0.1**\n\n| a | b |", 0);
  writer.add_histogram("weights", torch::tensor({1.0, 2.0, 2.0}), 3);
  writer.flush();
  const auto events = events_of(text_of(writer.path()));
  REQUIRE(events.size() == 4);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[1].tag == "train/loss");
  CHECK(events[1].step == 7);
  CHECK(events[1].number == 0.1F);
  CHECK(events[2].tag == "settings/text_summary");
  CHECK(events[2].text == "learning rate **0.1**\n\n| a | b |");
  CHECK(events[3].tag == "weights");
  CHECK(events[3].step == 3);
  check_same(events[3].histogram, counted({1, 2, 2}));
  double last = before;
  for (auto& event : events) {
    CHECK(event.wall_time >= last);
    last = event.wall_time;
  }
  CHECK(last <= now());
}

TEST_CASE("SummaryWriter: special numbers and steps") {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run"});
  const std::vector<double> numbers{0, -0.0, not_a_number, infinity, -infinity, 1e300, -1e-300, 16777217, 1e-45};
  const std::vector<std::int64_t> steps{
      0, 1, -1, 127, 128, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
  for (const double number : numbers)
    for (const auto step : steps) writer.add_scalar("x", number, step);
  writer.flush();
  const auto events = summaries_in(writer.path());
  REQUIRE(events.size() == numbers.size() * steps.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    CHECK(events[i].step == steps[i % steps.size()]);
    const auto expected = static_cast<float>(numbers[i / steps.size()]);
    CHECK((std::isnan(expected)
               ? std::isnan(*events[i].number)
               : std::bit_cast<std::uint32_t>(*events[i].number) == std::bit_cast<std::uint32_t>(expected)));
  }
}

TEST_CASE("SummaryWriter: a histogram counts each number of tensors of any dtype, shape and layout") {
  torch::manual_seed(1);
  const auto normal = torch::randn({7, 11, 3}, at::kDouble);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) check_histogram(normal.to(dtype));
  for (const auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool})
    check_histogram((normal * 10).abs().to(dtype));
  check_histogram(normal.permute({2, 0, 1}));
  check_histogram(normal.narrow(1, 3, 5));
  check_histogram(torch::tensor(3.0));
  check_histogram(torch::zeros({5}));
  check_histogram(torch::zeros({1}));
  check_histogram(torch::ones({2}).expand({2, 2}));
  check_histogram(torch::randn({600'001}));  // more than one piece
  check_histogram(torch::tensor({-1e19, -1.0, -1e-30, 0.0, 1e-30, 1e-12, 1.1e-12, 1.0, 1e19}, at::kDouble));
  check_histogram(torch::tensor({-1e300, 2e20, 1e300}, at::kDouble));  // beyond all limits
  check_histogram(torch::tensor({-1e300}, at::kDouble));
  check_histogram(torch::tensor({1e300}, at::kDouble));
  check_histogram(torch::randn({4}).set_requires_grad(true));
  CHECK(histogram_of(normal)->counts != histogram_of(2 * normal)->counts);  // negative control

  const auto complex = torch::randn({6}, at::kComplexDouble);
  check_same(histogram_of(complex), counted(numbers_of(torch::view_as_real(complex))));
  check_same(histogram_of(complex.conj()), counted(numbers_of(torch::view_as_real(complex.conj().resolve_conj()))));

  const auto sparse = torch::sparse_coo_tensor(torch::tensor({{1, 3, 1}}), torch::tensor({0.5, 2.0, 0.25}), {9});
  check_same(histogram_of(sparse), counted({0.75, 2}));
}

TEST_CASE("SummaryWriter: every limit is the beginning of its bucket") {
  std::vector<double> numbers;
  for (double limit = 1e-12; limit < 1e19; limit *= 1.1)
    for (const double number : {std::nextafter(limit, 0), limit, -limit, std::nextafter(-limit, 0)})
      numbers.push_back(number);
  check_same(histogram_of(torch::tensor(numbers, at::kDouble)), counted(numbers));
}

TEST_CASE("SummaryWriter: a factor acts as if the numbers were multiplied, and does not change them") {
  const auto tensor = torch::randn({100}, at::kDouble), before = tensor.clone();
  const auto found = inner::histogram_of(tensor, 0.125), expected = inner::histogram_of(tensor / 8);
  CHECK(found.numbers_below == expected.numbers_below);
  CHECK(found.limits == expected.limits);
  CHECK(found.max == expected.max);
  CHECK(tensor.equal(before));
}

TEST_CASE("SummaryWriter: numbers that a histogram leaves out") {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run"});
  writer.add_histogram("some", torch::tensor({1.0, not_a_number, 2.0, infinity, -infinity}), 5);
  writer.add_histogram("none", torch::full({3}, not_a_number), 6);
  writer.add_histogram("empty", torch::empty({0, 3}), 7);
  REQUIRE_ERROR("SummaryWriter: a histogram must be of a tensor, got an undefined one for w",
                writer.add_histogram("w", at::Tensor(), 8));
  writer.flush();
  const auto events = summaries_in(writer.path());
  REQUIRE(events.size() == 3);
  check_same(events[0].histogram, counted({1, 2}));
  CHECK(events[1].tag == "some/not_finite");
  CHECK(events[1].number == 3.0F);
  CHECK(events[1].step == 5);
  CHECK(events[2].tag == "none/not_finite");
  CHECK(events[2].number == 3.0F);
}

TEST_CASE("SummaryWriter: a histogram of a tensor on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto tensor = torch::randn({3, 50});
  check_same(histogram_of(tensor.to(at::kCUDA)), counted(numbers_of(tensor)));
  check_same(histogram_of(tensor.to(at::kCUDA).t()), counted(numbers_of(tensor)));
}

TEST_CASE("SummaryWriter: tags of any characters, with invalid UTF-8 escaped") {
  for (const std::string text : {"größe", "a b", "損失/訓練", "\xf0\x9f\x98\x80", "\x01\n\"<script>", "\xed\x9f\xbf",
                                 "\xee\x80\x80", "\xf4\x8f\xbf\xbf", ""})
    CHECK(inner::as_utf8(text) == text);
  CHECK(inner::as_utf8(std::string_view("a\0b", 3)) == std::string_view("a\0b", 3));
  CHECK(inner::as_utf8("a\xff\x80z") == "a\\xff\\x80z");
  CHECK(inner::as_utf8("\xc0\x80") == "\\xc0\\x80");  // an overlong form
  CHECK(inner::as_utf8("\xe0\x9f\xbf") == "\\xe0\\x9f\\xbf");
  CHECK(inner::as_utf8("\xf0\x8f\xbf\xbf") == "\\xf0\\x8f\\xbf\\xbf");
  CHECK(inner::as_utf8("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // a single surrogate
  CHECK(inner::as_utf8("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // beyond the last code point
  CHECK(inner::as_utf8("\xf5\x80\x80\x80") == "\\xf5\\x80\\x80\\x80");
  CHECK(inner::as_utf8("\xe2\x82") == "\\xe2\\x82");  // cut off
  CHECK(inner::as_utf8("\xe2\x82\xac\xe2") == "\xe2\x82\xac\\xe2");

  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run"});
  writer.add_scalar("größe\xff", 1, 1);
  writer.add_text("\xfe", "\xe4", 1);
  writer.add_scalar(std::string(70'000, 'x'), 2, 1);
  REQUIRE_ERROR("SummaryWriter: a tag must not be empty", writer.add_scalar("", 1, 1));
  REQUIRE_ERROR("SummaryWriter: a tag must not be empty", writer.add_text("", "text", 1));
  REQUIRE_ERROR("SummaryWriter: a tag must not be empty", writer.add_histogram("", torch::ones({1}), 1));
  writer.flush();
  const auto events = summaries_in(writer.path());
  REQUIRE(events.size() == 3);
  CHECK(events[0].tag == "größe\\xff");
  CHECK(events[1].tag == "\\xfe/text_summary");
  CHECK(events[1].text == "\\xe4");
  CHECK(events[2].tag.size() == 70'000);
}

TEST_CASE("SummaryWriter: a file that is cut or damaged at any byte is read up to there") {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run", .purge_step = 3});
  writer.add_scalar("a", 1, 3);
  writer.add_text("b", "text", 4);
  writer.add_histogram("c", torch::tensor({1.0, 5.0}), 5);
  writer.flush();
  const auto file = text_of(writer.path());
  std::vector<std::size_t> ends{0};
  for (auto& record : records_of(file).whole) ends.push_back(ends.back() + record.size() + 16);
  REQUIRE(ends.size() == 7);
  REQUIRE(ends.back() == file.size());
  int wrong = 0;
  for (std::size_t size = 0; size <= file.size(); ++size) {
    const auto records = records_of(file.substr(0, size));
    const auto whole = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), size) - ends.begin()) - 1;
    wrong += records.whole.size() != whole || records.all != (size == ends[whole]);
    if (size == file.size()) continue;
    auto damaged = file;
    damaged[size] = static_cast<char>(damaged[size] ^ 0x10);
    wrong += records_of(damaged).whole.size() != whole;
  }
  CHECK(wrong == 0);
}

TEST_CASE("SummaryWriter: buffers records until the interval is over") {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "a", .flush_every = late});
  CHECK(events_of(text_of(writer.path())).size() == 1);  // the version is written immediately
  for (int step = 0; step < 100; ++step) writer.add_scalar("x", step, step);
  CHECK(events_of(text_of(writer.path())).size() == 1);
  writer.flush();
  CHECK(events_of(text_of(writer.path())).size() == 101);
  writer.flush();
  CHECK(events_of(text_of(writer.path())).size() == 101);
  for (int step = 0; step < 40'000; ++step) writer.add_scalar("x", step, step);
  CHECK(std::filesystem::file_size(writer.path()) > (1 << 20));  // a MiB is written immediately
  CHECK(records_of(text_of(writer.path())).all);

  ga::SummaryWriter at_once({.directory = directory / "b", .flush_every = 0s});
  at_once.add_scalar("x", 1, 1);
  CHECK(events_of(text_of(at_once.path())).size() == 2);

  std::filesystem::path path;
  {
    ga::SummaryWriter ends({.directory = directory / "c", .flush_every = late});
    ends.add_scalar("x", 1, 1);
    path = ends.path();
    CHECK(events_of(text_of(path)).size() == 1);
  }
  CHECK(events_of(text_of(path)).size() == 2);
}

TEST_CASE("SummaryWriter: records go to the operating system together") {
  const auto calls = [] {  // this process's calls of write()
    for (auto& line : split(text_of("/proc/self/io"), '\n'))
      if (line.starts_with("syscw: ")) return std::atoll(line.c_str() + 7);
    return -1LL;
  };
  if (calls() < 0) SKIP("needs /proc/self/io");
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run", .flush_every = late});
  const auto before = calls();
  for (int step = 0; step < 1000; ++step) writer.add_scalar("x", step, step);
  writer.flush();
  writer.flush();
  CHECK(calls() - before == 1);
}

TEST_CASE(
    "SummaryWriter: a full disk is an error, the file stays whole, and nothing is lost when there is room again") {
  const Directory directory;
  std::size_t begin = 0, end = 0;
  {
    ga::SummaryWriter writer({.directory = directory / "size", .flush_every = late});
    begin = text_of(writer.path()).size();
    for (int step = 1; step <= 3; ++step) writer.add_scalar("loss", step, step);
    writer.flush();
    end = text_of(writer.path()).size();
  }
  for (std::size_t limit = begin; limit < end; ++limit) {
    INFO("limit " << limit);
    ga::SummaryWriter writer({.directory = directory / "run", .flush_every = late});
    for (int step = 1; step <= 3; ++step) writer.add_scalar("loss", step, step);
    {
      const FileSizeLimit full(limit);
      for (int again = 0; again < 2; ++again) {
        REQUIRE_ERROR(writer.path().string() + ": must be written to, got File too large", writer.flush());
        const auto records = records_of(text_of(writer.path()));
        CHECK(records.all);
        CHECK(records.whole.size() == 1 + (limit - begin) / ((end - begin) / 3));  // the records that fit
      }
    }
    writer.add_scalar("loss", 4, 4);
    writer.flush();
    const auto events = summaries_in(writer.path());
    REQUIRE(events.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(events[i].step == static_cast<std::int64_t>(i + 1));
    std::filesystem::remove(writer.path());
  }
}

TEST_CASE("SummaryWriter: a full disk is an error of every call") {
  const Directory directory;
  ga::SummaryWriter writer({.directory = directory / "run", .flush_every = 0s});
  const FileSizeLimit full(text_of(writer.path()).size() + 5);
  CHECK_THROWS_AS(writer.add_scalar("x", 1, 1), std::runtime_error);
  CHECK_THROWS_AS(writer.add_text("x", "text", 1), std::runtime_error);
  CHECK_THROWS_AS(writer.add_histogram("x", torch::ones({2}), 1), std::runtime_error);
  CHECK(records_of(text_of(writer.path())).all);
  const FileSizeLimit fuller(3);
  REQUIRE_ERROR("File too large", ga::SummaryWriter({.directory = directory / "other"}));
}

TEST_CASE("SummaryWriter: a writer that cannot write its last numbers warns") {
  const Directory directory;
  const Warnings warnings;
  auto writer = std::make_unique<ga::SummaryWriter>(ga::SummaryWriterOptions{.directory = directory / "run"});
  const auto path = writer->path();
  writer->add_scalar("loss", 1, 1);
  {
    const FileSizeLimit full(text_of(path).size() + 5);
    writer.reset();
  }
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], "SummaryWriter: the last numbers were not written: " + path.string()));
}

TEST_CASE("SummaryWriter: a resumed training hides later steps that were written before") {
  const Directory directory;
  const auto write = [&](std::optional<std::int64_t> purge_step, int from, int to, double number) {
    ga::SummaryWriter writer({.directory = directory / "run", .purge_step = purge_step});
    for (int step = from; step <= to; ++step) writer.add_scalar("loss", number, step);
  };
  write({}, 1, 6, 0.5);
  write(4, 4, 8, 0.25);
  const auto files = event_files_in(directory / "run");
  REQUIRE(files.size() == 2);
  const auto second = events_of(text_of(files[1]));
  CHECK(second[0].version == "brain.Event:2");
  for (const auto start : {std::size_t{1}, std::size_t{2}}) {
    CHECK(second[start].starts);
    CHECK(second[start].step == 4);
  }
  CHECK_FALSE(second[3].starts);
  CHECK_FALSE(events_of(text_of(files[0]))[1].starts);
  CHECK(curves_in(directory / "run")["loss"] ==
        Curve{{1, 0.5F}, {2, 0.5F}, {3, 0.5F}, {4, 0.25F}, {5, 0.25F}, {6, 0.25F}, {7, 0.25F}, {8, 0.25F}});
  write({}, 8, 8, 1);  // without it there are duplicates
  CHECK(curves_in(directory / "run")["loss"].size() == 9);
  write(0, 0, 0, 2);
  CHECK(curves_in(directory / "run")["loss"] == Curve{{0, 2.0F}});
}

TEST_CASE("SummaryWriter: files are read in the order of their beginning") {
  const Directory directory;
  std::vector<std::filesystem::path> begun;
  const auto begin = [&] { begun.push_back(ga::SummaryWriter({.directory = directory / "run"}).path()); };
  for (int i = 0; i < 12; ++i) begin();  // in one second
  CHECK(event_files_in(directory / "run") == begun);
  const auto name = begun[0].filename().string();
  CHECK(name.starts_with("events.out.tfevents."));
  CHECK(split(name, '.').at(3).size() == 10);
  CHECK(contains(name, "." + std::to_string(getpid()) + "."));

  const auto ahead = directory / "run" / "events.out.tfevents.4000000000.machine.99999.9";  // later than the clock
  write_text(ahead, "");
  begun.push_back(ahead);
  for (int i = 0; i < 3; ++i) begin();
  CHECK(event_files_in(directory / "run") == begun);

  for (const auto* other : {"events.out.tfevents.", "events.out.tfevents.x", "events.out.tfevents.-5.a.b",
                            "events.out.tfevents.99999999999999999999999.a", "checkpoint.9999999999"})
    write_text(directory / "run" / other, "");
  begin();  // other files do not matter
  CHECK(std::filesystem::exists(begun.back()));
}

TEST_CASE("SummaryWriter: two simultaneous writers in one directory have a file each") {
  const Directory directory;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int begun = 0; begun < 20; ++begun) {
        ga::SummaryWriter writer({.directory = directory / "run"});
        for (int step = 0; step < 10; ++step) writer.add_scalar("x" + std::to_string(i), step, step);
      }
    });
  for (auto& thread : threads) thread.join();
  const auto files = event_files_in(directory / "run");
  CHECK(files.size() == 80);
  for (auto& path : files) {
    const auto records = records_of(text_of(path));
    CHECK(records.all);
    CHECK(records.whole.size() == 11);
  }
}

TEST_CASE("SummaryWriter: invalid options are refused immediately") {
  const Directory directory;
  REQUIRE_ERROR("SummaryWriter: directory must be given", ga::SummaryWriter({}));
  REQUIRE_ERROR("SummaryWriter: flush_every must be >= 0 seconds, got -1",
                ga::SummaryWriter({.directory = directory / "run", .flush_every = -1s}));
  REQUIRE_ERROR(
      "SummaryWriter: flush_every must be >= 0 seconds, got nan",
      ga::SummaryWriter({.directory = directory / "run", .flush_every = std::chrono::duration<double>(not_a_number)}));
  CHECK_FALSE(std::filesystem::exists(directory / "run"));
  write_text(directory / "file", "");
  REQUIRE_ERROR((directory / "file").string() + ": must be a directory",
                ga::SummaryWriter({.directory = directory / "file"}));
  REQUIRE_ERROR("/proc/run: must be a directory, or one that can be created",
                ga::SummaryWriter({.directory = "/proc/run"}));
}
