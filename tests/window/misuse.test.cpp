// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>

#include "support/models.hpp"
#include "support/warnings.hpp"

#include <limits>

// Mistakes of users: each is an error that names the fix, and leaves nothing half-changed.

namespace ga = gradaccum;
using namespace testing;

namespace {

struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    TORCH_CHECK(false, "backward broke");
  }
};

struct Fixture {
  torch::nn::Sequential model = make_model();
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(0.1)};
  ga::GradAccumulator<torch::optim::SGD> optimizer{sgd, {.steps = 3}};
  std::vector<Example> data = make_batches({4, 4, 4, 4});

  at::Tensor loss(int i = 0) { return loss_of(model, data.at(i)); }
  void micro_batch(int i = 0) {
    loss(i).backward();
    optimizer.step();
  }
};

}  // namespace

TEST_CASE("misuse: options out of range") {
  Fixture f;
  REQUIRE_ERROR("GradAccumulator: steps must be >= 1, got 0", ga::GradAccumulator(f.sgd, {.steps = 0}));
  REQUIRE_ERROR("steps must be >= 1, got -2", ga::GradAccumulator(f.sgd, {.steps = -2}));
  REQUIRE_ERROR("accumulate_in must be a floating dtype, got Int",
                ga::GradAccumulator(f.sgd, {.accumulate_in = at::kInt}));
  for (double max : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    REQUIRE_ERROR("max_norm must be > 0, got", f.optimizer.clip_grad_norm_(max));
    REQUIRE_ERROR("max_norm must be > 0, got", ga::clip_grad_norm_(f.model->parameters(), max));
  }
  REQUIRE_ERROR("clip_value must be >= 0, got -1", f.optimizer.clip_grad_value_(-1));
}

TEST_CASE("misuse: gradients from before the first window, and another accumulator of the same parameters") {
  Fixture f;
  f.loss().backward();
  REQUIRE_ERROR(
      "parameter 0 (shape [8, 4]) has a gradient from before this window, which backward would add to; call "
      "optimizer.zero_grad() before the first optimizer.backward(loss)",
      f.optimizer.backward(f.loss()));
  f.optimizer.zero_grad();
  f.optimizer.backward(f.loss());
  f.optimizer.step();
  ga::GradAccumulator other(f.sgd);
  f.loss().backward();
  other.step();
  REQUIRE_ERROR("If these parameters have two accumulators, keep one.", f.optimizer.backward(f.loss(1)));
}

TEST_CASE("misuse: the number of micro-batches may be of any integer type") {
  Fixture f;
  const std::size_t unsigned_steps = 5;
  const std::int8_t short_steps = 6;
  CHECK(contains(ga::GradAccumulator(f.sgd, {.steps = unsigned_steps}).description(), "of 5 steps"));
  CHECK(contains(ga::GradAccumulator(f.sgd, {.steps = short_steps}).description(), "of 6 steps"));
  CHECK(contains(ga::GradAccumulator(f.sgd, {.steps = f.data.size()}).description(), "of 4 steps"));
  REQUIRE_ERROR("steps must be >= 1", ga::GradAccumulator(f.sgd, {.steps = std::numeric_limits<std::size_t>::max()}));
}

