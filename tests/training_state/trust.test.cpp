// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/training/fit_state.hpp>
#include <gradaccum/gradaccum.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"
#include "support/warnings.hpp"
#include "training_state/bits.hpp"

#include <clocale>
#include <csignal>
#include <locale>

// Properties of states whose failure would appear too late, silently, or only on another machine.

namespace ga = gradaccum;
namespace fs = std::filesystem;
using namespace testing;

namespace {

const auto objective = [](auto& net, auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };

auto batches_of(std::int64_t rows = 40) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto data = at::randn({rows, 4}, generator);
  return ga::data::TensorBatches(data, at::randn({rows, 3}, generator), {.batch_size = 4, .shuffle = true});
}

struct Net {
  torch::nn::Sequential model{torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3)};
  torch::optim::SGD sgd;
  explicit Net(double lr = 0.1, std::int64_t seed = 1)
      : sgd(seeded(seed), torch::optim::SGDOptions(lr).momentum(0.9)) {}

  auto trainer(auto... policies) { return ga::Trainer(model, sgd, objective, std::move(policies)...); }
  double lr() const { return sgd.param_groups()[0].options().get_lr(); }
  Bits bits() {
    Bits bits;
    bits.add_model(*model);
    bits.add_optimizer(sgd, *model);
    return bits;
  }

 private:
  std::vector<at::Tensor> seeded(std::int64_t seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.uniform_(-1, 1);
    return model->parameters();
  }
};

/// Sets a global C++ locale that writes 1.234.567,5, or 1 234 567,5.
class Grouped {
 public:
  explicit Grouped(char separator) : before_(std::locale::global(std::locale(std::locale(), new Digits(separator)))) {}
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;
  ~Grouped() { std::locale::global(before_); }

 private:
  struct Digits : std::numpunct<char> {
    explicit Digits(char by) : separator(by) {}
    char do_thousands_sep() const override { return separator; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
    char separator;
  };
  std::locale before_;
};

}  // namespace

TEST_CASE("trust: states are the same in every locale, and can be read in any other") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto fit = [](const fs::path& path, std::int64_t updates) {
    Net net;
    auto trainer =
        net.trainer(ga::Accumulate{.steps = 1, .schedule = {{1000, 2000}}}, ga::SaveState{.directory = path});
    auto loader = batches_of();
    std::vector<ga::data::Batch> batches;  // a list has no state, so the fingerprint of the last batch is saved
    for (auto& batch : loader) batches.push_back(batch);
    trainer.fit(batches, {.epochs = 3, .updates = updates, .resume = path});
    return net.bits();
  };
  const auto values_of = [](const fs::path& path) {
    auto values = ga::io::read_state(path);
    std::erase_if(values, [](auto& value) { return value.first == "fit.seconds"; });
    Bits bits;
    for (auto& [name, value] : values)
      std::visit(
          [&, &key = name](auto& held) {
            if constexpr (std::is_arithmetic_v<std::decay_t<decltype(held)>>)
              bits.add(key, static_cast<double>(held));
            else
              bits.add(key, held);
          },
          value);
    return bits;
  };
  const auto straight = fit(directory / "straight", 12);
  fit(directory / "plain", 5);
  for (const char separator : {',', '.', ' '}) {
    const auto path = directory / ("grouped" + std::to_string(separator));
    {
      const Grouped grouped(separator);
      REQUIRE(c10::str(1234567) != "1234567");
      fit(path, 5);
    }
    CHECK(difference(values_of(path / "step-000005"), values_of(directory / "plain" / "step-000005")) == "");
    CHECK(difference(straight, fit(path, 12)) == "");
    fs::create_directories(directory / "read" / std::to_string(separator));
    fs::copy(directory / "plain", directory / "read" / std::to_string(separator), fs::copy_options::recursive);
    const Grouped grouped(separator);
    CHECK(difference(straight, fit(directory / "read" / std::to_string(separator), 12)) == "");
  }
}

