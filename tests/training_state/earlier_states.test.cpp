// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/schedule.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"
#include "training_state/bits.hpp"

#include <csignal>

namespace ga = gradaccum;
using namespace testing;

namespace {

/// States that an earlier version of the library wrote. The hidden test case at the end writes them again.
const auto earlier = std::filesystem::path(__FILE__).parent_path() / "earlier_states";

/// A model of single numbers, which each processor adds in the same order.
struct LineImpl : torch::nn::Module {
  at::Tensor slope = register_parameter("slope", torch::full({1}, 0.5)),
             offset = register_parameter("offset", torch::full({1}, -0.25));
  at::Tensor forward(const at::Tensor& x) { return slope * x + offset; }
};
TORCH_MODULE(Line);

const auto objective = [](Line& line, auto& batch) { return torch::square(line(batch.data) - batch.target).mean(); };

auto batches_of(std::int64_t count) {
  const auto x = torch::arange(1, 1 + count, at::kFloat).div(8).view({-1, 1});
  return ga::data::TensorBatches(x, 0.75 - x, {.batch_size = 1, .shuffle = true, .seed = 3});
}

/// Ends the fit in the middle of a window.
struct Interrupt {
  std::int64_t at_update;
  ga::TrainerBase* trainer = nullptr;
  void attach(ga::TrainerBase& to) { trainer = &to; }
  void before_boundary() {
    if (trainer->updates() == at_update && trainer->window().micro_batches == 1) trainer->interrupt(SIGTERM);
  }
};

/// Trains with policies that have a state. Returns the content of the training at the end.
Bits trained(const std::filesystem::path& directory, std::int64_t interrupt_at, std::string* resumed_from = nullptr) {
  torch::manual_seed(1);
  Line line;
  ga::optim::AdamW adamw(line->parameters(), 0.125);
  auto batches = batches_of(10), unseen = batches_of(2);
  const Directory page;
  ga::Trainer trainer(line, adamw, objective, ga::Accumulate{.steps = 2},
                      ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 64.0, .growth_interval = 3}},
                      ga::Schedule{ga::lr::Linear{.peak = 0.125, .warmup = 2}}, ga::Ema{.decay = 0.5, .warmup = true},
                      ga::Validate(unseen, {.every_updates = 2}), ga::EarlyStopping{.patience = 50},
                      ga::SaveState{.directory = directory, .every_updates = 100, .keep_best = 1},
                      ga::Report{.path = page / "run.html"}, Interrupt{interrupt_at});
  const auto report = trainer.fit(batches, {.epochs = 3, .resume = directory});
  if (resumed_from) *resumed_from = report.resumed_from;
  Bits bits;
  bits.add_model(*line);
  bits.add_optimizer(adamw, *line);
  bits.add_generator();
  bits.add("scale", trainer.policy<ga::MixedPrecision>().amp_scaler().get_scale());
  bits.add("curve", c10::str(trainer.policy<ga::Report>().curves().find("train/loss")->last().value));
  for (auto& validation : report.validations) bits.add("validations", validation.found["loss"]);
  for (auto number : {report.epochs, report.updates, report.skipped, report.samples})
    bits.add("counts", static_cast<double>(number));
  trainer.policy<ga::Ema>().swap(line);
  bits.add_model(*line);
  return bits;
}

/// A training in a loop by hand.
struct ByHand {
  Line line;
  ga::optim::AdamW adamw{line->parameters(), 0.125};
  ga::GradAccumulator<ga::optim::AdamW> optimizer{adamw, {.steps = 2}};
  ga::LearningRates rates{adamw};
  ga::ReduceLROnPlateau::Running plateau{{.factor = 0.5, .patience = 0}};
  ga::EarlyStopping::Running stopping{{.patience = 50}};
  ga::Ema::Running ema{{.decay = 0.5}};
  ga::data::TensorBatches batches = batches_of(10);
  std::int64_t micro_batches = 0;

  ByHand() { ema.attach(line); }
  std::int64_t updates() const { return optimizer.updates(); }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(line));
    archive("optimizer", ga::OptimizerState(optimizer, line));
    archive("plateau", plateau);
    archive("stopping", stopping);
    archive("ema", ema);
    archive("batches", batches);
    archive("random", ga::RandomState());
    archive("micro_batches", micro_batches);
  }
  void train(std::int64_t until) {
    while (micro_batches < until) {
      for (auto& batch : batches) {
        optimizer.backward(objective(line, batch));
        if (optimizer.step()) {
          ema.update(line);
          const auto loss = objective(line, batch).template item<double>();
          plateau.step(loss, rates);
          stopping.add(loss);
        }
        optimizer.zero_grad();
        if (++micro_batches == until) break;
      }
    }
  }
  Bits bits() {
    Bits bits;
    bits.add_model(*line);
    bits.add_optimizer(adamw, *line);
    bits.add_generator();
    ga::Archive archive;
    state(archive);
    for (auto& [name, value] : archive.values())
      if (auto* const number = std::get_if<double>(&value)) bits.add(name, *number);
    ema.swap(line);
    bits.add_model(*line);
    return bits;
  }
};

constexpr std::int64_t never = -1;

}  // namespace

TEST_CASE("earlier states: a Trainer resumes a state of an earlier version bit for bit") {
  const Directory directory;
  std::filesystem::copy(earlier / "trainer", directory / "resumed", std::filesystem::copy_options::recursive);
  std::string resumed_from;
  const auto resumed = trained(directory / "resumed", never, &resumed_from);
  CHECK(resumed_from == (directory / "resumed" / "step-000007").string());
  CHECK(difference(resumed, trained(directory / "whole", never)) == "");
}

TEST_CASE("earlier states: a loop by hand resumes a state of an earlier version bit for bit") {
  torch::manual_seed(1);
  ByHand resumed, whole, not_resumed;
  torch::manual_seed(1);
  whole.train(27);
  const auto expected = whole.bits();
  ga::load(earlier / "by_hand", resumed);
  resumed.train(27);
  CHECK(difference(resumed.bits(), expected) == "");
  not_resumed.train(12);
  CHECK(difference(not_resumed.bits(), expected) != "");
}

// Writes the states anew, after tests/training_state/earlier_states was removed.
TEST_CASE("writes the states of this version", "[.][write]") {
  trained(earlier / "trainer", 7);
  torch::manual_seed(1);
  ByHand training;
  torch::manual_seed(1);
  training.train(15);
  ga::save(earlier / "by_hand", training);
}
