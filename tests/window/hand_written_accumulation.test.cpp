// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/ema.hpp>

#include "support/models.hpp"
#include "support/warnings.hpp"

#include <functional>
#include <memory>

// Remains of a hand-written accumulation, each in both forms of backward: detected, or listed as undetected in
// docs/gradient_accumulation.md.

namespace ga = gradaccum;
using namespace testing;

namespace {

enum class Form { plain, weighted };

/// A loop of windows of four, into which tests insert mistakes.
template <class Optimizer>
struct LoopOf {
  torch::nn::Sequential model = make_model();
  Optimizer wrapped;
  ga::GradAccumulator<Optimizer> optimizer;
  Form form;
  std::vector<Example> data = make_batches({4, 4, 4, 4, 4, 4, 4, 4});

  explicit LoopOf(Form which, double lr = 0.1, std::int64_t steps = 4)
      : wrapped(model->parameters(), lr), optimizer(wrapped, {.steps = steps}), form(which) {}

  void backward(const at::Tensor& loss) { form == Form::plain ? loss.backward() : optimizer.backward(loss); }
  void backward(std::size_t i) { backward(loss_of(model, data.at(i))); }
  void micro_batch(std::size_t i) {
    backward(i);
    optimizer.step();
    optimizer.zero_grad();
  }
  void clip(double max = 0.01) { torch::nn::utils::clip_grad_norm_(model->parameters(), max); }

  /// Returns the error of a loop that calls `step` after each backward.
  std::string error(const std::function<void(std::size_t)>& step) {
    return error_of([&] {
      for (std::size_t i = 0; i < data.size(); ++i) {
        backward(i);
        step(i);
      }
    });
  }
};
using Loop = LoopOf<torch::optim::SGD>;

Form both() { return GENERATE(Form::plain, Form::weighted); }

at::Tensor of_large_batches(std::size_t steps = 4) {
  Loop loop(Form::plain);
  for (std::size_t i = 0; i < loop.data.size(); i += steps) {
    loop.wrapped.zero_grad();
    loss_of(loop.model, joined(loop.data, i, i + steps)).backward();
    loop.wrapped.step();
  }
  return flat(loop.model);
}

constexpr const char* moved =
    " in the middle of a window, so the window no longer equals one large batch. If the wrapped optimizer's own step() "
    "is called, delete that call: optimizer.step() makes it";
constexpr const char* rewritten =
    "changed between backward and step(), while it is an unfinished sum. If torch::nn::utils::clip_grad_norm_ changed "
    "it, call optimizer.clip_grad_norm_(max)";
constexpr const char* not_cleared = "the gradients of the last window were not cleared (or only through .data(), which";

}  // namespace

TEST_CASE("left-overs: a loop without any prints nothing, and equals the large batch") {
  const Warnings warnings;
  Loop loop(both());
  for (std::size_t i = 0; i < loop.data.size(); ++i) loop.micro_batch(i);
  CHECK(distance(flat(loop.model), of_large_batches()) < 1e-12);
  CHECK(warnings.texts().empty());
}

TEST_CASE("left-overs: a divided loss cannot be detected") {
  Loop loop(both());
  for (std::size_t i = 0; i < loop.data.size(); ++i) {
    loop.backward(loss_of(loop.model, loop.data[i]) / 4);
    loop.optimizer.step();
    loop.optimizer.zero_grad();
  }
  CHECK(distance(flat(loop.model), of_large_batches()) > 0.01);
}

TEST_CASE("left-overs: a step() at every fourth micro-batch") {
  const Warnings warnings;
  Loop loop(both());
  const auto error = loop.error([&](std::size_t i) {
    if ((i + 1) % 4 == 0) {
      loop.optimizer.step();
      loop.optimizer.zero_grad();
    }
  });
  if (loop.form == Form::weighted) {
    CHECK(contains(error, "backward() was called twice before step()"));
  } else {
    CHECK(error.empty());
    REQUIRE(warnings.texts().size() == 1);
    CHECK(contains(warnings.texts()[0],
                   "4 backward passes preceded a step(), as many as .steps. If step() is inside `if ((i + 1) % 4 == "
                   "0)`, delete that `if`"));
  }
}

