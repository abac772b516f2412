// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/watching/axis.hpp>
#include <gradaccum/detail/watching/chart.hpp>
#include <gradaccum/detail/watching/curve.hpp>
#include <gradaccum/detail/watching/axis_range.hpp>
#include <gradaccum/detail/watching/html_text.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/detail/watching/page_content.hpp>
#include <gradaccum/detail/watching/page_style.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/run_page.hpp>

#include "support/files.hpp"
#include "watching/html.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();

/// All of curves, as bytes: equal only where all numbers have the same bits.
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

/// Gone to a state and back.
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
    std::string(1 << 20, 'x'),
    std::string(1 << 20, '\xff'),
    "größe/Ω 损失 🙂",
};

ga::RunPageOptions at_once(const std::filesystem::path& path) {
  return {.path = path, .title = "A run", .every = std::chrono::seconds(0)};
}

}  // namespace

TEST_CASE("Curve: a million points are few pieces, which keep the extremes") {
  const auto numbers = noise(1'000'000, 1);
  inner::Curve curve;
  for (std::size_t i = 0; i < numbers.size(); ++i) curve.add(static_cast<std::int64_t>(i) + 1, numbers[i]);
  REQUIRE(curve.pieces().size() <= 256);
  REQUIRE(curve.pieces().size() > 128);
  CHECK(curve.points() == 1'000'000);
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
  CHECK(curve.lowest()->value == *std::min_element(numbers.begin(), numbers.end()));
  CHECK(curve.highest()->value == *std::max_element(numbers.begin(), numbers.end()));
  CHECK(curve.last().update == 1'000'000);
  CHECK(curve.last().value == numbers.back());
}

TEST_CASE("Curve: few points are kept as they are") {
  inner::Curve curve;
  for (std::int64_t update = 10; update <= 2560; update += 10) curve.add(update, 1.0 / static_cast<double>(update));
  REQUIRE(curve.pieces().size() == 256);
  CHECK(curve.level() == 0);
  CHECK(curve.pieces()[7].mean == 1.0 / 80);
  curve.add(2570, 0);
  CHECK(curve.pieces().size() <= 256);
  CHECK(curve.level() > 0);
}

TEST_CASE("Curve: what was done once more is there once") {
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
  add(again, 1600, 2000);  // of pieces of 8 or 16, a part of one is lost
  CHECK(again.find("train/loss")->points() <= 2000);
  CHECK(again.find("train/loss")->points() >= 2000 - 16);
  CHECK(again.find("train/loss")->last().value == straight.find("train/loss")->last().value);
}

TEST_CASE("Curve: NaN and infinities are counted, and are no extremes") {
  inner::Curve curve;
  for (const double number : {not_a_number, inf, 2.0, -inf, 1.0, 3.0, not_a_number}) curve.add(5, number);
  REQUIRE(curve.pieces().size() == 1);
  const auto& piece = curve.pieces()[0];
  CHECK(piece.finite == 3);
  CHECK(piece.gaps == 4);
  CHECK(piece.mean == Approx(2));
  CHECK(curve.lowest()->value == 1);
  CHECK(curve.highest()->value == 3);
  CHECK(std::isnan(curve.last().value));
  inner::Curve none;
  CHECK_FALSE(none.lowest());
  none.add(1, not_a_number);
  CHECK_FALSE(none.lowest());
  CHECK(none.nearest(1) == nullptr);
}

TEST_CASE("Curve: numbers that are as large as numbers are, and updates, too") {
  constexpr double most = std::numeric_limits<double>::max();
  inner::Curve curve;
  for (int i = 0; i < 1000; ++i) curve.add(i, i % 2 == 0 ? most : -most);
  for (auto& piece : curve.pieces()) CHECK(std::isfinite(piece.mean));
  inner::Curve far;
  for (const std::int64_t update :
       {std::numeric_limits<std::int64_t>::min(), std::int64_t{0}, std::numeric_limits<std::int64_t>::max()})
    far.add(update, 1);
  CHECK(far.pieces().size() == 3);
  for (std::int64_t i = 0; i < 1000; ++i) far.add(std::numeric_limits<std::int64_t>::max() - 1000 + i, 1);
  CHECK(far.pieces().size() <= 256);
}

