// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/models.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/cpu/Utils.h>

#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

// Operations run in 16 bits inside a scope, and its end restores everything.

namespace ga = gradaccum;
namespace autocast = at::autocast;
using namespace testing;

namespace {

static_assert(!std::is_copy_constructible_v<ga::Autocast> && !std::is_copy_assignable_v<ga::Autocast>);
static_assert(!std::is_move_constructible_v<ga::Autocast> && !std::is_move_assignable_v<ga::Autocast>);

struct State {
  bool enabled = autocast::is_autocast_enabled(at::kCPU), cuda_enabled = autocast::is_autocast_enabled(at::kCUDA);
  at::ScalarType dtype = autocast::get_autocast_dtype(at::kCPU), cuda_dtype = autocast::get_autocast_dtype(at::kCUDA);
  bool cache_enabled = autocast::is_autocast_cache_enabled();
  int nesting = (autocast::increment_nesting(), autocast::decrement_nesting());
  bool operator==(const State&) const = default;
};

/// Before 2.11 LibTorch keeps a cast without gradients for a later use with them.
constexpr bool gradients_vanish = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11;

struct Product {
  at::Tensor x = torch::randn({4, 4}), weight = torch::randn({4, 4}).set_requires_grad(true);
  at::Tensor operator()() const { return x.mm(weight); }
  bool learns(const at::Tensor& y) {
    weight.mutable_grad().reset();
    if (y.requires_grad()) y.to(at::kFloat).sum().backward();
    return weight.grad().defined() && weight.grad().abs().sum().item<float>() > 0;
  }
};

bool is_kept(const at::Tensor& weight, at::ScalarType dtype) {
  return autocast::cached_cast(dtype, weight, at::kCPU).is_same(autocast::cached_cast(dtype, weight, at::kCPU));
}

// Sets LibTorch's flags as the scope does, without its handling of casts to another dtype.
struct FlagsOnly {
  explicit FlagsOnly(at::ScalarType dtype) {
    autocast::set_autocast_enabled(at::kCPU, true);
    autocast::set_autocast_dtype(at::kCPU, dtype);
    autocast::increment_nesting();
  }
  ~FlagsOnly() {
    if (autocast::decrement_nesting() == 0) autocast::clear_cache();
    autocast::set_autocast_enabled(at::kCPU, before.enabled);
    autocast::set_autocast_dtype(at::kCPU, before.dtype);
  }
  State before;
};

}  // namespace

TEST_CASE("Autocast: products run in 16 bits, the loss and all gradients in float32") {
  Product product;
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto loss = [&] {
      ga::Autocast scope(at::kCPU, dtype);
      CHECK(product().scalar_type() == dtype);
      return torch::mse_loss(product(), product.x);
    }();
    CHECK(loss.scalar_type() == at::kFloat);
    CHECK(product().scalar_type() == at::kFloat);  // control: outside it is not
    product.weight.mutable_grad().reset();
    loss.backward();
    CHECK(product.weight.grad().scalar_type() == at::kFloat);
  }
}

TEST_CASE("Autocast: the device is a type, a name, or a tensor's; its dtype is the default") {
  Product product;
  const auto dtype_in = [&](auto device) {
    ga::Autocast scope(device);
    return product().scalar_type();
  };
  CHECK(dtype_in(torch::kCPU) == at::kBFloat16);
  CHECK(dtype_in("cpu") == at::kBFloat16);
  CHECK(dtype_in(std::string("cpu")) == at::kBFloat16);
  CHECK(dtype_in(product.x.device()) == at::kBFloat16);
  for (auto* name : {"cuda", "cuda:1"}) CHECK(dtype_in(name) == at::kFloat);  // control: another device
  ga::Autocast scope(torch::kCUDA);
  CHECK(autocast::get_autocast_dtype(at::kCUDA) == at::kHalf);
  CHECK(autocast::is_autocast_enabled(at::kCUDA));
}