TEST_CASE("left-overs: several losses of a micro-batch do not count as a left-over") {
  const Warnings warnings;
  Loop loop(Form::plain);
  for (std::size_t i = 0; i < loop.data.size(); ++i) {
    for (double share : {0.25, 0.75}) loop.backward(share * loss_of(loop.model, loop.data[i]));
    loop.optimizer.step();
    loop.optimizer.zero_grad();
  }
  CHECK(distance(flat(loop.model), of_large_batches()) < 1e-12);
  CHECK(warnings.texts().empty());
}

TEMPLATE_TEST_CASE("left-overs: a direct step of the wrapped optimizer", "", torch::optim::SGD, torch::optim::Adam,
                   torch::optim::AdamW, torch::optim::RMSprop, torch::optim::Adagrad, ga::optim::AdamW) {
  const Warnings warnings;
  LoopOf<TestType> loop(both());
  for (std::size_t i = 0; i < loop.data.size(); ++i) {
    loop.backward(i);
    loop.optimizer.step();
    if (i % 2 == 0) loop.wrapped.step();
    loop.optimizer.zero_grad();
  }
  REQUIRE(warnings.texts().size() == 1);  // only one warning
  CHECK(contains(warnings.texts()[0], std::string("moved") + moved));
}

TEST_CASE("left-overs: parameters that change between windows, or are restored, do not count as a left-over") {
  const Warnings warnings;
  Loop loop(both());
  ga::Ema::Running ema({});
  ema.update(loop.model);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < loop.data.size(); ++i) {
    {
      const at::AutoGradMode grad(true);
      loop.backward(i);
    }
    const bool moves = loop.optimizer.step();
    loop.optimizer.zero_grad();
    if (moves)
      for (auto& parameter : loop.model->parameters()) parameter.clamp_(-0.2, 0.2);
    ema.swap(loop.model);  // to evaluate the averages
    ema.swap(loop.model);
  }
  CHECK(loop.optimizer.updates() == 2);
  CHECK(warnings.texts().empty());
}

TEST_CASE("left-overs: writing to a parameter whose numbers the host cannot read is a warning") {
  const Warnings warnings;
  const auto parameter = torch::ones({3}, at::kMeta).requires_grad_();
  torch::optim::Adam adam({parameter}, 0.1);
  ga::GradAccumulator optimizer(adam, {.steps = 3});
  for (int i = 0; i < 3; ++i) {
    parameter.sum().backward();
    if (i < 2) optimizer.step();
    if (i == 0) adam.step();
  }
  REQUIRE(warnings.texts().size() == 1);
  CHECK(contains(warnings.texts()[0], std::string("a parameter (shape [3]) was written to") + moved));
}

TEST_CASE("left-overs: LibTorch's clipping before the window closes") {
  Loop loop(both());
  const auto first = GENERATE(std::size_t(0), 1, 3);  // also before the last step, when it is a sum, not the mean
  const bool value = GENERATE(false, true);
  const auto error = loop.error([&](std::size_t i) {
    if (i >= first && value) torch::nn::utils::clip_grad_value_(loop.model->parameters(), 1e-3);
    if (i >= first && !value) loop.clip();
    loop.optimizer.step();
    loop.optimizer.zero_grad();
  });
  CHECK(contains(error, rewritten));
  CHECK(loop.optimizer.updates() == 0);
  CHECK(loop.optimizer.micro_steps() == static_cast<std::int64_t>(first));
}

TEST_CASE("left-overs: clipping is detected by gradients() and flush(), too") {
  Loop loop(both());
  loop.micro_batch(0);
  loop.backward(1);
  loop.clip();
  if (loop.form == Form::plain)
    REQUIRE_ERROR(rewritten, loop.optimizer.gradients());
  else
    REQUIRE_ERROR(rewritten, loop.optimizer.step());

  Loop flushed(Form::weighted), one(Form::weighted);
  flushed.micro_batch(0);
  flushed.micro_batch(1);
  flushed.clip();
  REQUIRE_ERROR(rewritten, flushed.optimizer.flush());
  one.micro_batch(0);
  one.clip();  // in a window of one the sum is the mean
  CHECK(one.optimizer.flush());

  Loop looked(Form::plain);
  looked.backward(0);
  looked.optimizer.gradients().norm();
  looked.clip();
  REQUIRE_ERROR(rewritten, looked.optimizer.step());
}

