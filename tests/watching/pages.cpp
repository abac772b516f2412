// SPDX-License-Identifier: Apache-2.0
//
// pages DIRECTORY: writes pages for browser.py.

#include <gradaccum/run_page.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;

namespace {

constexpr std::int64_t updates_an_epoch = 938, epochs = 20;

/// A run that looks like one of a small network on FashionMNIST.
class BelievableRun {
 public:
  explicit BelievableRun(unsigned seed) : random_(seed) {}

  void add(auto& curves, std::int64_t update) {  // Curves, or a page
    const double share = static_cast<double>(update) / (updates_an_epoch * epochs);
    const double loss = 0.31 + 1.99 * std::exp(-55 * share) + 0.25 * std::exp(-4 * share);
    curves.add("train/loss", update, loss * std::exp(0.16 * normal()));
    curves.add("train/lr", update, 1e-3 * std::min(share / 0.05, 0.5 * (1 + std::cos(3.14159265 * share))));
    const double spike = uniform() < 0.0008 ? 9 : 1;
    curves.add("train/grad_norm", update, spike * (0.4 + 1.6 * std::exp(-20 * share)) * std::exp(0.35 * normal()));
    if (update % updates_an_epoch == 0) {
      curves.add("validation/loss", update, loss * 1.07 + 0.05 * share + 0.004 * normal());
      curves.add("validation/accuracy", update, 0.892 - 0.23 * std::exp(-9 * share) + 0.002 * normal());
    }
    if (update % 233 == 0) add_machine(curves, update);
  }

 private:
  void add_machine(auto& curves, std::int64_t update) {
    const double mb = 1 << 20;
    curves.add("train/samples_per_second", update, 30500 + 700 * normal() - (uniform() < 0.05 ? 6000 : 0));
    curves.add("memory/parameters", update, 108 * mb);
    curves.add("memory/optimizer_state", update, 216 * mb);
    curves.add("memory/gradients", update, 108 * mb);
    curves.add("memory/rest", update, (410 + 12 * normal()) * mb);
  }
  double normal() { return std::normal_distribution<double>()(random_); }
  double uniform() { return std::uniform_real_distribution<double>()(random_); }

