// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/run_page.hpp>

#include "support/files.hpp"
#include "support/warnings.hpp"
#include "watching/page.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace ga = gradaccum;
using namespace testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();

/// Returns curves as bytes, which are equal only if all numbers have the same bits.
std::string bits_of(ga::Curves curves) {
  ga::Archive archive;
  curves.state(archive);
  std::string bits;
  for (auto& [name, value] : archive.values()) {
    const auto& tensor = std::get<at::Tensor>(value);
    bits += name + std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bits;
}

/// Saves curves to a state and loads them.
ga::Curves reloaded(ga::Curves curves) {
  ga::Archive saved;
  saved("curves", curves);
  ga::Archive loading(saved.values());
  ga::Curves loaded;
  loading("curves", loaded);
  loading.check_all_used();
  return loaded;
}

std::vector<double> noise(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> all(count);
  for (auto& number : all) number = normal(random);
  return all;
}

const std::vector<std::string> hostile_names{
    "</script><img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "</title></svg></style><script>alert(1)</script>",
    "javascript:alert(1)",
    "&lt;script&gt;&amp;&#60;",
    "]]><!--",
    "-->",
    std::string("zero\0byte", 9),
    "bell\a escape\x1b[31m\x7f",
    "not UTF-8: \xff\xfe\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82",
    "turned \xe2\x80\xae around \xe2\x81\xa6",
    "c1 \xc2\x85 none \xef\xbf\xbf mark \xef\xbb\xbf",
    "{} {0} %s",
    "`${alert(1)}`",
    "",
    "/",
    "a/b/",
    "train/</svg>",
    "memory/</svg><b>",
    std::string(1 << 16, 'x'),
    std::string(1 << 16, '\xff'),
    "größe/Ω 损失 🙂",
};

ga::RunPageOptions at_once(const std::filesystem::path& path) {
  return {.path = path, .title = "A run", .every = std::chrono::seconds(0)};
}

}  // namespace

TEST_CASE("Curve: a million points become few pieces, which keep the extremes") {
  const auto numbers = noise(1'000'000, 1);
  ga::Curve curve;
  for (std::size_t i = 0; i < numbers.size(); ++i) curve.add(static_cast<std::int64_t>(i) + 1, numbers[i]);
  REQUIRE(curve.pieces().size() <= 256);
  REQUIRE(curve.pieces().size() > 128);
  CHECK(points_of(curve) == 1'000'000);
  std::int64_t after = 0;
  for (auto& piece : curve.pieces()) {
    REQUIRE(piece.first == after + 1);
    const auto begin = numbers.begin() + (piece.first - 1), end = numbers.begin() + piece.last;
    const auto lowest = std::min_element(begin, end), highest = std::max_element(begin, end);
    REQUIRE(piece.lowest.value == *lowest);
    REQUIRE(piece.lowest.update == lowest - numbers.begin() + 1);
    REQUIRE(piece.highest.value == *highest);
    REQUIRE(piece.highest.update == highest - numbers.begin() + 1);
    REQUIRE(piece.finite == piece.last - piece.first + 1);
    REQUIRE(piece.mean == Approx(std::accumulate(begin, end, 0.0) / static_cast<double>(piece.finite)).margin(1e-9));
    after = piece.last;
  }
  CHECK(after == 1'000'000);
  CHECK(curve.last().update == 1'000'000);
  CHECK(curve.last().value == numbers.back());
}

TEST_CASE("Curve: few points are kept as they are") {
  ga::Curve curve;
  for (std::int64_t update = 10; update <= 2560; update += 10) curve.add(update, 1.0 / static_cast<double>(update));
  REQUIRE(curve.pieces().size() == 256);
  CHECK(curve.level() == 0);
  CHECK(curve.pieces()[7].mean == 1.0 / 80);
  curve.add(2570, 0);
  CHECK(curve.pieces().size() <= 256);
  CHECK(curve.level() > 0);
}