TEST_CASE("left-overs: clipping without effect, of applied gradients, and of windows of one is allowed") {
  Loop loose(both());
  CHECK(loose.error([&](std::size_t) {
    loose.clip(1e9);
    loose.optimizer.step();
    loose.optimizer.zero_grad();
  }) == "");
  CHECK(distance(flat(loose.model), of_large_batches()) < 1e-12);

  Loop applied(both()), asked(applied.form);
  CHECK(applied.error([&](std::size_t) {
    if (applied.optimizer.ready()) {
      applied.optimizer.gradients().apply();
      applied.clip();
    }
    applied.optimizer.step();
    applied.optimizer.zero_grad();
  }) == "");
  CHECK(asked.error([&](std::size_t) {
    asked.optimizer.clip_grad_norm_(0.01);
    asked.optimizer.step();
    asked.optimizer.zero_grad();
  }) == "");
  CHECK(applied.optimizer.updates() == 2);
  CHECK(distance(applied.model, asked.model) < 1e-12);

  Loop one(Form::plain, 0.1, 1), plain(Form::plain);
  CHECK(one.error([&](std::size_t) {
    one.clip();
    one.optimizer.step();
    one.optimizer.zero_grad();
  }) == "");
  CHECK(plain.error([&](std::size_t) {
    plain.clip();
    plain.wrapped.step();
    plain.wrapped.zero_grad();
  }) == "");
  CHECK(at::equal(flat(one.model), flat(plain.model)));
}

TEST_CASE("left-overs: gradients that are divided by hand, or cleared by zero_grad(false)") {
  const int which = GENERATE(0, 1, 2);
  Loop loop(Form::plain);
  const auto error = loop.error([&](std::size_t i) {
    if (which == 0)
      for (auto& parameter : loop.model->parameters()) parameter.grad().div_(4);
    if (which == 2) {
      loop.wrapped.zero_grad(false);
      loop.backward(i);
    }
    loop.optimizer.step();
    if (which == 1) loop.wrapped.zero_grad(false);
  });
  INFO(which << ": '" << error << "'");
  CHECK(contains(error, rewritten));
  CHECK(contains(error,
                 "If it was divided by the number of micro-batches, delete the division: a window takes the mean. If "
                 "zero_grad(false) changed it, "));
}

TEST_CASE("left-overs: gradients that no backward has computed are the user's") {
  Loop loop(Form::plain);
  for (int i = 0; i < 8; ++i) {
    for (auto& parameter : loop.model->parameters()) {
      auto& gradient = parameter.mutable_grad();
      gradient = gradient.defined() ? gradient.add_(1) : torch::ones_like(parameter);
    }
    loop.optimizer.step();
    loop.optimizer.zero_grad();
  }
  CHECK(distance(flat(loop.model), flat(make_model()) - 0.2) < 1e-12);
}

TEST_CASE("left-overs: no zero_grad() at all") {
  Loop loop(both());
  const bool looks = GENERATE(false, true);
  const auto error = loop.error([&](std::size_t) {
    if (looks) loop.optimizer.gradients();
    loop.optimizer.step();
  });
  CHECK(contains(error, not_cleared));
  CHECK(loop.optimizer.updates() == 1);
  CHECK(loop.optimizer.micro_steps() == 0);
  loop.optimizer.discard();
  for (std::size_t i = 0; i < 4; ++i) loop.micro_batch(i);
  CHECK(loop.optimizer.updates() == 2);
}

TEST_CASE("left-overs: gradients may be cleared in any way between two windows") {
  const Warnings warnings;
  Loop loop(both());
  const int how = GENERATE(0, 1, 2, 3, 4);
  CHECK(loop.error([&](std::size_t) {
    if (!loop.optimizer.step()) return;
    if (how == 0) loop.optimizer.zero_grad(false);
    if (how == 1) loop.wrapped.zero_grad();
    if (how == 2) loop.wrapped.zero_grad(false);
    if (how == 3) loop.model->zero_grad();
    if (how == 4) loop.model->zero_grad(false);
  }) == "");
  CHECK(distance(flat(loop.model), of_large_batches()) < 1e-12);
  CHECK(warnings.texts().empty());
}