TEST_CASE("trust: stored, compared or read texts are the same in every locale") {
  const auto x = torch::arange(40000).view({2, 20000});
  const ga::detail::PieceName piece{.parameter = "w", .begin = 4096, .end = 123456, .sizes = {64, 12345}};
  const auto print = ga::detail::fingerprint_of(x);
  const auto resident = ga::detail::occupied_memory(at::kCPU);
  for (const char separator : {',', '.', ' '}) {
    const Grouped grouped(separator);
    CHECK(ga::detail::fingerprint_of(x) == print);
    CHECK(contains(print, "[2, 20000]"));
    CHECK(piece.text() == "w[4096:123456 of 64x12345]");
    CHECK(ga::detail::PieceName::of(piece.text()).has_value());
    CHECK(ga::detail::bytes_after("MemAvailable", "MemTotal: 99 kB\nMemAvailable:  1234 5678 kB\n") == 1234);
    CHECK(ga::detail::bytes_after("Rss", "Rss:  1234567 kB\n") == 1234567 * 1024);
    const auto now = ga::detail::occupied_memory(at::kCPU);
    CHECK(now.value() < 16 * resident.value());  // two numbers of a line, read as one, would be far more
    CHECK(ga::detail::plain_text(1234567, ' ', 0.5) == "1234567 0.5");
  }
}

TEST_CASE("trust: a recorded step is the same in every locale") {
  const Directory directory;
  const auto scaled = [](auto& net, auto& batch) {
    return torch::mse_loss(net->forward(batch.data) * 1234567, batch.target);
  };
  Net net;
  auto batches = batches_of();
  auto batch = *batches.begin();
  ga::save_step(net.model, scaled, batch, directory / "plain");
  {
    const Grouped grouped(',');
    ga::save_step(net.model, scaled, batch, directory / "grouped");
    CHECK(c10::str(1234567) == "1,234,567");  // the locale was restored
  }
  const auto files = ga::detail::names_in(directory / "plain");
  CHECK(files.size() == ga::detail::names_in(directory / "grouped").size());
  for (auto& name : files) {
    INFO(name);
    CHECK(text_of(directory / "plain" / name) == text_of(directory / "grouped" / name));
  }
}

TEST_CASE("trust: a log's lines are recognized if C's locale has a decimal comma") {
  const Directory directory;
  const char* const german = std::setlocale(LC_NUMERIC, "de_DE.UTF-8");  // null if it is not installed
  for (const std::string name : {"log.csv", "log.jsonl"}) {
    {
      ga::MetricsFile file({.path = directory / name});
      for (const double samples : {1.5, 2.25, 3.125}) file.write({{"samples", samples}, {"loss", 0.25}});
      file.remove_lines_at_end("samples", 2.25);
    }
    CHECK(contains(text_of(directory / name), "2.25"));
    CHECK_FALSE(contains(text_of(directory / name), "3.125"));
  }
  std::setlocale(LC_NUMERIC, "C");
  INFO((german ? german : "without it"));
}

TEST_CASE("trust: a directory that cannot be written to is reported before the first update") {
  const Directory directory;
  int micro_batches = 0;
  const auto counting = [&](auto& net, auto& batch) {
    ++micro_batches;
    return objective(net, batch);
  };
  Net net;
  auto batches = batches_of();
  const auto refused = [&](auto policy) {
    ga::Trainer trainer(net.model, net.sgd, counting, std::move(policy));
    trainer.fit(batches, {.epochs = 1});
  };
  write_text(directory / "file", "text");
  for (const auto& path :
       {fs::path("/proc"), fs::path("/proc/self"), directory / "file", directory / "file" / "runs"}) {
    const auto check_refused = [&](auto policy) {
      const auto message = error_of([&] { refused(std::move(policy)); });
      INFO("'" << message << "' for " << path);  // names the directory, or the parent that is none
      CHECK(message.find(':') < message.size());
      CHECK(path.string().starts_with(message.substr(0, message.find(':'))));
    };
    check_refused(ga::SaveState{.directory = path});
    check_refused(ga::TensorBoard{.directory = path});
    check_refused(ga::Profile{.updates = {100, 101}, .directory = path});
    CHECK(error_of([&] { refused(ga::MetricsLog{.path = path / "log.csv"}); }) != "");
    CHECK(error_of([&] { refused(ga::Report{.path = path / "page.html"}); }) != "");
  }
  CHECK(micro_batches == 0);
  ga::detail::check_is_writable(directory / "new" / "runs");
  CHECK(fs::is_empty(directory / "new" / "runs"));
  // Each failing call is an error, and leaves no files.
  bool all = false;
  for (long at = 0; !all; ++at) {
    const FailingFiles failing(at);
    const auto message = error_of([&] { ga::detail::check_is_writable(directory / "new" / "runs"); });
    all = !failing.has_failed();
    INFO((all ? "" : failing.failed()));
    if (!all && !failing.failed().starts_with("close")) CHECK(contains(message, "Input/output error"));
    for (auto& entry : fs::directory_iterator(directory / "new" / "runs")) fs::remove_all(entry.path());
    if (all) CHECK(message == "");
    if (all) CHECK(contains(c10::Join(" ", failing.calls()), "rename step-000000"));
  }
}