TEST_CASE("Curve: repeated points occur once") {
  ga::Curves straight, again;
  const auto numbers = noise(2000, 2);
  const auto add = [&](ga::Curves& curves, std::size_t from, std::size_t to, double more = 0) {
    for (auto i = from; i < to; ++i) curves.add("train/loss", static_cast<std::int64_t>(i), numbers[i] + more);
  };
  add(straight, 0, 200);
  add(again, 0, 150, 0);
  add(again, 120, 200);
  CHECK(bits_of(straight) == bits_of(again));
  add(again, 0, 200);
  CHECK(bits_of(straight) == bits_of(again));
  add(straight, 200, 2000);
  add(again, 200, 1700);
  add(again, 1600, 2000);  // a part of a piece of 8 or 16 points is lost
  CHECK(points_of(*again.find("train/loss")) <= 2000);
  CHECK(points_of(*again.find("train/loss")) >= 2000 - 16);
  CHECK(again.find("train/loss")->last().value == straight.find("train/loss")->last().value);
}

TEST_CASE("Curve: NaN and infinities are counted, and do not count as extremes") {
  ga::Curve curve;
  for (const double number : {not_a_number, inf, 2.0, -inf, 1.0, 3.0, not_a_number}) curve.add(5, number);
  REQUIRE(curve.pieces().size() == 1);
  const auto& piece = curve.pieces()[0];
  CHECK(piece.finite == 3);
  CHECK(piece.gaps == 4);
  CHECK(piece.mean == Approx(2));
  CHECK(piece.lowest.value == 1);
  CHECK(piece.highest.value == 3);
  CHECK(std::isnan(curve.last().value));
}

TEST_CASE("Curve: the largest numbers and updates") {
  constexpr double most = std::numeric_limits<double>::max();
  ga::Curve curve;
  for (int i = 0; i < 1000; ++i) curve.add(i, i % 2 == 0 ? most : -most);
  for (auto& piece : curve.pieces()) CHECK(std::isfinite(piece.mean));
  ga::Curve far;
  for (const std::int64_t update :
       {std::numeric_limits<std::int64_t>::min(), std::int64_t{0}, std::numeric_limits<std::int64_t>::max()})
    far.add(update, 1);
  CHECK(far.pieces().size() == 3);
  for (std::int64_t i = 0; i < 1000; ++i) far.add(std::numeric_limits<std::int64_t>::max() - 1000 + i, 1);
  CHECK(far.pieces().size() <= 256);
}

TEST_CASE("Curves: the kept points do not depend on the number of saves and loads") {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    std::mt19937 random(seed);
    ga::Curves straight, stopped;
    const auto numbers = noise(5000, seed + 10);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto update = static_cast<std::int64_t>(i / 2);
      for (auto* const curves : {&straight, &stopped}) {
        curves->add(i % 2 == 0 ? "train/loss" : "train/lr", update, i % 70 == 3 ? not_a_number : numbers[i]);
        if (i % 100 == 0) curves->add("validation/loss", update, i % 300 == 0 ? not_a_number : numbers[i]);
      }
      if (random() % 50 == 0) stopped = reloaded(stopped);
    }
    REQUIRE(bits_of(straight) == bits_of(stopped));
    REQUIRE(straight.all().size() == 3);
    stopped.add("train/loss", 2500, 0);
    CHECK(bits_of(straight) != bits_of(stopped));
  }
}

TEST_CASE("Curves: any names survive a state on the disk") {
  const Directory directory;
  ga::Curves curves;
  for (std::size_t i = 0; i < hostile_names.size(); ++i) curves.add(hostile_names[i], 1, static_cast<double>(i));
  ga::Archive saved;
  saved("curves", curves);
  std::filesystem::create_directories(directory / "state");
  ga::io::write_state(saved, directory / "state");
  ga::Archive loading(ga::io::read_state(directory / "state"));
  ga::Curves loaded;
  loading("curves", loaded);
  CHECK(bits_of(curves) == bits_of(loaded));
  CHECK(loaded.all()[0].name == hostile_names[0]);
}