TEST_CASE("left-overs: an uncleared window of one behaves as without an accumulator; weighted, it is an error") {
  Loop one(Form::plain, 0.1, 1), plain(Form::plain), weighted(Form::weighted, 0.1, 1);
  CHECK(one.error([&](std::size_t) { one.optimizer.step(); }) == "");
  CHECK(plain.error([&](std::size_t) { plain.wrapped.step(); }) == "");
  CHECK(at::equal(flat(one.model), flat(plain.model)));
  CHECK(contains(weighted.error([&](std::size_t) { weighted.optimizer.step(); }), not_cleared));
}

TEST_CASE("left-overs: unusual parameters and gradients cause no error") {
  const Warnings warnings;
  torch::manual_seed(3);
  torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  const std::vector<at::Tensor> parameters = {
      sparse->weight,
      torch::randn({}).requires_grad_(),
      torch::randn({0, 2}).requires_grad_(),
      torch::randn({4, 6}).t().detach().requires_grad_(),
      torch::randn({4, 8}).slice(1, 0, 8, 2).detach().requires_grad_(),
      torch::randn({3}, at::kBFloat16).requires_grad_(),
      torch::randn({3}, at::kComplexFloat).requires_grad_(),
      torch::randn({3}),
  };
  torch::optim::SGD sgd(parameters, 0.1);
  const auto in_float = GENERATE(std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kFloat));
  const auto form = both();
  ga::GradAccumulator optimizer(sgd, {.steps = 3, .accumulate_in = in_float});
  for (int i = 0; i < 9; ++i) {
    at::Tensor loss = sparse->forward(torch::tensor({i % 6, (i + 1) % 6})).sum();
    for (std::size_t j = 1; j < parameters.size(); ++j) loss = loss + at::real(parameters[j]).to(at::kFloat).sum();
    form == Form::plain ? loss.backward() : optimizer.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 3);
  CHECK(warnings.texts().empty());
}

TEST_CASE("left-overs: parts of one gradient, which share LibTorch's version counter, cause no error") {
  const Warnings warnings;
  torch::manual_seed(4);
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 3; ++i) parameters.push_back(torch::randn({2, 3}, at::kDouble).requires_grad_());
  const bool stacked = GENERATE(false, true);
  torch::optim::SGD sgd(parameters, 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 4});
  for (int i = 0; i < 8; ++i) {
    const auto whole = stacked ? torch::stack(parameters) : torch::cat(parameters);
    (whole * (i + 1)).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(optimizer.updates() == 2);
  CHECK(warnings.texts().empty());
  parameters[0].sum().backward();
  optimizer.step();
  torch::cat(parameters).square().sum().backward();
  torch::nn::utils::clip_grad_norm_(parameters, 0.01);
  REQUIRE_ERROR(rewritten, optimizer.step());  // their numbers are compared
}