namespace {

/// A policy: trains the last layer from epoch 1 on, and freezes the first from epoch 2 on.
struct Unfreeze {
  torch::nn::Sequential model;
  void on_epoch_begin(std::int64_t epoch) {
    if (epoch == 1)
      for (auto& parameter : model[2]->parameters()) parameter.set_requires_grad(true);
    if (epoch == 2) model[0]->named_parameters()["bias"].set_requires_grad(false);
  }
};

}  // namespace

TEST_CASE("trust: resuming restores which parameters require gradients") {
  const FailingFiles no_disk_to_wait_for;
  const auto train = [](const fs::path& path, std::int64_t stop_after) {
    Net net;
    for (auto& parameter : net.model[2]->parameters()) parameter.set_requires_grad(false);
    auto trainer = net.trainer(Stop{stop_after}, Unfreeze{net.model}, ga::SaveState{.directory = path});
    auto batches = batches_of();
    trainer.fit(batches, {.epochs = 4, .resume = path});
    return net.bits();
  };
  const Directory directory;
  const auto straight = train(directory / "straight", -1);
  for (const std::int64_t at : {5, 10, 11, 15, 21, 35}) {
    const auto path = directory / std::to_string(at);
    train(path, at);
    const Warnings warnings;
    CHECK(difference(straight, train(path, -1)) == "");
    CHECK(warnings.texts().empty());
  }

  // A program that freezes other parameters gets a warning; with allow_changes it keeps its choice.
  const auto path = directory / "other";
  train(path, 15);
  Net other;
  auto trainer = other.trainer();
  {
    const Warnings warnings;
    ga::load(path, trainer);
    REQUIRE(warnings.texts().size() == 1);
    CHECK(contains(warnings.texts()[0], "others: the frozen parameters; {.allow_changes = true}"));
  }
  other.model[0]->named_parameters()["weight"].set_requires_grad(false);
  const auto state = ga::io::read_state(ga::detail::newest_state(path).value());
  ga::load(path, trainer, {.allow_changes = true});
  CHECK_FALSE(other.model[0]->named_parameters()["weight"].requires_grad());
  ga::Archive part(state);
  part("model", ga::ModelState(other.model));
  CHECK(other.model[0]->named_parameters()["weight"].requires_grad());

  // A state of an older version without this entry changes nothing.
  auto old = state;
  REQUIRE(old.erase("model.(frozen)") == 1);
  other.model[0]->named_parameters()["weight"].set_requires_grad(false);
  ga::Archive of_old(old);
  of_old("model", ga::ModelState(other.model));
  CHECK_FALSE(other.model[0]->named_parameters()["weight"].requires_grad());
}

namespace {

/// A policy: adds the last layer to the optimizer in an epoch, and in later epochs if it is missing.
struct AddGroup {
  torch::nn::Sequential model;
  torch::optim::Optimizer& optimizer;
  bool each_time;
  void on_epoch_begin(std::int64_t epoch) {
    if (optimizer.param_groups().size() == 1 && (each_time ? epoch >= 1 : epoch == 1))
      optimizer.add_param_group({model[2]->parameters()});
  }
};

}  // namespace