TEST_CASE("Curves: no curves have a state, too") {
  const Directory directory;
  ga::Curves curves, loaded;
  ga::Archive saved;
  saved("curves", curves);
  std::filesystem::create_directories(directory / "state");
  ga::io::write_state(saved, directory / "state");
  loaded.add("of another run", 1, 1);
  ga::Archive loading(ga::io::read_state(directory / "state"));
  loading("curves", loaded);
  CHECK(loaded.empty());
}

TEST_CASE("Curves: an invalid state is an error, and changes nothing") {
  ga::Curves curves;
  for (int i = 0; i < 3; ++i) curves.add("train/loss", i, 0.5 * i);
  ga::Archive saved;
  saved("curves", curves);
  const auto whole = std::get<at::Tensor>(saved.values().at("curves.packed.whole"));
  const auto real = std::get<at::Tensor>(saved.values().at("curves.packed.real"));
  const auto load = [&](const std::string& name, const at::Tensor& tensor) {
    auto values = saved.values();
    values["curves.packed." + name] = tensor;
    ga::Archive loading(values);
    ga::Curves loaded;
    loaded.add("before", 1, 1);
    const auto before = bits_of(loaded);
    const auto error = error_of([&] { loading("curves", loaded); });
    CHECK(bits_of(loaded) == before);
    return error;
  };
  const auto with = [&](std::int64_t place, std::int64_t number) {
    auto changed = whole.clone();
    changed[place] = number;
    return load("whole", changed);
  };
  CHECK(contains(load("whole", whole.to(at::kInt)), "must be a row of"));
  CHECK(contains(load("real", real.reshape({1, -1})), "must be a row of"));
  CHECK(contains(load("whole", whole.narrow(0, 0, 5)), "must not be truncated"));
  CHECK(contains(load("real", real.narrow(0, 0, 2)), "must not be truncated"));
  CHECK(contains(load("real", torch::cat({real, real})), "as many numbers as they say"));
  CHECK(contains(with(0, -1), "must not be truncated"));
  CHECK(contains(with(0, 1'000'000), "must not be truncated"));
  CHECK(contains(with(1, -1), "a level in [0, 62], got 3 and -1"));
  CHECK(contains(with(1, 63), "a level in [0, 62], got 3 and 63"));
  CHECK(contains(with(2, std::numeric_limits<std::int64_t>::max()), "must not be truncated"));
  CHECK(contains(with(2, -1), "must have 1 to 256 pieces and a level in [0, 62], got 0 and 0"));
  CHECK(contains(with(3, 7), "piece 0 of a saved curve"));   // begins after its end
  CHECK(contains(with(5, -2), "piece 0 of a saved curve"));  // a count
  CHECK(contains(with(5, 0), "piece 0 of a saved curve"));   // no points
  CHECK(contains(with(9, 0), "piece 1 of a saved curve"));   // begins before its predecessor
  auto not_finite = real.clone();
  not_finite[1] = not_a_number;
  CHECK(contains(load("real", not_finite), "piece 0 of a saved curve"));
  const auto with_real = [&](std::int64_t place, double number) {  // the second piece has 0.5 three times, from index 4
    auto changed = real.clone();
    changed[place] = number;
    return load("real", changed);
  };
  const std::string what =
      "lowest <= mean <= highest: load another state. Got updates 1 to 1, points 1 and 0, numbers ";
  CHECK(contains(with_real(4, 2), what + "2, 0.5 and 0.5"));
  CHECK(contains(with_real(5, -1), what + "0.5, 0.5 and -1"));
  CHECK(contains(with_real(6, 3), what + "0.5, 3 and 0.5"));
  CHECK(contains(with_real(6, not_a_number), what + "0.5, nan and 0.5"));
}

