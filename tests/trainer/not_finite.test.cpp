// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/trainer.hpp>

#include "support/files.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace ga = gradaccum;
using namespace testing;

namespace {

// For a batch of 0 the loss is 0 and the second parameter's gradient is NaN; for others it is 1 or -1.
struct Root : torch::nn::Module {
  at::Tensor first = register_parameter("first", torch::zeros({1}));
  at::Tensor second = register_parameter("second", torch::zeros({1}));
  torch::optim::SGD sgd{parameters(), torch::optim::SGDOptions(1.0)};

  double moved() const { return -second.item<double>(); }
  bool is_clean() const { return !first.grad().defined() && !second.grad().defined(); }
};
const auto root = [](Root& net, double value) {
  return (net.second - net.second.detach() + value).square().sum().sqrt() + net.first.sum();
};

std::vector<double> batches_with_bad_at(std::size_t count, std::size_t place) {
  std::vector<double> batches(count, 1.0);
  batches[place] = 0;
  return batches;
}

const std::string both = " of epoch 0 (both counted from 0), in update ";

}  // namespace

TEST_CASE("Trainer: a NaN gradient of a finite loss is an error before the parameters change") {
  Root net;
  ga::Trainer trainer(net, net.sgd, root);
  const auto batches = batches_with_bad_at(4, 2);
  REQUIRE_ERROR("the gradients must be finite, got NaN or infinity in that of second, for batch 2" + both + "3",
                trainer.fit(batches));
  CHECK(net.moved() == 2.0);
  CHECK(trainer.updates() == 2);
  CHECK(net.is_clean());

  const auto report = trainer.fit(batches, {.on_nan = ga::OnNan::skip});
  CHECK(net.moved() == 5.0);
  CHECK((report.updates == 3 && report.skipped == 1));
  CHECK(report.nan_batches == 1);
  CHECK(report.first_nan == "batch 2 of epoch 1 (both counted from 0), in update 5");

  REQUIRE_ERROR("in that of second, for batch", trainer.step(0.0));
  CHECK(net.moved() == 5.0);
  CHECK(trainer.step(1.0));
  trainer.fit(batches, {.on_nan = ga::OnNan::ignore});
  CHECK(std::isnan(net.moved()));
}

TEST_CASE("Trainer: in a window of several batches, NaN gradients are found when it closes") {
  const auto policy = GENERATE(0, 1, 2);  // also with policies that measure or change gradients
  Root net;
  std::vector<double> norms;
  ga::Trainer trainer(net, net.sgd, root, ga::Accumulate{.steps = 8},
                      policy == 1 ? std::optional(ga::ClipNorm{.max = 100}) : std::nullopt,
                      policy == 2 ? std::optional(ga::ClipValue{.max = 100}) : std::nullopt);
  const auto batches = batches_with_bad_at(20, 17);  // in the tail
  REQUIRE_ERROR("in that of second, for one of the 4 batches up to batch 19" + both + "3", trainer.fit(batches));
  CHECK(net.moved() == 2.0);
  REQUIRE_ERROR("for one of the 8 batches up to batch 15 of epoch 1",
                trainer.fit(batches_with_bad_at(20, 9), {.tail = ga::Tail::drop}));
  CHECK(net.moved() == 3.0);
  const auto report = trainer.fit(batches_with_bad_at(20, 3), {.on_nan = ga::OnNan::skip});
  CHECK(net.moved() == 5.0);
  CHECK((report.skipped == 1 && report.nan_batches == 8));
  CHECK(report.first_nan == "one of the 8 batches up to batch 7 of epoch 2 (both counted from 0), in update 4");
  std::ostringstream text;
  text << report;
  CHECK(contains(text.str(), "left out for a loss or gradient of NaN or infinity: 8, the first: one of"));
}

TEST_CASE("Trainer: batches with only NaN gradients end a fit with a limit in updates") {
  Root net;
  ga::Trainer trainer(net, net.sgd, root);
  const std::vector<double> batches(3, 0.0);
  REQUIRE_ERROR("must make 1 updates", trainer.fit(batches, {.updates = 1, .on_nan = ga::OnNan::skip}));
}

TEST_CASE("Trainer: an infinite gradient is found in mixed precision, and by a loss scale") {
  const auto infinite = [](Root& net, double value) {
    return (net.second - net.second.detach() + value).sum().sqrt() + net.first.sum();
  };
  const auto batches = batches_with_bad_at(3, 1);
  Root net;
  ga::Trainer bfloat16(net, net.sgd, infinite, ga::MixedPrecision{.dtype = torch::kBFloat16});
  REQUIRE_ERROR("in that of second, for batch 1" + both + "2", bfloat16.fit(batches));
  CHECK(net.moved() == 0.5);

  Root scaled;
  std::vector<bool> overflowed;
  struct Look {
    std::vector<bool>& overflowed;
    void after_window(const ga::Step& step) { overflowed.push_back(step.overflowed); }
  };
  ga::Trainer half(scaled, scaled.sgd, infinite,
                   ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 1024.0}}, Look{overflowed});
  const auto report = half.fit(batches);
  CHECK(scaled.moved() == 1.0);
  CHECK(overflowed == std::vector<bool>{false, true, false});
  CHECK((report.skipped == 1 && report.nan_batches == 0));
  CHECK(half.policy<ga::MixedPrecision>().amp_scaler().get_scale() == 512.0);
}