TEST_CASE("trust: parameter groups that were added during training are restored, or their lack is an error") {
  const FailingFiles no_disk_to_wait_for;
  const auto train = [](const fs::path& path, std::int64_t stop_after, bool each_time) {
    Net net;
    torch::optim::SGD sgd(net.model[0]->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ga::Trainer trainer(net.model, sgd, objective, Stop{stop_after}, AddGroup{net.model, sgd, each_time},
                        ga::SaveState{.directory = path});
    auto batches = batches_of();
    trainer.fit(batches, {.epochs = 4, .resume = path});
    Bits bits;
    bits.add_model(*net.model);
    bits.add_optimizer(sgd, *net.model);
    return bits;
  };
  const Directory directory;
  const auto straight = train(directory / "straight", -1, true);
  for (const std::int64_t at : {5, 15, 25}) {
    const auto path = directory / std::to_string(at);
    train(path, at, true);
    CHECK(difference(straight, train(path, -1, true)) == "");
  }
  train(directory / "once", 25, false);
  REQUIRE_ERROR("optimizer.groups = 2, but here it is 1", train(directory / "once", -1, false));
}

TEST_CASE("trust: each signal that ends a program saves a state, and handlers are restored") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto fit = [&](int signal, const ga::StopOn& on_signals, const fs::path& path) {
    int seen = 0;
    const auto raising = [&](auto& net, auto& batch) {
      if (++seen == 5) ::raise(signal);
      return objective(net, batch);
    };
    Net net;
    ga::Trainer trainer(net.model, net.sgd, raising, ga::Accumulate{.steps = 2},
                        ga::SaveState{.directory = path, .on_signals = on_signals});
    auto batches = batches_of();
    const auto report = trainer.fit(batches, {.epochs = 2});
    CHECK((report.signal == 0 || seen == 5));
    return report.signal;
  };
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
    INFO(signal);
    struct sigaction before {
    }, after{}, by_default{};
    by_default.sa_handler = SIG_DFL;  // instead of Catch2's
    ::sigaction(signal, &by_default, &before);
    const auto path = directory / std::to_string(signal);
    CHECK(fit(signal, true, path) == signal);
    CHECK(fs::exists(path / "step-000002"));
    CHECK(fit(signal, {signal}, directory / "list" / std::to_string(signal)) == signal);
    ::sigaction(signal, &before, &after);
    CHECK(after.sa_handler == SIG_DFL);
  }
  CHECK(fit(SIGRTMIN, {SIGRTMIN, SIGTERM}, directory / "real time") == SIGRTMIN);
  Net net;
  REQUIRE_ERROR("SaveState: on_signals must be signals that a program can catch, got 9",
                net.trainer(ga::SaveState{.directory = "states", .on_signals = {SIGTERM, SIGKILL}}));
  REQUIRE_ERROR("can catch, got 0", net.trainer(ga::SaveState{.directory = "states", .on_signals = {0}}));
}

TEST_CASE("trust: time-based saves") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto states = [&](const std::string& name, double minutes) {
    Net net;
    auto trainer = net.trainer(ga::SaveState{.directory = directory / name, .every_minutes = minutes, .keep_last = 0});
    auto batches = batches_of();
    trainer.fit(batches, {.updates = 6});
    return ga::detail::StateDirectory(directory / name).finished().size();
  };
  CHECK(states("none", 0) == 1);  // only the last
  CHECK(states("rare", 1e9) == 1);
  CHECK(states("all", 1e-300) == 6);
  Net net;
  REQUIRE_ERROR("SaveState: every_minutes must be >= 0, got -1",
                net.trainer(ga::SaveState{.directory = "states", .every_minutes = -1}));
}

TEST_CASE("trust: FitOptions::time counts this call only, so that each job of a chain trains") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  for (std::int64_t job = 1; job <= 3; ++job) {
    Net net;
    auto trainer = net.trainer(ga::SaveState{.directory = directory / "runs"});
    auto batches = batches_of();
    const auto report = trainer.fit(batches, {.time = std::chrono::duration<double>(0), .resume = directory / "runs"});
    CHECK(report.updates == job);
  }
  struct Aged : gradaccum::detail::FitState {
    using ga::FitProgress::begun_, ga::FitProgress::start_;
  } status;
  status.options = {.time = std::chrono::hours(1)};
  status.windows = 1;
  status.start_ -= std::chrono::hours(5);  // time of earlier runs
  status.stop_at_limits();
  CHECK_FALSE(status.stopped);
  CHECK(status.fraction().value() < 0.9);
  status.begun_ -= std::chrono::hours(2);
  status.stop_at_limits();
  CHECK(status.stopped);
}