TEST_CASE("left-overs: parameters that a backward does not reach cause no error") {
  const Warnings warnings;
  torch::nn::Linear trunk(4, 4), first(4, 1), second(4, 1);
  std::vector<at::Tensor> parameters;
  for (auto* part : {&trunk, &first, &second})
    for (auto& parameter : (*part)->parameters()) parameters.push_back(parameter);
  torch::optim::SGD sgd(parameters, 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  for (int i = 0; i < 8; ++i) {
    (i / 2 % 2 ? first : second)->forward(trunk->forward(torch::ones({1, 4}))).sum().backward();
    if (optimizer.step()) sgd.zero_grad(false);
  }
  CHECK(optimizer.updates() == 4);
  CHECK(warnings.texts().empty());
}

TEST_CASE("left-overs: hooks that change a gradient on arrival are part of the pass") {
  struct Mask final : torch::autograd::PostAccumulateGradHook {
    void operator()(const at::Tensor& parameter) override {
      const at::NoGradGuard no_grad;
      parameter.mutable_grad().mul_(parameter.gt(0));
    }
  };
  const auto parameter = torch::tensor({-1.0, 2.0}).requires_grad_();
  torch::autograd::impl::post_acc_grad_hooks(parameter) = std::make_unique<Mask>();
  torch::optim::SGD sgd({parameter}, 0.5);
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  for (int i = 0; i < 4; ++i) {
    parameter.sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(at::equal(parameter.detach(), torch::tensor({-1.0, 1.0})));
}

TEST_CASE("left-overs: parameters that are perturbed and restored may change in their last digits: at most a warning") {
  const std::int64_t steps = GENERATE(1, 4);
  const Warnings warnings;
  auto model = make_model(at::kFloat);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(sgd, {.steps = steps});
  double by = 1;
  for (auto& batch : make_batches({4, 4, 4, 4}, at::kFloat)) {
    by *= 100;  // loses other digits each time
    for (auto& parameter : model->parameters()) parameter.data().add_(by);
    optimizer.backward(loss_of(model, batch));
    for (auto& parameter : model->parameters()) parameter.data().sub_(by);
    optimizer.step();
    optimizer.zero_grad();
  }
  CHECK(warnings.texts().size() == (steps == 1 ? 0U : 1U));
}

TEST_CASE("left-overs: graphs of gradients, and a scaler, cause no error") {
  const Warnings warnings;
  Loop loop(Form::plain);
  CHECK(loop.error([&](std::size_t i) {
    loss_of(loop.model, loop.data[i]).backward({}, {}, /*create_graph=*/true);
    loop.optimizer.step();
    loop.optimizer.zero_grad();
  }) == "");

  LoopOf<torch::optim::Adam> scaled(both());
  ga::AmpScaler scaler;
  for (std::size_t i = 0; i < scaled.data.size(); ++i) {
    const auto loss = loss_of(scaled.model, scaled.data[i]);
    if (scaled.form == Form::plain)
      scaler.scale(loss).backward();
    else
      scaled.optimizer.backward(scaler.scale(loss));
    scaler.step(scaled.optimizer);
    scaler.update();
    scaled.optimizer.zero_grad();
  }
  CHECK(scaled.optimizer.updates() == 2);
  for (auto& text : warnings.texts()) CHECK_FALSE(contains(text, "GradAccumulator"));
}

TEST_CASE("left-overs: accumulators restore parameters in any order of destruction") {
  const auto model = make_model();
  const auto hook = [&](std::size_t i) -> auto& {
    return torch::autograd::impl::post_acc_grad_hooks(model->parameters()[i]);
  };
  torch::optim::SGD sgd(model->parameters(), 0.1);
  auto first = std::make_unique<ga::GradAccumulator<torch::optim::SGD>>(sgd);
  auto second = std::make_unique<ga::GradAccumulator<torch::optim::SGD>>(sgd);
  CHECK(hook(0) != nullptr);
  const bool in_order = GENERATE(true, false);
  (in_order ? first : second).reset();
  CHECK(hook(0) != nullptr);
  (in_order ? second : first).reset();
  for (std::size_t i = 0; i < model->parameters().size(); ++i) CHECK(hook(i) == nullptr);
  CHECK(model->parameters()[0].use_count() == make_model()->parameters()[0].use_count() + 1);  // the optimizer's
}

TEST_CASE("a sample changes with the numbers of a tensor, of every type and layout") {
  const auto dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kComplexDouble, at::kByte);
  const auto shape = GENERATE(std::vector<std::int64_t>{}, std::vector<std::int64_t>{1}, std::vector<std::int64_t>{3},
                              std::vector<std::int64_t>{5, 7}, std::vector<std::int64_t>{1000});
  for (bool transposed : {false, true}) {
    auto tensor = torch::randint(2, 100, shape, at::kDouble).to(dtype);
    if (transposed) tensor = tensor.t();
    const auto sample = ga::detail::sample_of(tensor);
    CHECK(sample != 0);
    CHECK(ga::detail::sample_of(tensor) == sample);
    CHECK(ga::detail::sample_of(tensor.clone()) == sample);
    tensor.data().add_(1);
    CHECK(ga::detail::sample_of(tensor) != sample);
  }
  CHECK(ga::detail::sample_of({}) == 0);
  CHECK(ga::detail::sample_of(torch::empty({0, 3})) == 0);
  CHECK(ga::detail::sample_of(torch::ones({3}, at::kMeta)) == 0);
  CHECK(ga::detail::sample_of(torch::ones({3}).to_sparse()) == 0);
}