TEST_CASE("misuse: weights out of range change nothing") {
  Fixture f;
  for (double weight : {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    REQUIRE_ERROR("Loss: items must be finite and >= 0, got", f.optimizer.backward({f.loss(), weight}));
  CHECK_FALSE(f.model->parameters()[0].grad().defined());
  f.micro_batch();  // the plain form is still allowed
  CHECK(f.optimizer.micro_steps() == 1);
}

TEST_CASE("misuse: values that are not a loss") {
  Fixture f;
  REQUIRE_ERROR("Loss: the mean must have one element, got shape [2]", f.optimizer.backward(torch::ones({2})));
  REQUIRE_ERROR("got an undefined tensor", f.optimizer.backward(at::Tensor()));
  REQUIRE_ERROR("Loss: the mean must require grad", f.optimizer.backward(torch::ones({})));
  f.optimizer.backward(f.loss());
  f.optimizer.step();
  CHECK(f.optimizer.micro_steps() == 1);
}

TEST_CASE("misuse: model->zero_grad() inside a window is detected, by step, backward and flush") {
  for (int where = 0; where < 4; ++where) {
    Fixture f;
    f.micro_batch();
    f.model->zero_grad();
    if (where == 0) REQUIRE_ERROR("vanished inside a window; call optimizer.zero_grad()", f.micro_batch());
    if (where == 1) REQUIRE_ERROR("vanished inside a window", f.optimizer.flush());
    if (where == 2) REQUIRE_ERROR("vanished inside a window", f.optimizer.gradients());
    if (where == 3) {
      Fixture g;
      g.optimizer.backward(g.loss());
      g.optimizer.step();
      g.sgd.zero_grad();
      REQUIRE_ERROR("of parameter 0 (shape [8, 4]) vanished", g.optimizer.backward(g.loss(1)));
    }
  }
}

TEST_CASE("misuse: model->zero_grad(false) inside a window is detected") {
  Fixture f;
  f.micro_batch();
  f.model->zero_grad(/*set_to_none=*/false);
  REQUIRE_ERROR("vanished inside a window", f.micro_batch());
}

TEST_CASE("misuse: model->zero_grad() between windows is allowed") {
  Fixture f;
  for (int window = 0; window < 2; ++window) {
    for (int i = 0; i < 3; ++i) f.micro_batch(i);
    f.model->zero_grad();
  }
  CHECK(f.optimizer.updates() == 2);
}

TEST_CASE("misuse: both forms of backward in one window") {
  Fixture f;
  f.optimizer.backward({f.loss(), 4});
  f.optimizer.step();
  f.loss(1).backward();
  REQUIRE_ERROR("mixes optimizer.backward(loss) with loss.backward()", f.optimizer.step());
  f.optimizer.discard();
  f.micro_batch();
  REQUIRE_ERROR("mixes optimizer.backward(loss) with loss.backward()", f.optimizer.backward({f.loss(1), 4}));
}

TEST_CASE("misuse: both forms of backward in one micro-batch") {
  for (int before : {0, 1}) {
    Fixture f;
    for (int i = 0; i < before; ++i) {
      f.optimizer.backward(f.loss());
      f.optimizer.step();
    }
    f.optimizer.backward(f.loss(1));
    f.loss(2).backward();
    REQUIRE_ERROR("changed outside optimizer.backward(loss)", f.optimizer.step());
    f.optimizer.discard();
    for (int i = 0; i < before; ++i) {
      f.optimizer.backward(f.loss());
      f.optimizer.step();
    }
    f.loss(2).backward();
    REQUIRE_ERROR(before == 0 ? "has a gradient from before this window" : "changed outside optimizer.backward(loss)",
                  f.optimizer.backward(f.loss(1)));
  }
}

TEST_CASE("misuse: in a weighted window zeroing gradients in place is detected, between windows it is allowed") {
  Fixture f;
  f.optimizer.backward(f.loss());
  f.optimizer.step();
  f.sgd.zero_grad(/*set_to_none=*/false);
  REQUIRE_ERROR("changed outside optimizer.backward(loss)", f.optimizer.backward(f.loss(1)));
  f.optimizer.discard();
  for (int i = 0; i < 6; ++i) {
    f.optimizer.backward(f.loss(i % 3));
    if (f.optimizer.step()) f.sgd.zero_grad(/*set_to_none=*/false);
  }
  CHECK(f.optimizer.updates() == 2);
}

TEST_CASE("misuse: a step without backward in a weighted window") {
  Fixture f;
  f.optimizer.backward(f.loss());
  f.optimizer.step();
  REQUIRE_ERROR("or with a step() that no backward precedes", f.optimizer.step());
}

TEST_CASE("misuse: backward after the gradients of the window were applied") {
  Fixture f;
  f.optimizer.set_steps(1);
  f.optimizer.backward(f.loss());
  f.optimizer.gradients().apply();
  REQUIRE_ERROR("backward() was called twice before step()", f.optimizer.backward(f.loss(1)));
  CHECK(f.optimizer.step());
}

TEST_CASE("misuse: weights too far apart for the loss's dtype, or for a sum") {
  auto weight = torch::zeros({2}).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1.0));
  ga::GradAccumulator optimizer(sgd, {.steps = 2});
  optimizer.backward({weight.sum().to(at::kHalf), 1});
  optimizer.step();
  REQUIRE_ERROR("at most 65504 times those of the window's first micro-batch (1)",
                optimizer.backward({weight.sum().to(at::kHalf), 1e6}));
  optimizer.backward({weight.sum().to(at::kHalf), 3});
  CHECK(optimizer.step());
  CHECK(weight[0].item<float>() == -1.0f);
  optimizer.zero_grad();
  optimizer.backward({weight.sum().to(at::kDouble), 1e308});
  optimizer.step();
  REQUIRE_ERROR("must have a finite sum", optimizer.backward({weight.sum().to(at::kDouble), 1e308}));
  CHECK(optimizer.micro_steps() == 1);
}