TEST_CASE("RunPage: complete while it runs, and reloads itself until it has ended") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  CHECK_FALSE(std::filesystem::exists(path));
  page.set("optimizer", "SGD\nlr 1e-3");
  page.tile("updates", "100", "of 200");
  page.number("samples", 6400);
  for (int i = 1; i <= 100; ++i) {
    page.add("train/loss", i, 1.0 / i);
    page.update({.fraction = i / 200.0});
  }
  const Page running(text_of(path));
  CHECK(running.state() == "running");
  CHECK(running["title"] == "A run");
  CHECK(running["fraction"] == 0.5);
  CHECK(running["left"].is_number());
  CHECK(running["refresh"] == 1);
  CHECK(running.last("train/loss") == 0.01);
  CHECK(running.highest("train/loss") == 1);
  CHECK(running.number("samples") == 6400);
  CHECK(running.tile("updates") == "100");
  CHECK(running.setting("optimizer") == "SGD\nlr 1e-3");
  page.end();
  const Page over(text_of(path));
  CHECK(over.state() == "finished");
  CHECK(over["fraction"] == 1);
  page.end(ga::RunEnd::stopped, "loss <was> best");
  CHECK(Page(text_of(path)).state() == "stopped: loss <was> best");
  page.update({.fraction = 0.6});  // it continues
  CHECK(Page(text_of(path)).state() == "running");
  CHECK_FALSE(std::filesystem::exists(directory / "run.html.part"));
}

TEST_CASE("RunPage: an entry with an existing name is replaced in its position") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  for (const auto* const text : {"first", "second"}) {
    page.set("a", text);
    page.set("b", "other");
    page.tile("loss", 0.25, text);
    page.number("count", 7, text);
    page.number("share", not_a_number);
  }
  page.number("share", 0.1 + 0.2);
  page.update();
  const Page written(text_of(path));
  CHECK(written["settings"] == nlohmann::json::parse(R"([["a", "second"], ["b", "other"]])"));
  CHECK(written["tiles"] == nlohmann::json::parse(R"([["loss", 0.25, "second"]])"));
  CHECK(written["numbers"] == nlohmann::json::parse(R"([["count", 7, "second"], ["share", 0.30000000000000004, ""]])"));
  CHECK(written.number("count").is_number_integer());
}

TEST_CASE("RunPage: drawings are lines of numbers, and the page keeps the last of a name") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  const auto show = [&](const ga::Drawing& drawing) { page.draw("frames", {drawing}); };
  show({.caption = "replaced"});
  show({.width = 4, .height = 2.5, .lines = {{.points = {{0, 1}, {4, -0.5}}, .colour = 7}}, .caption = "</svg><b>"});
  page.update();
  CHECK(Page(text_of(path))["drawings"] ==
        nlohmann::json::parse(R"([["frames", [[4.0, 2.5, "</svg><b>", [[2.0, 7, [[0.0, 1.0], [4.0, -0.5]]]]]]]])"));
  REQUIRE_ERROR("numbers of a drawing must be finite, got nan", show({.lines = {{.points = {{0, not_a_number}}}}}));
  REQUIRE_ERROR("numbers of a drawing must be finite, got inf", show({.width = inf}));
  REQUIRE_ERROR("a width and a height above 0, got 0 and 1", show({.width = 0}));
  REQUIRE_ERROR("the colour of a line must be in [0, 7], got 8", show({.lines = {{.points = {{0, 0}}, .colour = 8}}}));
  REQUIRE_ERROR("a line of a drawing must have a point", show({.lines = {{}}}));
}

TEST_CASE("RunPage: a page that is never ended becomes interrupted, and one without an update is not written") {
  const Directory directory;
  {
    ga::RunPage page(at_once(directory / "written.html")), other(at_once(directory / "other.html"));
    page.update();
  }
  CHECK(Page(text_of(directory / "written.html")).state() == "interrupted");
  CHECK_FALSE(std::filesystem::exists(directory / "other.html"));
}