TEST_CASE("Autocast: the end of the scope restores everything, after an exception too") {
  const State before;
  {
    ga::Autocast outer(at::kCPU, at::kHalf, true, false);
    const State within;
    CHECK(within.enabled);
    CHECK(within.dtype == at::kHalf);
    CHECK_FALSE(within.cache_enabled);
    CHECK(within.nesting == before.nesting + 1);
    {
      ga::Autocast inner(at::kCPU, at::kBFloat16);
      CHECK(State().nesting == before.nesting + 2);
      CHECK_FALSE(State().cache_enabled);  // as in the outer scope
      ga::Autocast disabled("cpu", {}, false);
      CHECK_FALSE(State().enabled);
      ga::Autocast cuda(at::kCUDA, at::kBFloat16, true, true);
      CHECK(State().cuda_dtype == at::kBFloat16);
    }
    CHECK(State() == within);
    const auto fails = [] {
      ga::Autocast inner(at::kCPU, at::kBFloat16, true, true);
      throw std::runtime_error("forward broke");
    };
    CHECK(error_of(fails) == "forward broke");
    CHECK(State() == within);
  }
  CHECK(State() == before);
}

TEST_CASE("Autocast: invalid arguments change nothing") {
  const State before;
  for (auto dtype : {at::kFloat, at::kDouble, at::kInt})
    REQUIRE_ERROR("Autocast: dtype must be bfloat16 or float16, got", ga::Autocast(at::kCPU, dtype));
  REQUIRE_ERROR("got Float; for a part that runs in float32 pass enabled = false", ga::Autocast(at::kCUDA, at::kFloat));
  REQUIRE_ERROR("Autocast: the device must support autocast, as cuda and cpu do, got meta", ga::Autocast(at::kMeta));
  CHECK(State() == before);
  ga::Autocast disabled(at::kCPU, at::kFloat, false);
  CHECK(Product()().scalar_type() == at::kFloat);
}

TEST_CASE("Autocast: a disabled part runs in float32, in any outer scope") {
  Product product;
  ga::Autocast outer(at::kCPU);
  const auto half = product();
  {
    ga::Autocast part(at::kCPU, {}, false);
    CHECK(product().scalar_type() == at::kFloat);
    CHECK(half.to(at::kFloat).mm(product.weight).scalar_type() == at::kFloat);
  }
  CHECK(product().scalar_type() == at::kBFloat16);
  ga::Autocast disabled(at::kCPU, {}, false);
  ga::Autocast again(at::kCPU, at::kHalf);
  CHECK(product().scalar_type() == at::kHalf);
}

TEST_CASE("Autocast: a cast without gradients does not make later gradients vanish, from LibTorch 2.11 on") {
  Product product;
  for (bool nested : {false, true})
    for (int how = 0; how < 4; ++how) {
      INFO("how " << how << ", nested " << nested);
      ga::Autocast scope(at::kCPU);
      const auto without = [&] {
        std::optional<ga::Autocast> inner;
        if (nested) inner.emplace(at::kCPU);
        return product();
      };
      if (how == 0) {
        at::NoGradGuard no_grad;
        CHECK_FALSE(without().requires_grad());
      } else if (how == 1) {
        c10::InferenceMode inference;
        CHECK_FALSE(without().requires_grad());
      } else if (how == 2) {
        product.weight.set_requires_grad(false);
        CHECK_FALSE(product.learns(without()));  // control: vanished gradients are detected
        product.weight.set_requires_grad(true);
      } else {
        std::thread([&] {
          at::NoGradGuard no_grad;
          autocast::increment_nesting();  // stays open, so casts are kept
          ga::Autocast other(at::kCPU);
          product();
        }).join();
      }
      CHECK(product.learns(product()) == (!gradients_vanish || how == 2));
      CHECK(product.learns(product()) == (!gradients_vanish || how == 2));
    }
}