TEST_CASE("trust: a policy requests a state, and reads the report so far") {
  struct Requests {
    ga::TrainerBase* trainer = nullptr;
    void attach(ga::TrainerBase& to) { trainer = &to; }
    void after_step(const ga::Step& step) {
      CHECK(trainer->report().updates == step.update);
      if (step.update == 2) trainer->request_save();
    }
  };
  const Directory directory;
  Net net;
  auto trainer = net.trainer(Requests{}, ga::SaveState{.directory = directory / "runs"});
  auto batches = batches_of();
  trainer.fit(batches, {.updates = 4});
  CHECK(std::filesystem::exists(directory / "runs/step-000002"));
  CHECK_FALSE(std::filesystem::exists(directory / "runs/step-000003"));
  CHECK(std::filesystem::exists(directory / "runs/step-000004"));  // at the end of the fit
}

TEST_CASE("trust: another learning rate on resume is reported in one line") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto path = directory / "runs";
  const auto resumed = [&](double lr, std::int64_t updates, bool allow, auto... policies) {
    Net net(lr);
    auto trainer = net.trainer(std::move(policies)..., ga::SaveState{.directory = path});
    auto batches = batches_of();
    const Warnings warnings;
    trainer.fit(batches, {.updates = updates, .resume = path, .allow_changes = allow});
    return std::pair(net.lr(), warnings.texts());
  };
  using Texts = std::vector<std::string>;
  CHECK(resumed(0.1, 2, false) == std::pair(0.1, Texts()));
  CHECK(resumed(0.1, 3, false) == std::pair(0.1, Texts()));
  const auto [lr, texts] = resumed(0.02, 4, false);
  CHECK(lr == 0.1);
  REQUIRE(texts.size() == 1);
  CHECK(
      contains(texts[0], "the state's values are kept, although this program sets others: group0.lr (0.02, was 0.1)"));
  CHECK(contains(texts[0], ".allow_changes = true"));
  CHECK(resumed(0.1, 5, false) == std::pair(0.1, Texts()));  // unchanged
  CHECK(resumed(0.02, 6, true) == std::pair(0.02, Texts()));
  CHECK(resumed(0.02, 7, false) == std::pair(0.02, Texts()));  // already applied

  // A schedule determines the rate independently of the optimizer's, and a changed schedule takes effect.
  const auto scheduled = directory / "scheduled";
  const auto with_schedule = [&](double given, double peak, std::int64_t updates) {
    Net net(given);
    auto trainer = net.trainer(ga::Schedule{ga::lr::Constant{.peak = peak}}, ga::SaveState{.directory = scheduled});
    auto batches = batches_of();
    const Warnings warnings;
    trainer.fit(batches, {.updates = updates, .resume = scheduled});
    return std::pair(net.lr(), warnings.texts());
  };
  CHECK(with_schedule(0.1, 0.1, 2) == std::pair(0.1, Texts()));
  CHECK(with_schedule(0.3, 0.2, 3) == std::pair(0.2, Texts()));
}