TEST_CASE("RunPage: is written at intervals") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page({.path = path, .every = std::chrono::hours(1)});
  page.add("loss", 1, 1);
  CHECK(page.is_due());
  page.update();
  CHECK_FALSE(page.is_due());
  const auto first = text_of(path);
  page.add("loss", 2, 0.5);
  page.update();
  CHECK(text_of(path) == first);
  page.end();
  CHECK(Page(text_of(path)).last("loss") == 0.5);
}

TEST_CASE("RunPage: several runs on the same axes") {
  const Directory directory;
  const auto path = directory / "runs.html";
  ga::RunPage page(at_once(path));
  ga::Curves done;
  for (int i = 1; i <= 50; ++i) done.add("train/loss", i, 2.0 / i);
  page.add_run("64 x 1", done);
  auto& running = page.add_run("16 x 4");
  page.update();
  for (int i = 1; i <= 20; ++i) running.add("train/loss", i, 3.0 / i);
  page.add_run("one more");  // does not affect the others
  running.add("train/loss", 21, 0.25);
  page.update();
  const Page written(text_of(path));
  CHECK(written.last("train/loss", "16 x 4") == 0.25);
  CHECK(written.highest("train/loss", "64 x 1") == 2);
  REQUIRE(written["runs"].size() == 4);
  CHECK(written["runs"][0] == nlohmann::json::parse(R"({"name": "", "curves": []})"));  // the page's default run
}

TEST_CASE("RunPage: any given names and values appear only as text") {
  const Directory directory;
  const auto path = directory / "run.html";
  auto page_with = [&](const std::vector<std::string>& texts) {
    ga::RunPage page({.path = path, .title = texts[0], .every = std::chrono::seconds(0)});
    for (auto& text : texts) {
      for (int i = 0; i < 300; ++i) page.add(text, i, i == 5 ? not_a_number : i == 7 ? 1e300 : 1.0 / i);
      page.set(text, text);
      page.tile(text, text, text);
      page.number(text, 1.5, text);
      page.draw(text, {{.lines = {{.points = {{0.5, 0.5}}}}, .caption = text}});
      page.add_run(text).add(text, 1, inf);
    }
    page.end(ga::RunEnd::interrupted, texts[0]);
    return text_of(path);
  };
  for (auto& name : hostile_names) {
    const auto text = page_with({name});
    const Page page(text);  // throws if anything but the JSON depends on a name
    const auto shown =
        nlohmann::json::parse(nlohmann::json(name).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
    CHECK(page["settings"][0][0] == shown);
    CHECK(page["runs"][0]["curves"][0][0] == shown);
    CHECK(page["runs"][1]["name"] == shown);
  }
  const auto all = page_with(hostile_names);
  CHECK_FALSE(contains(all, "http://"));
  CHECK_FALSE(contains(all, "https://"));
  CHECK_FALSE(contains(all, "url("));
  CHECK_FALSE(contains(all, "innerHTML"));
}

TEST_CASE("Page: a page with unescaped names is detected as invalid") {
  using namespace ga::detail;
  const auto page_of = [](const std::string& json) {
    return std::string(page_before_json) + json + std::string(page_after_json);
  };
  CHECK(Page(page_of(R"({"title": "\u003c/script>"})"))["title"] == "</script>");
  for (auto& name : hostile_names)
    if (contains(name, "<") || contains(name, "\xff") || contains(name, "\a"))
      CHECK(contains(error_of([&] { Page(page_of("{\"title\": \"" + name + "\"}")); }), "can break out"));
  CHECK(contains(error_of([&] { Page("<b>" + page_of("{}")); }), "not the library's text"));
}

TEST_CASE("RunPage: non-finite numbers are gaps, and all others keep their bits") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  const std::vector<double> numbers{1.0 / 3, not_a_number, 5e-324, 1e300, -inf, 0.1 + 0.2};
  for (std::size_t i = 0; i < numbers.size(); ++i) page.add("loss", static_cast<std::int64_t>(i), numbers[i]);
  for (const double last : {not_a_number, inf, -inf}) page.add_run(std::to_string(last)).add("loss", 1, last);
  page.end();
  const Page written(text_of(path));
  const auto pieces = written.curve("loss")[2];
  REQUIRE(pieces.size() == numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    CHECK(pieces[i][7] == (std::isfinite(numbers[i]) ? 0 : 1));
    for (const std::size_t place : {2, 3, 4})
      CHECK(pieces[i][place] == (std::isfinite(numbers[i]) ? nlohmann::json(numbers[i]) : nlohmann::json()));
  }
  CHECK(written.curve("loss", "nan")[1] == "NaN");
  CHECK(written.curve("loss", "inf")[1] == "∞");
  CHECK(written.curve("loss", "-inf")[1] == "−∞");
}