TEST_CASE("Autocast: a parameter is cast once, until the outermost scope ends") {
  Product product;
  at::Tensor kept;
  {
    ga::Autocast outer(at::kCPU);
    CHECK(is_kept(product.weight, at::kBFloat16));
    kept = autocast::cached_cast(at::kBFloat16, product.weight, at::kCPU);
    {
      ga::Autocast inner(at::kCPU);
      product();
    }
    CHECK(kept.is_same(autocast::cached_cast(at::kBFloat16, product.weight, at::kCPU)));
    {
      ga::Autocast without(at::kCPU, {}, true, /*cache_enabled=*/false);
      CHECK_FALSE(is_kept(product.weight, at::kBFloat16));
    }
    CHECK(is_kept(product.weight, at::kBFloat16));
    const auto before = product();
    at::NoGradGuard no_grad;
    product.weight.zero_();
    CHECK(product().equal(before));  // control: the old cast is used after an update
  }
  ga::Autocast next(at::kCPU);
  CHECK_FALSE(kept.is_same(autocast::cached_cast(at::kBFloat16, product.weight, at::kCPU)));
  CHECK(product().abs().sum().item<float>() == 0);
}

TEST_CASE("Autocast: scopes of both dtypes nest, before and after a cast is cached") {
  Product product;
  {
    ga::Autocast outer(at::kCPU, at::kBFloat16);
    CHECK(product().scalar_type() == at::kBFloat16);
    {
      ga::Autocast inner(at::kCPU, at::kHalf);
      CHECK(product().scalar_type() == at::kHalf);
      CHECK(product.learns(product()));
    }
    CHECK(product().scalar_type() == at::kBFloat16);
    CHECK(product.learns(product()));
  }
  FlagsOnly outer(at::kBFloat16);  // control: LibTorch's flags alone give another result
  product();
  FlagsOnly inner(at::kHalf);
  REQUIRE_ERROR("same dtype", product());
}

TEST_CASE("Autocast: a scope belongs to its thread") {
  ga::Autocast scope(at::kCPU);
  std::thread([] {
    CHECK_FALSE(State().enabled);
    CHECK(State().nesting == 0);
    ga::Autocast other(at::kCPU, at::kHalf);
    CHECK(Product()().scalar_type() == at::kHalf);
  }).join();
  CHECK(State().dtype == at::kBFloat16);
  CHECK(State().nesting == 1);
}

TEST_CASE("Autocast: threads that train at the same time do not affect each other") {
  const auto train = [](at::Tensor& result) {
    const auto x = torch::ones({8, 4}), y = torch::ones({8, 3});
    const auto weight = torch::full({4, 3}, 0.5).set_requires_grad(true);
    torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.1));
    for (int i = 0; i < 50; ++i) {
      const auto loss = [&] {
        ga::Autocast scope(at::kCPU);
        return torch::mse_loss(x.mm(weight), y);
      }();
      loss.backward();
      sgd.step();
      sgd.zero_grad();
    }
    result = weight.detach();
  };
  at::Tensor alone;
  train(alone);
  std::vector<at::Tensor> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { train(result); });
  for (auto& thread : threads) thread.join();
  for (auto& result : results) CHECK(result.equal(alone));
}

TEST_CASE("Autocast: under an accumulator, micro-batches sum up as by hand") {
  const auto data = make_batches({4, 4, 4, 4, 4, 4, 4, 4}, at::kFloat);
  const auto forward = [](auto& model, auto& batch, bool enabled) {
    ga::Autocast scope(at::kCPU, at::kBFloat16, enabled);
    return loss_of(model, batch);
  };
  const auto run = [&](bool by_hand, bool enabled) {
    auto model = make_model(at::kFloat);
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ga::GradAccumulator optimizer(sgd, {.steps = 4});
    for (std::size_t i = 0; i < data.size(); ++i) {
      auto loss = forward(model, data[i], enabled);
      if (!by_hand) {
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
      } else {
        (loss / 4).backward();
        if (i % 4 != 3) continue;
        sgd.step();
        sgd.zero_grad();
      }
    }
    return flat(model);
  };
  CHECK(distance(run(false, true), run(true, true)) < 1e-6);
  CHECK(distance(run(false, true), run(false, false)) < 1e-2);
  CHECK(distance(run(false, true), run(false, false)) > 1e-6);  // control: autocast had an effect
}