TEST_CASE("misuse: an accumulator wrapped through a reference to it") {
  Fixture f;
  torch::optim::Optimizer& behind = f.optimizer;
  REQUIRE_ERROR("not be another accumulator behind a reference", ga::GradAccumulator(behind, {.steps = 2}));
}

TEST_CASE("misuse: a second backward before step") {
  Fixture f;
  f.optimizer.backward(f.loss());
  REQUIRE_ERROR("backward() was called twice before step(); add the losses", f.optimizer.backward(f.loss(1)));
  f.optimizer.step();
  CHECK(f.optimizer.micro_steps() == 1);  // the first one counts
}

TEST_CASE("misuse: values inside a window, whose sums are incomplete") {
  Fixture f;
  f.loss().backward();
  REQUIRE_ERROR("inside `if (optimizer.ready())`", f.optimizer.gradients().values());
  f.optimizer.step();
  REQUIRE_ERROR("inside `if (optimizer.ready())`", f.optimizer.gradients().apply());
  f.micro_batch(1);
  REQUIRE(f.optimizer.ready());
  REQUIRE_ERROR("after backward", f.optimizer.gradients().apply());  // ready, but the last backward is missing
  f.loss(2).backward();
  f.optimizer.gradients().apply();
  CHECK(f.optimizer.step());
}

TEST_CASE("misuse: a handle of a closed window") {
  Fixture f;
  auto handle = f.optimizer.gradients();
  handle.norm();
  for (int i = 0; i < 3; ++i) f.micro_batch(i);
  CHECK(handle.closed());
  REQUIRE_ERROR("Gradients: this window is closed", handle.values());
  REQUIRE_ERROR("Gradients: this window is closed", handle.raw());
  REQUIRE_ERROR("Gradients: this window is closed", handle.factor());
  CHECK(handle.norm().item<double>() == 0.0);  // as when it was last read
  CHECK_FALSE(f.optimizer.gradients().closed());
}

TEST_CASE("misuse: an exception inside backward invalidates the window until it is discarded") {
  Fixture f;
  f.optimizer.backward(f.loss());
  f.optimizer.step();
  const auto before = flat(f.model);
  const auto broken = [&] { return loss_of(f.model, f.data[1]) + Throws::apply(f.model->parameters()[0]).sum(); };
  REQUIRE_ERROR("backward broke", f.optimizer.backward(broken()));
  REQUIRE_ERROR("incomplete; call discard()", f.optimizer.step());
  REQUIRE_ERROR("incomplete; call discard()", f.optimizer.flush());
  REQUIRE_ERROR("incomplete; call discard()", f.optimizer.backward(f.loss()));
  f.optimizer.discard();
  CHECK(flat(f.model).equal(before));
  for (int i = 0; i < 3; ++i) f.micro_batch(i);
  CHECK(f.optimizer.updates() == 1);
}

TEST_CASE("misuse: an optimizer that throws leaves the parameters, and a window to be discarded") {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  torch::optim::Adam adam(embedding->parameters(), torch::optim::AdamOptions(0.1));  // takes no sparse gradients
  ga::GradAccumulator optimizer(adam, {.steps = 2});
  const auto before = embedding->weight.clone();
  const auto micro_batch = [&] {
    embedding(torch::tensor({1, 2})).sum().backward();
    return optimizer.step();
  };
  micro_batch();
  REQUIRE_ERROR("sparse", micro_batch());
  REQUIRE_ERROR("incomplete; call discard()", micro_batch());
  CHECK(embedding->weight.equal(before));
  CHECK(optimizer.updates() == 0);
  optimizer.discard();
  CHECK(optimizer.micro_steps() == 0);
}