TEST_CASE("RunPage: an unwritable page is an error with its name") {
  const Directory directory;
  write_text(directory / "file", "text");
  const auto none = directory / "file/run.html";
  REQUIRE_ERROR((directory / "file").string() + ": must be a directory, or one that can be created, got File exists",
                ga::RunPage({.path = none}));
  REQUIRE_ERROR("must be a file", ga::RunPage({.path = directory / ""}));
  REQUIRE_ERROR("RunPage: path must be given", ga::RunPage({}));
  REQUIRE_ERROR("RunPage: every must be >= 0 s, got -1 s",
                ga::RunPage({.path = directory / "run.html", .every = std::chrono::seconds(-1)}));
  const auto path = directory / "is/made/run.html";
  ga::RunPage page(at_once(path));
  page.update();
  std::filesystem::remove_all(directory / "is");
  write_text(directory / "is", "a file");
  REQUIRE_ERROR((directory / "is").string() + ": must be a directory", page.update());
  std::filesystem::remove(directory / "is");
  page.update();  // makes its folder again
  CHECK(Page(text_of(path)).state() == "running");
}

TEST_CASE("RunPage: a full disk leaves the page unchanged, and no other files") {
  if (!std::filesystem::exists("/dev/full")) SKIP("no /dev/full");
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  page.update();
  const auto before = text_of(path);
  std::filesystem::create_symlink("/dev/full", directory / "run.html.part");
  REQUIRE_ERROR(path.string() + ": must be written, got No space left on device", page.update());
  CHECK(text_of(path) == before);
  CHECK_FALSE(std::filesystem::is_symlink(directory / "run.html.part"));
  std::filesystem::create_symlink("/dev/full", directory / "other.html.part");
  REQUIRE_ERROR("other.html: must be written, got No space left on device",
                ga::RunPage({.path = directory / "other.html"}));
  CHECK_FALSE(std::filesystem::exists(directory / "other.html"));
}

TEST_CASE("RunPage: a page that is not ended, and cannot be written any more, warns") {
  const Directory directory;
  const Warnings warnings;
  {
    ga::RunPage page(at_once(directory / "is/run.html"));
    page.update();
    std::filesystem::remove_all(directory / "is");
    write_text(directory / "is", "a file");
  }
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], "RunPage: the page was not written: " + (directory / "is").string()));
}

TEST_CASE("RunPage: resumes from a state with one curve, and its time") {
  const Directory directory;
  ga::RunPage first(at_once(directory / "a.html")), second(at_once(directory / "b.html")),
      straight(at_once(directory / "c.html"));
  const auto add = [](ga::RunPage& page, int from, int to) {
    for (int i = from; i < to; ++i) page.add("train/loss", i, std::sin(i));
  };
  add(first, 0, 700);
  ga::Archive saved;
  saved("page", first);
  add(first, 700, 900);  // lost after the state
  add(second, 0, 50);    // lost, too
  ga::Archive loading(saved.values());
  loading("page", second);
  add(second, 700, 2000);
  add(straight, 0, 2000);
  CHECK(bits_of(second.curves()) == bits_of(straight.curves()));
  CHECK(bits_of(first.curves()) != bits_of(straight.curves()));
}