TEST_CASE("Curves: what is kept does not depend on how often it was saved and loaded") {
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

TEST_CASE("Curves: names are whatever they are, also in a state on the disk") {
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

TEST_CASE("Curves: none are a state, too") {
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

TEST_CASE("Curves: a state that is none is an error, and changes nothing") {
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
  CHECK(contains(load("whole", whole.narrow(0, 0, 5)), "must not be cut off"));
  CHECK(contains(load("real", real.narrow(0, 0, 2)), "must not be cut off"));
  CHECK(contains(load("real", torch::cat({real, real})), "as many numbers as they say"));
  CHECK(contains(with(0, -1), "must have a name and pieces"));
  CHECK(contains(with(0, 1'000'000), "must not be cut off"));
  CHECK(contains(with(1, -1), "the level of a saved curve"));
  CHECK(contains(with(1, 63), "the level of a saved curve"));
  CHECK(contains(with(2, std::numeric_limits<std::int64_t>::max()), "must not be cut off"));
  CHECK(contains(with(3, 7), "is none"));   // begins after its end
  CHECK(contains(with(5, -2), "is none"));  // a count
  CHECK(contains(with(9, 0), "is none"));   // begins before the one before it
  auto not_finite = real.clone();
  not_finite[1] = not_a_number;
  CHECK(contains(load("real", not_finite), "is none"));
}

TEST_CASE("Axis: ticks are round, inside, and say what they are") {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> mantissa(-10, 10), exponent(-12, 12);
  for (int i = 0; i < 2000; ++i) {
    const double a = mantissa(random) * std::pow(10, exponent(random)),
                 b = a + mantissa(random) * std::pow(10, exponent(random));
    const double low = std::min(a, b), high = std::max(a, b);
    const auto axis = inner::round_axis(low, high, 4);
    INFO("from " << low << " to " << high << ": " << axis.low << " to " << axis.high);
    REQUIRE(axis.low <= low + 1e-5 * (axis.high - axis.low));
    REQUIRE(axis.high >= high - 1e-5 * (axis.high - axis.low));
    REQUIRE(axis.ticks.size() >= 2);
    REQUIRE(axis.ticks.size() <= 12);
    for (auto& tick : axis.ticks) {
      REQUIRE(axis.place(tick.value) > -1e-6);
      REQUIRE(axis.place(tick.value) < 1 + 1e-6);
      REQUIRE(tick.text.size() <= 18);
    }
  }
}

TEST_CASE("Axis: texts") {
  const auto texts = [](const inner::Axis& axis) {
    std::string all;
    for (auto& tick : axis.ticks) all += tick.text + ' ';
    return all;
  };
  CHECK(texts(inner::round_axis(0.1, 2.3, 4)) == "0 1 2 3 ");
  CHECK(texts(inner::round_axis(0.52, 0.88, 4)) == "0.5 0.6 0.7 0.8 0.9 ");
  CHECK(texts(inner::round_axis(0, 3e-4, 4)) == "0 1e-4 2e-4 3e-4 ");
  CHECK(texts(inner::round_axis(0, 31024, 4)) == "0 10k 20k 30k 40k ");
  CHECK(texts(inner::round_axis(-1, 1, 4)) == "-1.0 -0.5 0 0.5 1.0 ");
  CHECK(texts(inner::round_axis(5, 5, 4)) == "0 5 10 ");
  CHECK(texts(inner::round_axis(0, 0, 4)) == "0 0.5 1.0 ");
  CHECK(texts(inner::whole_axis(1, 4690, 5)) == "1000 2000 3000 4000 ");
  CHECK(texts(inner::whole_axis(0, 3, 5)) == "0 1 2 3 ");
  CHECK(texts(inner::whole_axis(1, 1, 5)) == "1 2 ");
  CHECK(texts(inner::whole_axis(0, 2.5e6, 5)) == "0 0.5M 1.0M 1.5M 2.0M 2.5M ");
  CHECK(texts(inner::decades_axis(2e-5, 1e-1)) == "1e-5 1e-4 1e-3 0.01 0.1 ");
  CHECK(texts(inner::round_axis(-1e308, 1e308, 4)).size() > 5);
  CHECK(texts(inner::round_axis(1e15, 1e15 + 1, 4)).size() > 3);
  CHECK(texts(inner::round_axis(0, 5e-324, 4)).size() > 3);
}

TEST_CASE("AxisRange: a few numbers far outside do not flatten the rest, and a curve that falls is whole") {
  std::vector<double> falling;
  for (int i = 0; i < 256; ++i) falling.push_back(0.3 + 2 * std::exp(-i / 10.0));
  CHECK(inner::range_of_axis(falling).high == falling.front());
  auto with_outlier = falling;
  with_outlier.front() = 1e6;
  const auto extent = inner::range_of_axis(with_outlier);
  CHECK(extent.high < 4);
  CHECK(extent.high > 1.5);
  CHECK(extent.low == falling.back());
  with_outlier.front() = -1e6;
  CHECK(inner::range_of_axis(with_outlier).low > -3);
  CHECK(inner::range_of_axis({1, 2, 1e6}).high == 1e6);  // of three, none is far outside
  std::vector<double> zeros(200, 0.0);
  zeros[3] = 1;
  CHECK(inner::range_of_axis(zeros).high == 0);
  CHECK(inner::range_of_axis({}).high > inner::range_of_axis({}).low);
}

TEST_CASE("AxisRange: decades") {
  std::vector<double> steps, cosine;
  for (int i = 0; i < 300; ++i) steps.push_back(std::pow(10, -1 - i / 100));
  for (int i = 1; i < 300; ++i) cosine.push_back(1e-3 * 0.5 * (1 + std::cos(3.14159 * i / 300)));
  CHECK(inner::range_of_axis(steps).spans_decades);
  CHECK_FALSE(inner::range_of_axis(cosine).spans_decades);
  steps.push_back(0);
  CHECK_FALSE(inner::range_of_axis(steps).spans_decades);
}

TEST_CASE("html_text: text stays text") {
  CHECK(inner::html_text("a < b & c > \"d\" 'e' `f`") == "a &lt; b &amp; c &gt; &quot;d&quot; &#39;e&#39; &#96;f&#96;");
  CHECK(inner::html_text("größe Ω 🙂") == "größe Ω 🙂");
  CHECK(inner::html_text("two\nlines\t.") == "two\nlines\t.");
  CHECK(inner::html_text(std::string("\0\a\x1b\x7f", 4)) == "����");
  CHECK(inner::html_text("\xc0\xaf") == "��");            // too long for a slash
  CHECK(inner::html_text("\xed\xa0\x80") == "���");       // half of a pair
  CHECK(inner::html_text("\xf4\x90\x80\x80") == "����");  // beyond the last
  CHECK(inner::html_text("\xe2\x82") == "��");            // cut off
  CHECK(inner::html_text("\xe2\x80\xae") == "�");         // turns the direction
  CHECK(inner::html_text("\xe2\x82\xac\xf0\x9f\x99\x82") == "€🙂");
  CHECK(inner::html_text("abcdef", 3) == "abc…");
  CHECK(inner::html_text("äöü", 3) == "äöü");
  CHECK(inner::html_text(std::string(1 << 20, '<'), 2) == "&lt;&lt;…");
  CHECK(inner::html_text("") == "");
}

TEST_CASE("number_text") {
  CHECK(inner::number_text(0.43123) == "0.4312");
  CHECK(inner::number_text(18760) == "18,760");
  CHECK(inner::number_text(999) == "999");
  CHECK(inner::number_text(-1234567) == "-1,234,567");
  CHECK(inner::number_text(1.25e-5) == "1.25e-05");
  CHECK(inner::number_text(not_a_number) == "NaN");
  CHECK(inner::number_text(-not_a_number) == "NaN");
  CHECK(inner::number_text(inf) == "∞");
  CHECK(inner::exact_text(0.1 + 0.2) == "0.30000000000000004");
  CHECK(inner::exact_text(-not_a_number) == "nan");
  CHECK(inner::count_text(std::numeric_limits<std::int64_t>::min()) == "-9,223,372,036,854,775,808");
}

TEST_CASE("charts: which curves share one, and in which order") {
  std::deque<inner::PageRun> runs(1);
  for (const char* const name : {"memory/rest", "train/lr", "train/loss", "validation/accuracy", "memory/gradients",
                                 "validation/loss", "own", "test/f1"})
    for (int i = 1; i < 4; ++i) runs[0].curves.add(name, i, i);
  const auto charts = inner::charts_of(runs);
  std::vector<std::string> names;
  for (auto& chart : charts) names.push_back(chart.name);
  CHECK(names == std::vector<std::string>{"loss", "accuracy", "own", "f1", "lr", "memory"});
  REQUIRE(charts[0].series.size() == 2);
  CHECK(charts[0].series[0].name == "train");
  CHECK(charts[0].series[1].name == "validation");
  CHECK(charts[0].series[1].colour == 1);
  CHECK(charts[5].is_stacked);
  CHECK(charts[5].series.size() == 2);
  CHECK_FALSE(charts[0].is_stacked);
}

TEST_CASE("charts: several runs have a colour each, and of what is stacked the whole") {
  std::deque<inner::PageRun> runs(1);
  for (const char* const run : {"64 x 1", "16 x 4"}) {
    auto& curves = runs.emplace_back(inner::PageRun{run, {}}).curves;
    for (int i = 1; i < 4; ++i) {
      curves.add("train/loss", i, i);
      curves.add("validation/loss", i, i);
      curves.add("memory/parameters", i, 100 * i);
      curves.add("memory/rest", i, 20 * i);
    }
  }
  const auto charts = inner::charts_of(runs);
  REQUIRE(charts.size() == 2);
  REQUIRE(charts[0].series.size() == 4);
  CHECK(charts[0].series[1].name == "64 x 1 · validation");
  CHECK(charts[0].series[1].dashed);
  CHECK(charts[0].series[0].colour == charts[0].series[1].colour);
  CHECK(charts[0].series[2].colour != charts[0].series[1].colour);
  CHECK_FALSE(charts[1].is_stacked);
  REQUIRE(charts[1].series.size() == 2);
  CHECK(charts[1].series[0].name == "64 x 1");
  CHECK(charts[1].series[1].curve.last().value == 360);
}

TEST_CASE("RunPage: whole while it runs, and reads itself anew until it is over") {
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
  const auto refreshes = [](const Html& html) {
    int count = 0;
    for (auto& meta : html.all("meta"))
      count += meta.attributes.contains("http-equiv") && meta.attributes.at("http-equiv") == "refresh";
    return count;
  };
  const Html running(text_of(path));
  CHECK(refreshes(running) == 1);
  CHECK(running.text_of_class("state running") == "running");
  CHECK(running.all("progress").at(0).attributes.at("value") == "0.5000");
  CHECK(running.all("title").at(0).text == "50 % · A run");
  CHECK(contains(text_of(path), "left</strong>"));
  CHECK(running.curve("train/loss") == "0.01");
  CHECK(running.curve("train/loss", "highest") == "1");
  CHECK(running.number("samples") == "6400");
  CHECK(contains(text_of(path), "SGD\nlr 1e-3"));
  page.end();
  const Html over(text_of(path));
  CHECK(refreshes(over) == 0);
  CHECK(over.text_of_class("state finished") == "finished");
  CHECK(over.all("progress").at(0).attributes.at("value") == "1.0000");
  CHECK_FALSE(contains(text_of(path), "left</strong>"));
  page.end(ga::RunEnd::stopped, "loss <was> best");
  CHECK(Html(text_of(path)).text_of_class("state stopped") == "stopped early: loss &lt;was&gt; best");
  page.update({.fraction = 0.6});  // it goes on
  CHECK(refreshes(Html(text_of(path))) == 1);
  CHECK_FALSE(std::filesystem::exists(directory / "run.html.part"));
}

TEST_CASE("RunPage: one that is never ended was interrupted, and one that was never written is not there") {
  const Directory directory;
  {
    ga::RunPage page(at_once(directory / "written.html")), other(at_once(directory / "other.html"));
    page.update();
  }
  CHECK(Html(text_of(directory / "written.html")).text_of_class("state interrupted") == "interrupted");
  CHECK_FALSE(std::filesystem::exists(directory / "other.html"));
}

TEST_CASE("RunPage: is written now and then") {
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
  CHECK(Html(text_of(path)).curve("loss") == "0.5");
}

TEST_CASE("RunPage: of one's own several runs, on the same axes") {
  const Directory directory;
  const auto path = directory / "runs.html";
  ga::RunPage page(at_once(path));
  ga::Curves done;
  for (int i = 1; i <= 50; ++i) done.add("train/loss", i, 2.0 / i);
  page.add_run("64 x 1", done);
  auto& running = page.add_run("16 x 4");
  page.update();
  for (int i = 1; i <= 20; ++i) running.add("train/loss", i, 3.0 / i);
  page.add_run("one more");  // does not move the others
  running.add("train/loss", 21, 0.25);
  page.update();
  const Html html(text_of(path));
  CHECK(html.curve("train/loss", "last", "16 x 4") == "0.25");
  CHECK(html.curve("train/loss", "highest", "64 x 1") == "2");
  CHECK(html.all("figure").size() == 1);
  CHECK(html.all("path").size() == 2);
  CHECK(html.all("li").size() == 2);
}

TEST_CASE("RunPage: whatever it is given, nothing in it is anything but text") {
  const Directory directory;
  const auto path = directory / "run.html";
  auto page_with = [&](const std::vector<std::string>& texts) {
    ga::RunPage page({.path = path, .title = texts[0], .every = std::chrono::seconds(0)});
    for (auto& text : texts) {
      for (int i = 0; i < 300; ++i) page.add(text, i, i == 5 ? not_a_number : i == 7 ? 1e300 : 1.0 / i);
      page.set(text, text);
      page.tile(text, text, text);
      page.number(text, 1.5, text);
      page.add_run(text).add(text, 1, inf);
    }
    page.end(ga::RunEnd::interrupted, texts[0]);
    return text_of(path);
  };
  const Html harmless(page_with(std::vector<std::string>(1, "harmless/name")));
  const std::set<std::string> attributes{"aria-label",
                                         "aria-labelledby",
                                         "charset",
                                         "class",
                                         "colspan",
                                         "content",
                                         "cx",
                                         "cy",
                                         "d",
                                         "data-curve",
                                         "data-name",
                                         "data-run",
                                         "data-update",
                                         "data-value",
                                         "data-what",
                                         "dy",
                                         "height",
                                         "http-equiv",
                                         "id",
                                         "lang",
                                         "max",
                                         "name",
                                         "preserveAspectRatio",
                                         "r",
                                         "role",
                                         "scope",
                                         "text-anchor",
                                         "value",
                                         "viewBox",
                                         "width",
                                         "x",
                                         "x1",
                                         "x2",
                                         "y",
                                         "y1",
                                         "y2"};
  for (auto& name : hostile_names) {
    const auto page = page_with({name});
    INFO("name: " << inner::html_text(name));
    REQUIRE(page.size() < 400'000);
    const Html html(page);
    for (auto& attribute : html.attributes()) CHECK(attributes.contains(attribute));
    for (auto& tag : html.names()) {
      const bool is_known = harmless.names().contains(tag) || tag == "ul" || tag == "/ul" || tag == "li" ||
                            tag == "/li" || tag == "circle/" || tag == "circle" || tag == "path";
      CHECK(is_known);
    }
    CHECK(html.all("style").size() == 1);
    CHECK(html.all("style")[0].text == inner::page_style);
    CHECK(page.find('\0') == std::string::npos);
  }
  const auto all = page_with(hostile_names);
  CHECK(all.size() < 8'000'000);
  CHECK_FALSE(Html(all).names().contains("script"));
  CHECK_FALSE(contains(all, "http://"));
  CHECK_FALSE(contains(all, "https://"));
  CHECK_FALSE(contains(all, "url("));
}

TEST_CASE("RunPage: charts of whatever numbers") {
  const Directory directory;
  const auto path = directory / "run.html";
  const std::vector<std::vector<double>> cases{{not_a_number},
                                               {inf, -inf, not_a_number},
                                               {0},
                                               {1e300, -1e300},
                                               {5e-324, 0},
                                               {1, not_a_number, 2, not_a_number, 3},
                                               {1e-10, 1e10},
                                               {-1, -2, -3}};
  ga::RunPage page(at_once(path));
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (std::size_t j = 0; j < cases[i].size(); ++j)
      for (const auto* const prefix : {"case", "lr", "memory/"})
        page.add(prefix + std::to_string(i) + (prefix[0] == 'l' ? "/lr" : ""), static_cast<std::int64_t>(j),
                 cases[i][j]);
  page.end();
  const auto text = text_of(path);
  const Html html(text);
  CHECK(html.curve("case5") == "3");
  CHECK(html.curve("case0") == "nan");
  CHECK(html.curve("case1", "last") == "nan");
  for (auto& tag : html.tags())
    for (const auto* const name : {"d", "x", "y", "x1", "y1", "cx", "cy", "width"})
      if (const auto found = tag.attributes.find(name); found != tag.attributes.end()) {
        CHECK_FALSE(contains(found->second, "nan"));
        CHECK_FALSE(contains(found->second, "inf"));
      }
}

TEST_CASE("RunPage: gaps, outliers and extremes are in the picture") {
  const Directory directory;
  const auto path = directory / "run.html";
  ga::RunPage page(at_once(path));
  const auto numbers = noise(3000, 9);
  for (int i = 0; i < 3000; ++i)
    page.add("train/loss", i,
             i == 2                  ? 1e6
             : i >= 1000 && i < 1100 ? not_a_number
                                     : 1 + 0.01 * numbers[static_cast<std::size_t>(i)]);
  page.end();
  const auto text = text_of(path);
  CHECK(contains(text, "▲ cut off: up to 1,000,000 at update 2."));
  CHECK(contains(text, "× NaN or infinite: 100."));
  const Html html(text);
  const auto paths = html.all("path");
  REQUIRE(paths.size() == 2);
  CHECK(paths[0].attributes.at("class") == "band s1");
  const auto& line = paths[1].attributes.at("d");
  CHECK(std::count(line.begin(), line.end(), 'M') == 2);  // on both sides of the gap
  CHECK(std::count(line.begin(), line.end(), 'L') <= 256);
  CHECK(std::count(line.begin(), line.end(), 'L') >= 120);
}

TEST_CASE("RunPage: what cannot be written is said, with its name") {
  const Directory directory;
  const auto none = directory / "none/run.html";
  REQUIRE_ERROR(none.string() + ": must be written beside, as run.html.part, got No such file or directory",
                ga::RunPage({.path = none}));
  REQUIRE_ERROR("must be a file", ga::RunPage({.path = directory / ""}));
  REQUIRE_ERROR("RunPage: path must be given", ga::RunPage({}));
  REQUIRE_ERROR("RunPage: every must be >= 0 s, got -1 s",
                ga::RunPage({.path = directory / "run.html", .every = std::chrono::seconds(-1)}));
  const auto path = directory / "later/run.html";
  std::filesystem::create_directories(directory / "later");
  ga::RunPage page(at_once(path));
  page.update();
  std::filesystem::remove_all(directory / "later");
  REQUIRE_ERROR(path.string() + ": must be written beside", page.update());
  std::filesystem::create_directories(directory / "later");
  page.update();
  CHECK(Html(text_of(path)).text_of_class("state running") == "running");
}

TEST_CASE("RunPage: a full disk leaves the page as it was, and nothing beside it") {
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
}

TEST_CASE("RunPage: goes on from a state with one curve, and its time") {
  const Directory directory;
  ga::RunPage first(at_once(directory / "a.html")), second(at_once(directory / "b.html")),
      straight(at_once(directory / "c.html"));
  const auto add = [](ga::RunPage& page, int from, int to) {
    for (int i = from; i < to; ++i) page.add("train/loss", i, std::sin(i));
  };
  add(first, 0, 700);
  ga::Archive saved;
  saved("page", first);
  add(first, 700, 900);  // is lost
  add(second, 0, 50);    // too
  ga::Archive loading(saved.values());
  loading("page", second);
  add(second, 700, 2000);
  add(straight, 0, 2000);
  CHECK(bits_of(second.curves()) == bits_of(straight.curves()));
  CHECK(bits_of(first.curves()) != bits_of(straight.curves()));
}