TEST_CASE("trust: ReduceLROnPlateau resumes with its best value and its patience") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto train = [](const fs::path& path, std::int64_t stop_after) {
    Net net(0.5);
    auto unseen = batches_of(8);
    auto trainer = net.trainer(Stop{stop_after}, ga::Validate(unseen),
                               ga::ReduceLROnPlateau{.factor = 0.5, .patience = 1, .threshold = 0.05, .cooldown = 1},
                               ga::SaveState{.directory = path});
    auto batches = batches_of();
    trainer.fit(batches, {.epochs = 8, .resume = path});
    return std::pair(net.bits(), net.lr());
  };
  const auto [straight, lr] = train(directory / "straight", -1);
  CHECK(lr < 0.5);
  for (std::int64_t at = 5; at < 80; at += 10) {
    const auto path = directory / std::to_string(at);
    train(path, at);
    const auto [bits, its_lr] = train(path, -1);
    CHECK(difference(straight, bits) == "");
    CHECK(its_lr == lr);
  }
  // Runs jobs of one update each, which end between two validations.
  const auto by_jobs = [](const fs::path& path, std::optional<std::chrono::seconds> time) {
    Net net(0.5);
    auto unseen = batches_of(8), batches = batches_of(12);
    const ga::EarlyStopping patient{.patience = 5, .min_delta = 1e9};
    auto trainer = net.trainer(ga::Validate(unseen), patient, ga::ReduceLROnPlateau{.factor = 0.5, .patience = 1},
                               ga::SaveState{.directory = path});
    const auto report = trainer.fit(batches, {.epochs = 8, .time = time, .resume = path});
    return std::tuple(net.bits(), net.lr(), trainer.updates(), report.stopped);
  };
  const auto whole = by_jobs(directory / "one job", std::nullopt);
  CHECK(std::get<2>(whole) == 18);  // the first of 6 epochs was best
  auto last = whole;
  for (int job = 0; job < 19; ++job)
    last = by_jobs(directory / "jobs", std::chrono::seconds(0));  // the last one ends an epoch
  CHECK(difference(std::get<0>(whole), std::get<0>(last)) == "");
  CHECK(std::get<1>(last) == std::get<1>(whole));
  CHECK(std::get<2>(last) == 18);

  Net net;
  REQUIRE_ERROR("ReduceLROnPlateau: needs a ga::Validate beside it, which computes 'loss'",
                net.trainer(ga::ReduceLROnPlateau{}));
  REQUIRE_ERROR("factor must be in (0, 1), got 1", net.trainer(ga::ReduceLROnPlateau{.factor = 1}));
  REQUIRE_ERROR("patience must be >= 0, got -1", net.trainer(ga::ReduceLROnPlateau{.patience = -1}));
}

namespace {

/// A model that keeps its inputs.
struct GrowingImpl : torch::nn::Module {
  torch::nn::Linear last{4, 3};
  at::Tensor seen;
  GrowingImpl() {
    register_module("last", last);
    seen = register_buffer("seen", torch::zeros({0, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    named_buffers()["seen"].set_data(torch::cat({named_buffers()["seen"], x}));
    return last(x);
  }
};
TORCH_MODULE(Growing);

}  // namespace

TEST_CASE("trust: a buffer that grows with the data can be excluded") {
  const FailingFiles no_disk_to_wait_for;
  const Directory directory;
  const auto fit = [](const fs::path& path, std::int64_t updates, const std::vector<std::string>& leave_out) {
    torch::manual_seed(1);
    Growing model;
    torch::optim::SGD sgd(model->parameters(), 0.1);
    ga::Trainer trainer(model, sgd, objective, ga::SaveState{.directory = path, .leave_out = leave_out});
    auto batches = batches_of();
    trainer.fit(batches, {.updates = updates, .resume = path});
    return std::pair(model->last->weight.detach().clone(), model->named_buffers()["seen"].size(0));
  };
  const auto [straight, rows] = fit(directory / "straight", 6, {"seen"});
  CHECK(rows == 24);
  fit(directory / "runs", 4, {"seen"});
  CHECK_FALSE(ga::io::read_state(directory / "runs" / "step-000004").contains("model.seen"));
  const auto [resumed, later_rows] = fit(directory / "runs", 6, {"seen"});
  CHECK(at::equal(straight, resumed));
  CHECK(later_rows == 8);
  // A state that contains it can be loaded without it.
  fit(directory / "whole", 4, {});
  REQUIRE_ERROR("the state has seen, Float [16, 4], the model seen, Float [0, 4]", fit(directory / "whole", 6, {}));
  CHECK(at::equal(straight, fit(directory / "whole", 6, {"seen"}).first));
  REQUIRE_ERROR("leave_out must name buffers of the model, each once, got 'last.weight'",
                fit(directory / "none", 1, {"last.weight"}));
}