// Trains in one scope, or in one per forward pass. `step` is the tested way to step the optimizer.
template <class Optimizer, class Step>
std::vector<double> losses_in(bool one_scope, const Step& step) {
  torch::manual_seed(1);
  torch::nn::Linear model(4, 3);
  Optimizer optimizer(model->parameters(), 0.1);
  const auto data = make_batches({8}, at::kFloat).front();
  std::vector<double> losses;
  std::optional<ga::Autocast> all;
  if (one_scope) all.emplace(at::kCPU);
  for (int i = 0; i < 5; ++i) {
    const auto loss = [&] {
      std::optional<ga::Autocast> forward;
      if (!one_scope) forward.emplace(at::kCPU);
      return loss_of(model, data);
    }();
    losses.push_back(loss.template item<double>());
    step(optimizer, loss);
    optimizer.zero_grad();
  }
  return losses;
}

TEST_CASE("Autocast: a step clears the casts, so that one scope around a training loop trains") {
  const auto check = []<class Optimizer>(std::type_identity<Optimizer>, const auto& step) {
    const auto losses = losses_in<Optimizer>(/*one_scope=*/false, step);
    CHECK(losses_in<Optimizer>(/*one_scope=*/true, step) == losses);
    CHECK(losses[2] < losses[1]);
  };
  const auto plain = [](auto& optimizer, const at::Tensor& loss) {
    loss.backward();
    optimizer.step();
  };
  const auto scaled = [](auto& optimizer, const at::Tensor& loss) {
    ga::AmpScaler scaler({.init_scale = 8.0});
    scaler.scale(loss).backward();
    scaler.step(optimizer);
  };
  const auto accumulated = [](auto& optimizer, const at::Tensor& loss) {
    ga::GradAccumulator accumulator(optimizer, {.steps = 1});
    accumulator.backward(loss);
    accumulator.step();
  };
  const auto in_backward = [](auto& optimizer, const at::Tensor& loss) {
    ga::GradAccumulator accumulator(optimizer, {.steps = 1, .in_backward = true});
    accumulator.backward(loss);
    accumulator.step();
  };
  constexpr std::type_identity<torch::optim::SGD> torch_sgd;
  constexpr std::type_identity<ga::optim::SGD> sgd;
  check(sgd, plain);
  check(std::type_identity<ga::optim::Adafactor>(), plain);
  check(std::type_identity<ga::optim::AdamW8bit>(), plain);
  check(sgd, scaled);
  check(sgd, accumulated);
  check(sgd, in_backward);
  check(torch_sgd, scaled);
  check(torch_sgd, accumulated);
  // Control: LibTorch's step keeps them, as Python's does.
  CHECK(losses_in<torch::optim::SGD>(true, plain) != losses_in<torch::optim::SGD>(false, plain));
}

TEST_CASE("is_bf16_fast: true for processors with AVX-512 or Arm's BF16, and for devices") {
  CHECK(ga::is_bf16_fast(at::kCUDA));
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  const auto processor = at::cpu::get_cpu_capabilities();
  const auto has = [&](const char* feature) { return processor.at(feature).toBool(); };
  const bool is_x86 = processor.count("avx512_bw") > 0;
  CHECK(ga::is_bf16_fast(at::kCPU) ==
        (is_x86 ? has("avx512_bw") && has("avx512_vl") && has("avx512_dq") : has("bf16")));
#elif defined(__x86_64__)
  CHECK(ga::is_bf16_fast(at::kCPU) == at::cpu::is_avx512_supported());
#endif
}

TEST_CASE("Autocast: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  Product product;
  product.x = product.x.cuda();
  product.weight = product.weight.detach().cuda().set_requires_grad(true);
  for (auto dtype : {at::kHalf, at::kBFloat16}) {
    ga::Autocast scope(product.x.device(), dtype);
    {
      at::NoGradGuard no_grad;
      CHECK(product().scalar_type() == dtype);
    }
    CHECK(product.learns(product()) != gradients_vanish);
  }
  CHECK(product().scalar_type() == at::kFloat);
}