TEST_CASE("misuse: LBFGS behind a reference, and a class derived from it") {
  struct MyLBFGS : torch::optim::LBFGS {
    using LBFGS::LBFGS;
  };
  auto model = make_model();
  torch::optim::LBFGS lbfgs(model->parameters());
  MyLBFGS derived(model->parameters());
  for (torch::optim::Optimizer* behind :
       {static_cast<torch::optim::Optimizer*>(&lbfgs), static_cast<torch::optim::Optimizer*>(&derived)})
    REQUIRE_ERROR("must not be LBFGS", ga::GradAccumulator(*behind));
}

TEST_CASE("misuse: an accumulator that never updates anything says why, once") {
  const auto warnings_of = [](auto&& use) {
    const testing::Warnings warnings;
    {
      Fixture f;
      use(f);
    }
    return warnings.texts();
  };
  const auto only = [&](auto&& use) {
    const auto texts = warnings_of(use);
    REQUIRE(texts.size() == 1);
    return texts.front();
  };
  CHECK(only([](Fixture& f) {
          for (int i = 0; i < 7; ++i) f.optimizer.step();
        }).find("a window closed without a gradient for any parameter of the optimizer") != std::string::npos);
  CHECK(only([](Fixture& f) {  // the model of another optimizer
          auto other = make_model();
          for (int i = 0; i < 6; ++i) {
            f.optimizer.backward(loss_of(other, f.data[0]));
            f.optimizer.step();
            f.optimizer.zero_grad();
          }
        })
            .find("not for those of a copy of the model") != std::string::npos);
  CHECK(only([](Fixture& f) {
          for (int i = 0; i < 2; ++i) f.micro_batch(i);
        }).find("its only window has 2 of 3 micro-batches: call flush()") != std::string::npos);
  CHECK(only([](Fixture& f) {
          f.loss().backward();
          f.sgd.step();
          f.optimizer.zero_grad();
        }).find("its step() was never called: call it in place of the wrapped optimizer's") != std::string::npos);

  CHECK(warnings_of([](Fixture&) {}).empty());
  CHECK(warnings_of([](Fixture& f) {
          for (int i = 0; i < 4; ++i) {  // the fourth is an unflushed tail
            f.micro_batch(i);
            f.optimizer.zero_grad();
          }
        }).empty());
  CHECK(warnings_of([](Fixture& f) {  // no warning from a moved accumulator
          ga::GradAccumulator other(std::move(f.optimizer));
          f.loss().backward();
          other.step();
          other.flush();
        })
            .empty());
  CHECK(warnings_of([](Fixture& f) {
          try {
            f.micro_batch();
            const ga::GradAccumulator in_scope(std::move(f.optimizer));
          } catch (const c10::Error&) {  // moved inside a window
            f.optimizer.flush();
          }
        }).empty());

  torch::optim::SGD empty(std::vector<at::Tensor>(), 0.1);
  ga::GradAccumulator nothing(empty, {.steps = 1});
  REQUIRE_ERROR("GradAccumulator: the optimizer must have parameters to step", nothing.step());
}

TEST_CASE("misuse: a target that is broadcast against the output is reported, once") {
  Fixture f;
  const auto warnings_of = [&](at::Tensor output, at::Tensor target) {
    const testing::Warnings warnings;
    for (int i = 0; i < 2; ++i) {
      f.optimizer.backward(ga::Loss{f.loss(), 4}.with(output, target));
      f.optimizer.step();
    }
    f.optimizer.flush();
    return warnings.texts();
  };
  const auto column = torch::zeros({10, 1}), row = torch::zeros({10});
  CHECK(warnings_of(column, torch::zeros({1})).empty());
  CHECK(warnings_of(column, column).empty());
  CHECK(warnings_of(torch::zeros({10, 5}), torch::zeros({10}, at::kLong)).empty());
  const auto found = warnings_of(column, row);
  REQUIRE(found.size() == 1);
  CHECK(found.front().find("the output has the shape [10, 1] and the target [10], which an elementwise loss such as "
                           "mse_loss broadcasts to [10, 10]") != std::string::npos);
}