  std::mt19937 random_;
};

ga::RunPageOptions options_of(const std::filesystem::path& path, const std::string& title) {
  return {.path = path, .title = title, .every = std::chrono::seconds(10)};
}

void tell_settings(ga::RunPage& page) {
  page.set("model", "784-512-512-10, 669,706 parameters");
  page.set("optimizer", "AdamW, lr 1e-3, weight decay 0.01");
  page.set("learning rate", "cosine, 938 updates of warmup");
  page.set("trains for", "20 epochs");
  page.set("an update has", "4 micro-batches, 64 samples");
  page.set("device", "cpu, 2 threads");
}

/// Copies the page of a running run, which would become interrupted when this program ends.
void keep(const std::filesystem::path& path, const std::string& name) {
  const auto kept = path.parent_path() / name;
  std::filesystem::copy_file(path, kept, std::filesystem::copy_options::overwrite_existing);
}

void write_one(const std::filesystem::path& path, std::int64_t until, bool is_over) {
  ga::RunPage page(options_of(path, "FashionMNIST, 16 x 4"));
  BelievableRun run(1);
  for (std::int64_t update = 1; update <= until; ++update) run.add(page, update);
  const double seconds = static_cast<double>(until) * 0.00324;
  page.tile("updates", static_cast<double>(until));
  page.tile("epoch", std::to_string((until + updates_an_epoch - 1) / updates_an_epoch), "of 20");
  page.tile("samples/s", 30'481, "30512 on average");
  page.tile("peak memory", "861 MB", "of this process");
  page.number("updates", until);
  page.number("samples", until * 64);
  page.number("seconds", seconds);
  tell_settings(page);
  const double share = static_cast<double>(until) / (updates_an_epoch * epochs);
  const ga::RunProgress progress{.fraction = share, .seconds = seconds};
  if (is_over) return page.end(ga::RunEnd::stopped, "loss was best, 0.31, 3 validations ago", progress);
  page.update(progress);
  keep(path, "running.html");
}

void write_several(const std::filesystem::path& path) {
  ga::RunPage page(options_of(path, "FashionMNIST, three ways"));
  unsigned seed = 1;
  for (const auto* const name : {"64 x 1", "16 x 4", "64 x 1 bf16"}) {
    BelievableRun run(seed++);
    auto& curves = page.add_run(name);
    for (std::int64_t update = 1; update <= updates_an_epoch * epochs; ++update) run.add(curves, update);
  }
  tell_settings(page);
  page.end();
}

/// Texts that must not run, flatten a chart, or make a page wider than a phone.
void write_hostile(const std::filesystem::path& path) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  ga::RunPage page(options_of(path, "</title><script>document.title='it ran'</script>"));
  for (const std::string& name :
       {std::string("train/</script><img src=x onerror=\"document.title='it ran'\">"),
        std::string("<svg onload=\"document.title='it ran'\">/loss"),
        std::string("\"><script>document.title='it ran'</script>"), std::string("' onmouseover='x"),
        std::string("train/loss"), std::string("\xff\xfe\xc0\0\a", 5), std::string(1 << 16, 'w')}) {
    for (int i = 0; i < 2000; ++i) page.add(name, i, i == 1 ? 1e9 : i / 100 == 7 ? nan : 1 + std::sin(0.01 * i));
    page.set(name, name);
    page.tile(name, name, name);
    page.number(name, 1.5, name);
    page.draw(name, std::vector<ga::Drawing>(9, {.width = 3, .lines = {{.points = {{1, 0.5}}}}, .caption = name}));
  }
  page.end(ga::RunEnd::interrupted, "<b onclick=x>by an exception</b>");
}

/// Drawings of a pendulum.
void write_drawings(const std::filesystem::path& path) {
  ga::RunPage page(options_of(path, "A pendulum"));
  std::vector<ga::Drawing> frames;
  for (int i = 0; i < 10; ++i)
    frames.push_back({.width = 2,
                      .height = 1,
                      .lines = {{.points = {{1, 1}, {1 + std::sin(0.1 * i - 0.5), 1 - std::cos(0.1 * i - 0.5)}}},
                                {.points = {{1, 1}}, .width = 8, .colour = 7}},
                      .caption = "step " + std::to_string(i)});
  page.draw("Frames", frames);
  page.end();
}

/// An outlier, non-finite numbers, and other values that an axis must handle.
void write_gaps(const std::filesystem::path& path) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  ga::RunPage page(options_of(path, "Gaps"));
  std::mt19937 random(9);
  for (int i = 0; i < 3000; ++i) {
    const double noise = std::normal_distribution<double>()(random);
    page.add("train/loss", i, i == 2 ? 1e6 : i >= 1000 && i < 1100 ? nan : 1 + 0.01 * noise);
  }
  const std::vector<std::vector<double>> cases{{nan},           {inf, -inf, nan}, {0},
                                               {1e300, -1e300}, {5e-324, 0},      {1, nan, 2, nan, 3},
                                               {1e-10, 1e10},   {-1, -2, -3},     {-1e305, -2e305},
                                               {1e305, 2e305},  {-1e301},         {1e308, -1e308}};
  for (std::size_t number = 0; number < cases.size(); ++number)
    for (const std::string prefix : {"case", "lr", "memory/"})
      for (std::size_t i = 0; i < cases[number].size(); ++i)
        page.add(prefix + std::to_string(number) + (prefix == "lr" ? "/lr" : ""), static_cast<std::int64_t>(i),
                 cases[number][i]);
  page.end();
}

/// Curves with the names of a page's own elements.
void write_named(const std::filesystem::path& path) {
  ga::RunPage page(options_of(path, "Names"));
  for (int i = 1; i <= 100; ++i)
    for (const auto* const name : {"", "tables", "log=", "a&b", "lr", "memory", "train/memory", "memory/a", "memory/b"})
      page.add(name, i, 1 + 1.0 / i);
  page.end();
}

/// One validation, and three runs with equal numbers, the last of which is shorter.
void write_equal(const std::filesystem::path& path) {
  ga::RunPage page(options_of(path, "Equal"));
  for (const auto& [name, until] : {std::pair{"64 x 1", 938}, {"16 x 4", 938}, {"4 x 16", 700}}) {
    BelievableRun run(1);
    auto& curves = page.add_run(name);
    for (int update = 1; update <= until; ++update) run.add(curves, update);
  }
  page.end();
}

void write_empty(const std::filesystem::path& path) {
  ga::RunPage page(options_of(path, "Nothing yet"));
  page.update();
  keep(path, "empty.html");
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) throw std::invalid_argument("usage: pages DIRECTORY");
  const std::filesystem::path directory = argv[1];
  std::filesystem::create_directories(directory);
  write_one(directory / "live.html", 11'300, false);
  write_one(directory / "over.html", updates_an_epoch * epochs, true);
  write_several(directory / "several.html");
  write_hostile(directory / "hostile.html");
  write_gaps(directory / "gaps.html");
  write_drawings(directory / "drawings.html");
  write_named(directory / "named.html");
  write_equal(directory / "equal.html");
  write_empty(directory / "live.html");
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