TEST_CASE("Trainer: gradients are checked after the policies have changed them") {
  struct Mend {
    void before_step(ga::Gradients& gradients) const {
      for (auto& gradient : gradients.values()) gradient.nan_to_num_(0.25);
    }
  };
  Root net;
  ga::Trainer mended(net, net.sgd, root, Mend{});
  CHECK(mended.fit(batches_with_bad_at(2, 1)).updates == 2);
  CHECK(net.moved() == 1.25);

  struct Normalise {
    void before_step(ga::Gradients& gradients) const {
      for (auto& gradient : gradients.values()) gradient.div_(gradient.norm());
    }
  };
  Root other;
  const auto flat = [](Root& it, double value) { return (it.second * value).sum() + it.first.sum(); };
  ga::Trainer spoilt(other, other.sgd, flat, Normalise{});
  REQUIRE_ERROR("in that of second, for batch 1" + both + "2", spoilt.fit(batches_with_bad_at(3, 1)));
  CHECK(other.moved() == 1.0);
}

TEST_CASE("Trainer: windows are skipped if a policy requires finite gradients") {
  struct Asks {
    std::vector<bool>* skipped;
    void before_step(ga::Gradients& gradients) const { gradients.factor().require_finite(); }
    void after_window(const ga::Step& step) const { skipped->push_back(step.overflowed); }
  };
  for (const auto on_nan : {ga::OnNan::stop, ga::OnNan::skip, ga::OnNan::ignore}) {
    Root net;
    std::vector<bool> skipped;
    ga::Trainer trainer(net, net.sgd, root, Asks{&skipped});
    trainer.fit(batches_with_bad_at(4, 2), {.on_nan = on_nan});
    CHECK(skipped == std::vector<bool>{false, false, true, false});
    CHECK(net.moved() == 3.0);
  }
}

TEST_CASE("Trainer: the last saved state is finite after a NaN gradient") {
  const Directory directory;
  const auto batches = batches_with_bad_at(6, 4);
  {
    Root net;
    ga::optim::AdamW adamw(net.parameters(), 0.1);
    ga::Trainer trainer(net, adamw, root, ga::Accumulate{.steps = 2},
                        ga::SaveState{.directory = directory / "states", .every_updates = 1, .keep_last = 1});
    REQUIRE_ERROR("for one of the 2 batches up to batch 5" + both + "3", trainer.fit(batches));
  }
  Root net;
  ga::optim::AdamW adamw(net.parameters(), 0.1);
  ga::Trainer trainer(net, adamw, root, ga::Accumulate{.steps = 2});
  const auto report = trainer.fit(batches, {.on_nan = ga::OnNan::skip, .resume = directory / "states"});
  CHECK(report.updates == 2);
  CHECK(report.nan_batches == 2);
  CHECK(std::isfinite(net.moved()));
}

TEST_CASE("Trainer: with steps in backward, no parameter is updated by a NaN gradient") {
  Root net;
  ga::optim::SGD sgd(net.parameters(), 1.0);
  ga::Trainer trainer(net, sgd, root, ga::OptimizerInBackward{});
  REQUIRE_ERROR("in that of second, for batch 1" + both + "2", trainer.fit(batches_with_bad_at(3, 1)));
  CHECK(net.moved() == 1.0);
  const auto report = trainer.fit(batches_with_bad_at(3, 1), {.on_nan = ga::OnNan::skip});
  CHECK(net.moved() == 3.0);
  CHECK(report.nan_batches == 1);
}

TEST_CASE("Trainer: a NaN gradient on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const bool clips = GENERATE(false, true);
  Root net;
  net.to(at::kCUDA);
  ga::optim::SGD sgd(net.parameters(), 1.0);
  ga::Trainer trainer(net, sgd, root, ga::Accumulate{.steps = 2},
                      clips ? std::optional(ga::ClipNorm{.max = 100}) : std::nullopt);
  REQUIRE_ERROR("in that of second, for one of the 2 batches up to batch 3" + both + "2",
                trainer.fit(batches_with_bad_at(6, 2)));
  CHECK(net.moved() == 1.0);
  const auto report = trainer.fit(batches_with_bad_at(6, 2), {.on_nan = ga::OnNan::skip});
  CHECK(net.moved() == 3.0);
  CHECK((report.skipped == 1 && report.nan_batches == 2));
  auto batches = batches_with_bad_at(4, 3);
  batches[3] = std::numeric_limits<double>::infinity();  // the loss and its gradient are infinite
  REQUIRE_ERROR("the loss must be finite, got inf for batch 3 of epoch 2", trainer.fit(batches));
  CHECK(net.moved() == 4.0);
}
