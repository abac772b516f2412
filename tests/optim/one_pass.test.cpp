// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/leaves.hpp"
#include "support/models.hpp"

#include <sstream>
#include <thread>

// Compares our optimizers with LibTorch's, from which they derive.

namespace ga = gradaccum;
using namespace testing;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

/// Makes an optimizer of LibTorch, or ours with the same options.
struct Kind {
  std::string name;
  std::function<Optimizer(Parameters)> theirs, ours;
};

template <class Theirs, class Ours, class Options>
Kind kind(std::string name, Options options) {
  return {std::move(name), [=](Parameters p) -> Optimizer { return std::make_unique<Theirs>(p, options); },
          [=](Parameters p) -> Optimizer { return std::make_unique<Ours>(p, options); }};
}
Kind sgd(std::string name, SGDOptions o) { return kind<torch::optim::SGD, ga::optim::SGD>(name, o); }
Kind adam(std::string name, AdamOptions o) { return kind<torch::optim::Adam, ga::optim::Adam>(name, o); }
Kind adamw(std::string name, AdamWOptions o) { return kind<torch::optim::AdamW, ga::optim::AdamW>(name, o); }

const std::vector<Kind> kinds{
    sgd("SGD", SGDOptions(0.1)),
    sgd("SGD with decay", SGDOptions(0.1).weight_decay(0.1)),
    sgd("momentum", SGDOptions(0.1).momentum(0.9).weight_decay(0.01)),
    sgd("dampening", SGDOptions(0.1).momentum(0.9).dampening(0.4)),
    sgd("nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)),
    adam("Adam", AdamOptions(0.01)),
    adam("Adam with decay", AdamOptions(0.01).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-5)),
    adam("amsgrad", AdamOptions(0.01).amsgrad(true)),
    adamw("AdamW", AdamWOptions(0.01)),
    adamw("AdamW with decay", AdamWOptions(0.01).weight_decay(0.5)),
    adamw("AdamW, amsgrad", AdamWOptions(0.01).amsgrad(true)),
};

double largest_difference(const Parameters& a, const Parameters& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].numel() > 0) largest = std::max(largest, (a[i] - b[i]).abs().max().to(at::kDouble).item<double>());
  return largest;
}

/// Steps both `steps` times with the same gradients.
double difference_after(const Kind& kind, const Parameters& start, int steps,
                        const std::function<at::Tensor(const at::Tensor&, int)>& gradient_of) {
  auto a = leaves(start), b = leaves(start);
  auto theirs = kind.theirs(a), ours = kind.ours(b);
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < start.size(); ++i) {
      const auto gradient = gradient_of(start[i], step * 10 + static_cast<int>(i));
      a[i].mutable_grad() = gradient.defined() ? gradient.clone() : gradient;
      b[i].mutable_grad() = gradient.defined() ? gradient.clone() : gradient;
    }
    theirs->step();
    ours->step();
  }
  return largest_difference(a, b);
}

at::Tensor some_gradient(const at::Tensor& parameter, int seed) {
  torch::manual_seed(seed);
  return torch::randn(parameter.sizes(), parameter.options());
}

}  // namespace

TEST_CASE("one-pass optimizers: give LibTorch's results, for all options and shapes") {
  torch::manual_seed(1);
  for (auto dtype : {at::kDouble, at::kFloat}) {
    const Parameters start{torch::randn({7, 5}, dtype), torch::randn({}, dtype), torch::randn({0, 3}, dtype),
                           torch::randn({1, 300}, dtype), torch::randn({40, 30, 20}, dtype)};
    for (auto& kind : kinds) {
      INFO(kind.name);
      CHECK(difference_after(kind, start, 5, some_gradient) < (dtype == at::kDouble ? 1e-12 : 2e-5));
    }
  }
  // Control: another option gives a different result.
  const Parameters start{torch::randn({7, 5}, at::kDouble)};
  Kind mixed{"mixed", kinds[0].theirs, kinds[1].ours};
  CHECK(difference_after(mixed, start, 1, some_gradient) > 1e-4);
}

TEST_CASE("one-pass optimizers: parameters with occasional gradients have separate counts of steps") {
  const Parameters start{torch::randn({9}, at::kDouble), torch::randn({70}, at::kDouble),
                         torch::randn({3}, at::kDouble)};
  for (auto& kind : kinds) {
    INFO(kind.name);
    CHECK(difference_after(kind, start, 6, [](const at::Tensor& parameter, int seed) {
            return seed % 10 == (seed / 10) % 3 ? at::Tensor() : some_gradient(parameter, seed);
          }) < 1e-12);
  }
}

TEST_CASE("one-pass optimizers: gradients of any strides") {
  torch::manual_seed(2);
  const Parameters start{torch::randn({6, 8}, at::kDouble), torch::randn({4, 3, 5, 2}, at::kDouble),
                         torch::randn({33}, at::kDouble)};
  const std::vector<std::function<at::Tensor(const at::Tensor&, int)>> layouts{
      [](auto& p, int seed) { return some_gradient(p.transpose(0, -1), seed).contiguous().transpose(0, -1); },
      [](auto& p, int seed) {
        return some_gradient(torch::cat({p, p}, 0), seed).slice(0, 0, c10::nullopt, 2);
      },
      [](auto& p, int) { return torch::ones({}, p.options()).expand_as(p); },
      [](auto& p, int seed) { return at::_neg_view(some_gradient(p, seed)); },
      [](auto& p, int) { return at::_efficientzerotensor(p.sizes(), p.options()); },
  };
  for (auto& kind : kinds)
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      INFO(kind.name << ", layout " << i);
      auto a = leaves(start), b = leaves(start);
      auto theirs = kind.theirs(a), ours = kind.ours(b);
      for (int step = 0; step < 3; ++step) {
        for (std::size_t k = 0; k < start.size(); ++k) {
          const auto gradient = layouts[i](start[k], step);
          a[k].mutable_grad() = gradient.contiguous().clone();
          b[k].mutable_grad() = gradient;
        }
        theirs->step();
        ours->step();
      }
      CHECK(largest_difference(a, b) < 1e-12);
    }
}

TEST_CASE("one-pass optimizers: parameters of any strides; memory between their elements stays unchanged") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    const std::vector<std::function<at::Tensor()>> layouts{
        [] {
          return torch::arange(48, at::kDouble).reshape({8, 6}).t();
        },
        [] {
          return torch::arange(48, at::kDouble).reshape({8, 6}).slice(1, 1, 6, 2);
        },
        [] {
          return torch::arange(60, at::kDouble).reshape({1, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
        },
    };
    for (auto& layout : layouts) {
      const auto storage = layout();
      auto strided = storage.detach().set_requires_grad(true);
      const auto whole = at::from_blob(storage.storage().mutable_data(),
                                       {static_cast<std::int64_t>(storage.storage().nbytes() / 8)}, at::kDouble);
      const auto before = whole.clone();
      auto plain = leaves({strided.contiguous()});
      auto theirs = kind.theirs(plain), ours = kind.ours({strided});
      for (int step = 0; step < 3; ++step) {
        const auto gradient = some_gradient(plain[0], step);
        plain[0].mutable_grad() = gradient.clone();
        strided.mutable_grad() = gradient.clone();
        theirs->step();
        ours->step();
      }
      CHECK(largest_difference(plain, {strided}) < 1e-12);
      CHECK(whole.ne(before).sum().item<std::int64_t>() <= strided.numel());
      CHECK(whole.ne(before).any().item<bool>());
    }
  }
  auto expanded = torch::zeros({1}).expand({4}).detach().set_requires_grad(true);
  expanded.mutable_grad() = torch::ones({4});
  ga::optim::AdamW adamw({expanded});
  REQUIRE_ERROR("single memory location", adamw.step());
}

TEST_CASE("one-pass optimizers: groups, changed options, learning rates that a scheduler sets") {
  auto a = leaves({torch::randn({30}, at::kDouble), torch::randn({20}, at::kDouble)}), b = leaves(a);
  const auto run = [](auto optimizer, const Parameters& p) {
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(
        {p[1]}, std::make_unique<AdamWOptions>(AdamWOptions(0.05).weight_decay(0.3))));
    torch::optim::StepLR scheduler(optimizer, 2, 0.5);
    for (int step = 0; step < 8; ++step) {
      for (auto& parameter : p) parameter.mutable_grad() = some_gradient(parameter, step);
      if (step == 4) static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.9).eps(1e-3);
      optimizer.step();
      scheduler.step();
    }
  };
  run(torch::optim::AdamW({a[0]}, AdamWOptions(0.02)), a);
  run(ga::optim::AdamW({b[0]}, AdamWOptions(0.02)), b);
  CHECK(largest_difference(a, b) < 1e-12);
}

TEST_CASE("one-pass optimizers: a group's option of the class's default value takes the optimizer's, as in LibTorch") {
  const auto groups = [](auto given) {
    std::vector<torch::optim::OptimizerParamGroup> one;
    one.emplace_back(leaves({torch::ones({2})}), std::make_unique<decltype(given)>(given));
    return one;
  };
  const auto options_of = [](auto&& optimizer) {
    return static_cast<AdamWOptions&>(optimizer.param_groups().front().options());
  };
  for (const double decay : {1e-2, 0.3}) {  // the first is the class's default
    const auto given = AdamWOptions().weight_decay(decay).eps(1e-5), of_optimizer = AdamWOptions(0.5).weight_decay(0.1);
    const auto expected = options_of(torch::optim::AdamW(groups(given), of_optimizer));
    CHECK(options_of(ga::optim::AdamW(groups(given), of_optimizer)) == expected);
    CHECK(options_of(ga::optim::AdamW8bit(groups(given), of_optimizer)) == expected);
    using ga::optim::AdafactorOptions;
    const bool inherits = expected.lr() == 0.5;  // not in LibTorch 2.11
    ga::optim::Adafactor adafactor(groups(AdafactorOptions().weight_decay(decay - 1e-2).beta1(0.9)),
                                   AdafactorOptions(0.5).weight_decay(0.1).relative_step(false));
    const auto taken = AdafactorOptions(0.5).weight_decay(decay == 1e-2 ? 0.1 : decay - 1e-2).relative_step(false);
    const auto kept = AdafactorOptions().weight_decay(decay - 1e-2);
    CHECK(static_cast<AdafactorOptions&>(adafactor.param_groups()[0].options()) ==
          AdafactorOptions(inherits ? taken : kept).beta1(0.9));
  }
  ga::optim::Adafactor adafactor(groups(ga::optim::AdafactorOptions(1e-3).relative_step(false)),
                                 ga::optim::AdafactorOptions().warmup_init(true));
  for (auto& parameter : adafactor.param_groups()[0].params()) parameter.mutable_grad() = torch::ones_like(parameter);
  CHECK_NOTHROW(adafactor.step());  // warmup_init would require relative_step
}

TEST_CASE("one-pass optimizers: 16-bit parameters with float32 state; their gradients may be float32 sums") {
  for (auto dtype : {at::kBFloat16, at::kHalf})
    for (auto& kind : kinds) {
      INFO(kind.name << ", " << dtype);
      torch::manual_seed(3);
      auto narrow = leaves({torch::randn({100}).to(dtype), torch::randn({7, 11}).to(dtype)});
      auto ours = kind.ours(narrow);
      Parameters wide;
      for (auto& parameter : narrow) wide.push_back(parameter.detach().to(at::kFloat).set_requires_grad(true));
      auto reference = kind.theirs(wide);
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < narrow.size(); ++i) {
          narrow[i].mutable_grad() = some_gradient(narrow[i], step);
          wide[i].mutable_grad() = narrow[i].grad().to(at::kFloat);
        }
        ours->step();
        reference->step();
        for (std::size_t i = 0; i < narrow.size(); ++i) {  // each step is exact up to the last of 16 bits
          CHECK(torch::allclose(narrow[i].detach().to(at::kFloat), wide[i].detach(), dtype == at::kHalf ? 1e-3 : 8e-3,
                                dtype == at::kHalf ? 1e-5 : 1e-4));
          wide[i].detach().copy_(narrow[i].detach());
        }
      }
      for (auto& [key, state] : ours->state())
        if (auto* adam = dynamic_cast<torch::optim::AdamWParamState*>(state.get()))
          CHECK(adam->exp_avg().scalar_type() == at::kFloat);
    }
}

TEST_CASE("one-pass optimizers: complex parameters are pairs of real ones, as in Python") {
  torch::manual_seed(4);
  for (auto& kind : kinds) {
    INFO(kind.name);
    auto complex = leaves({torch::randn({6, 3}, at::kComplexDouble)});
    auto real = leaves({torch::view_as_real(complex[0].detach())});
    auto ours = kind.ours(complex), reference = kind.theirs(real);
    for (int step = 0; step < 3; ++step) {
      complex[0].mutable_grad() = some_gradient(complex[0], step).conj();
      real[0].mutable_grad() = torch::view_as_real(complex[0].grad().resolve_conj()).clone();
      ours->step();
      reference->step();
    }
    CHECK(largest_difference({torch::view_as_real(complex[0].detach())}, real) < 1e-12);
  }
}

TEST_CASE("one-pass optimizers: step(Gradients) multiplies and clips in its pass, and does not change the gradients") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    auto a = leaves({torch::randn({50}, at::kDouble), torch::randn({4, 6}, at::kDouble)}), b = leaves(a);
    auto theirs = kind.theirs(a), ours = kind.ours(b);
    for (int step = 0; step < 4; ++step) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        const auto gradient = some_gradient(a[i], step);
        a[i].mutable_grad() = gradient.clone();
        b[i].mutable_grad() = gradient * 1024;
      }
      torch::nn::utils::clip_grad_norm_(a, 0.5);
      theirs->step();
      const auto before = b[0].grad().clone();
      ga::Gradients gradients(Parameters{b[1], b[0]});  // in any order
      gradients.factor().divide(1024.0);
      gradients.factor().require_finite();
      ga::clip_grad_norm_(gradients, 0.5);
      dynamic_cast<ga::TakesGradients&>(*ours).step(gradients);
      CHECK(b[0].grad().equal(before));
    }
    CHECK(largest_difference(a, b) < 1e-12);
  }
}

TEST_CASE("one-pass optimizers: an overflow changes nothing, the step count included") {
  for (auto& kind : kinds)
    for (double bad : {INFINITY, -INFINITY, NAN}) {
      auto p = leaves({torch::ones({40}), torch::ones({5})});
      auto ours = kind.ours(p);
      const auto step = [&](bool finite) {
        p[0].mutable_grad() = torch::ones({40});
        p[1].mutable_grad() = torch::ones({5});
        if (!finite) p[0].mutable_grad()[17] = bad;
        ga::Gradients gradients(p);
        gradients.factor().require_finite();
        dynamic_cast<ga::TakesGradients&>(*ours).step(gradients);
      };
      step(false);
      CHECK(ours->state().empty());
      CHECK(p[0].eq(1).all().item<bool>());
      step(true);
      const auto after_one = p[0].detach().clone();
      CHECK_FALSE(after_one.eq(1).all().item<bool>());
      step(false);
      CHECK(p[0].equal(after_one));
      for (auto& [key, state] : ours->state())
        if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state.get())) CHECK(adam->step() == 1);
    }
}

TEST_CASE("one-pass optimizers: in windows, also behind a reference, they match LibTorch's") {
  const auto batches = make_batches({4, 4, 4, 4, 4, 4, 4});
  for (auto& kind : kinds)
    for (bool weighted : {false, true}) {
      INFO(kind.name);
      auto a = make_model(), b = make_model();
      auto theirs = kind.theirs(a->parameters()), ours = kind.ours(b->parameters());
      const auto run = [&](auto& model, torch::optim::Optimizer& wrapped) {
        ga::GradAccumulator optimizer(wrapped, {.steps = 3});
        for (auto& batch : batches) {
          auto loss = loss_of(model, batch);
          weighted ? optimizer.backward(ga::Loss{loss, batch.data.size(0) + 1}) : loss.backward();
          optimizer.clip_grad_norm_(0.3);
          optimizer.step();
          optimizer.zero_grad();
        }
        optimizer.flush();
      };
      run(a, *theirs);
      run(b, *ours);
      CHECK(distance(a, b) < 1e-12);
    }
}

TEST_CASE("one-pass optimizers: float32 sums of bfloat16 gradients are not rounded") {
  for (bool in_float32 : {true, false}) {
    auto p = torch::zeros({3}, at::kBFloat16).set_requires_grad(true);
    ga::optim::SGD sgd({p}, SGDOptions(3.0));
    ga::GradAccumulatorOptions options{.steps = 3};
    if (in_float32) options.accumulate_in = at::kFloat;
    ga::GradAccumulator optimizer(sgd, options);
    for (double slope : {256.0, 1.0, 1.0}) {
      (p * slope).sum().backward();
      optimizer.step();
    }
    CHECK(p[0].item<float>() == (in_float32 ? -258.0f : -256.0f));  // in bfloat16 256 + 1 is 256
  }
}

TEST_CASE("SGD: sparse gradients") {
  for (auto options : {SGDOptions(0.1), SGDOptions(0.1).momentum(0.9), SGDOptions(0.1).weight_decay(0.1)})
    for (auto dtype : {at::kDouble, at::kBFloat16}) {
      auto dense = torch::ones({10, 3}, dtype).set_requires_grad(true), sparse = leaves({dense})[0];
      ga::optim::SGD a({dense}, options), b({sparse}, options);
      for (int step = 0; step < 3; ++step) {
        const auto indices = torch::tensor({1, 4, 1}).reshape({1, 3});
        const auto gradient = torch::sparse_coo_tensor(indices, torch::arange(1, 10, dtype).reshape({3, 3}), {10, 3});
        dense.mutable_grad() = gradient.to_dense();
        sparse.mutable_grad() = gradient;
        ga::Gradients of_dense(Parameters{dense}), of_sparse(Parameters{sparse});
        of_dense.factor().divide(4.0);
        of_sparse.factor().divide(4.0);
        a.step(of_dense);
        b.step(of_sparse);
        CHECK(sparse.grad()._values()[0][0].item<double>() == 1.0);
      }
      CHECK(torch::allclose(dense.detach(), sparse.detach(), dtype == at::kDouble ? 1e-12 : 8e-3));
    }
}

TEST_CASE("one-pass optimizers: a parameter that is listed twice is an error, before any update") {
  auto p = torch::ones({3}).set_requires_grad(true), q = torch::ones({3}).set_requires_grad(true);
  p.mutable_grad() = torch::ones({3});
  q.mutable_grad() = torch::ones({3});
  ga::optim::AdamW adamw({q});
  adamw.step();
  adamw.add_param_group(torch::optim::OptimizerParamGroup({p, p}));
  const auto before = q.detach().clone();
  REQUIRE_ERROR("AdamW: a parameter of shape [3] is listed twice", adamw.step());
  CHECK(q.equal(before));
  CHECK(p.eq(1).all().item<bool>());
}

TEST_CASE("one-pass optimizers: autograd detects the step") {
  auto p = torch::ones({3}).set_requires_grad(true);
  auto loss = (p * p).sum();
  p.mutable_grad() = torch::ones({3});
  ga::optim::SGD sgd({p}, SGDOptions(0.1));
  sgd.step();
  REQUIRE_ERROR("modified by an inplace operation", loss.backward());
}

TEST_CASE("one-pass optimizers: a closure is called with gradients enabled, and its loss returned") {
  auto p = torch::ones({3}).set_requires_grad(true);
  ga::optim::AdamW adamw({p}, AdamWOptions(0.1));
  at::NoGradGuard no_grad;
  const auto loss = adamw.step([&] {
    adamw.zero_grad();
    auto loss = (p * p).sum();
    loss.backward();
    return loss;
  });
  CHECK(loss.item<float>() == 3.0f);
  CHECK(p.ne(1).all().item<bool>());
}

TEST_CASE("one-pass optimizers: the bits do not depend on the number of threads") {
  torch::manual_seed(5);
  const auto start = torch::randn({200, 300});
  const auto run = [&](int threads) {
    at::set_num_threads(threads);
    auto p = leaves({start, start[0]});
    ga::optim::AdamW adamw(p);
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : p) parameter.mutable_grad() = some_gradient(parameter, step);
      adamw.step();
    }
    return p[0].detach();
  };
  const auto threads = at::get_num_threads();
  const auto one = run(1), two = run(2), three = run(3);
  at::set_num_threads(threads);
  CHECK(one.equal(two));
  CHECK(one.equal(three));
}

TEST_CASE("one-pass optimizers: several threads can use an optimizer each") {
  std::vector<at::Tensor> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&result] {
      auto p = torch::ones({20000}).set_requires_grad(true);
      ga::optim::AdamW adamw({p});
      for (int step = 0; step < 20; ++step) {
        p.mutable_grad() = p.detach() + step;
        adamw.step();
      }
      result = p.detach();
    });
  for (auto& thread : threads) thread.join();
  for (auto& result : results) CHECK(result.equal(results[0]));
}

TEST_CASE("one-pass optimizers: files can be exchanged with LibTorch's optimizers") {
  for (auto& kind : kinds) {
    INFO(kind.name);
    const Parameters start{torch::randn({9, 4}, at::kDouble), torch::randn({70}, at::kDouble)};
    const auto train = [](torch::optim::Optimizer& optimizer, const Parameters& p, int from, int to) {
      for (int step = from; step < to; ++step) {
        for (auto& parameter : p) parameter.mutable_grad() = some_gradient(parameter, step);
        optimizer.step();
      }
    };
    auto a = leaves(start), b = leaves(start);
    auto theirs = kind.theirs(a), ours = kind.ours(b);
    train(*theirs, a, 0, 10);
    train(*ours, b, 0, 10);
    for (bool from_ours : {false, true}) {
      std::stringstream file;
      torch::save(from_ours ? *ours : *theirs, file);
      auto c = leaves(b);
      auto loaded = from_ours ? kind.theirs(c) : kind.ours(c);
      torch::load(*loaded, file);
      auto d = leaves(b);
      auto straight = kind.ours(d);
      std::stringstream own;
      torch::save(*ours, own);
      torch::load(*straight, own);
      train(*loaded, c, 10, 15);
      train(*straight, d, 10, 15);
      CHECK(largest_difference(c, d) < 1e-11);
    }
  }
}

TEST_CASE("one-pass optimizers: state is saved by the parameters' names, to the bit") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto batches = make_batches({8, 8, 8, 8}, dtype);
    const auto train = [&](auto& model, torch::optim::Optimizer& optimizer) {
      for (auto& batch : batches) {
        optimizer.zero_grad();
        loss_of(model, batch).backward();
        optimizer.step();
      }
    };
    auto first = make_model(dtype), second = make_model(dtype);
    ga::optim::AdamW a(first->parameters(), AdamWOptions(0.01).amsgrad(true));
    train(first, a);
    const auto state = a.named_state(first->named_parameters());
    CHECK(state.size() == 16);
    CHECK(state.at("step.0.weight").item<double>() == 4);
    CHECK(state.at("exp_avg.2.bias").sizes() == first->named_parameters()["2.bias"].sizes());

    auto reversed = second->parameters();  // the order does not matter
    std::reverse(reversed.begin(), reversed.end());
    ga::optim::AdamW b(reversed, AdamWOptions(0.01).amsgrad(true));
    {
      at::NoGradGuard no_grad;
      for (auto& item : first->named_parameters()) second->named_parameters()[item.key()].copy_(item.value());
    }
    b.load_named_state(second->named_parameters(), state);
    train(first, a);
    train(second, b);
    CHECK(flat(first).equal(flat(second)));
    CHECK(state.at("exp_avg.0.weight").is_same(a.named_state(first->named_parameters()).at("exp_avg.0.weight")));
  }
}

TEST_CASE("load_named_state: incompatible state is an error, and nothing changes") {
  auto model = make_model();
  ga::optim::Adam adam(model->parameters());
  loss_of(model, make_batches({4})[0]).backward();
  adam.step();
  const auto names = model->named_parameters();
  const auto good = adam.named_state(names);
  const auto attempt = [&](auto change) {
    auto state = good;
    change(state);
    return error_of([&] { adam.load_named_state(names, state); });
  };
  CHECK(contains(attempt([](auto& s) {
                   s["exp_avg.0.weight"] = torch::zeros({2, 2});
                 }),
                 "exp_avg.0.weight must be dense, of the shape of its parameter, [8, 4], got [2, 2]"));
  CHECK(contains(attempt([](auto& s) { s["exp_avg.0.weight"] = at::Tensor(); }), "undefined"));
  CHECK(contains(attempt([](auto& s) { s["step.0.weight"] = torch::tensor(-1.0); }), "whole number >= 0, got -1"));
  CHECK(contains(attempt([](auto& s) { s["step.0.weight"] = torch::tensor(NAN); }), "whole number >= 0"));
  CHECK(contains(attempt([](auto& s) { s["step.0.weight"] = torch::zeros({2}); }), "one number"));
  CHECK(contains(attempt([](auto& s) { s.erase("step.0.weight"); }), "state of 0.weight is incomplete"));
  CHECK(contains(attempt([](auto& s) { s["exp_avg.9.weight"] = torch::zeros({2}); }), "exp_avg.9.weight"));
  CHECK(contains(attempt([](auto& s) { s["momentum_buffer.0.weight"] = torch::zeros({8, 4}); }), "momentum_buffer"));
  const auto other = make_model();
  REQUIRE_ERROR("has no name; pass the named_parameters()", adam.named_state(other->named_parameters()));
  for (auto& [name, tensor] : adam.named_state(names)) CHECK(tensor.equal(good.at(name)));
  CHECK(attempt([](auto& s) { s.clear(); }).empty());
  CHECK(adam.state().empty());
}

TEST_CASE("one-pass optimizers: loaded state of another shape is an error, not a write out of bounds") {
  auto small = leaves({torch::ones({3})}), large = leaves({torch::ones({30000})});
  ga::optim::AdamW saved(small), loading(large);
  small[0].mutable_grad() = torch::ones({3});
  saved.step();
  std::stringstream file;
  torch::save(saved, file);
  torch::load(loading, file);
  large[0].mutable_grad() = torch::ones({30000});
  REQUIRE_ERROR("exp_avg must have the shape and device of its parameter, [30000] on cpu, got [3]", loading.step());
  CHECK(large[0].eq(1).all().item<bool>());
}

TEST_CASE("one-pass optimizers: no parameters or gradients") {
  ga::optim::AdamW none((Parameters()));
  none.step();
  auto p = torch::ones({3}).set_requires_grad(true), frozen = torch::ones({3});
  ga::optim::AdamW adamw({p, frozen});
  adamw.step();
  CHECK(adamw.state().empty());
  adamw.step(ga::Gradients(Parameters{p}));
  CHECK(p.eq(1).all().item<bool>());
  p.mutable_grad() = torch::zeros({3});
  ga::optim::Adam still({p});
  still.step();
  CHECK(p.eq(1).all().item<bool>());
}

TEST_CASE("one-pass optimizers: they find the minimum of Rosenbrock's function") {
  for (auto& [kind, steps] :
       std::vector<std::pair<Kind, int>>{{adam("Adam", AdamOptions(0.02)), 3000},
                                         {adamw("AdamW", AdamWOptions(0.02).weight_decay(0)), 3000},
                                         {sgd("SGD", SGDOptions(1e-3).momentum(0.9)), 3000}}) {
    auto xy = torch::tensor({-1.2, 1.0}, at::kDouble).set_requires_grad(true);
    auto optimizer = kind.ours({xy});
    for (int step = 0; step < steps; ++step) {
      optimizer->zero_grad();
      ((1 - xy[0]).square() + 100 * (xy[1] - xy[0].square()).square()).backward();
      optimizer->step();
    }
    INFO(kind.name << " reached " << xy[0].item<double>() << ", " << xy[1].item<double>());
    CHECK((xy.detach() - 1).abs().max().item<double>() < 0.05);
  }
}

TEST_CASE("one-pass optimizers: wrong options are LibTorch's errors") {
  auto p = torch::ones({1}).set_requires_grad(true);
  REQUIRE_ERROR("Invalid learning rate", ga::optim::AdamW({p}, AdamWOptions(-1)));
  REQUIRE_ERROR("Invalid beta parameter", ga::optim::Adam({p}, AdamOptions(1e-3).betas({1.0, 0.9})));
  REQUIRE_ERROR("Nesterov momentum", ga::optim::SGD({p}, SGDOptions(0.1).nesterov(true)));
}

TEST_CASE("one-pass optimizers on a device match the CPU", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (auto& kind : kinds) {
      INFO(kind.name << ", " << dtype);
      torch::manual_seed(6);
      auto host =
          leaves({torch::randn({40, 30}).to(dtype), torch::randn({}).to(dtype), torch::randn({6, 5}).t().to(dtype)});
      Parameters device;
      for (auto& p : host) device.push_back(p.detach().to(at::kCUDA).set_requires_grad(true));
      auto a = kind.ours(host), b = kind.ours(device);
      for (int step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < host.size(); ++i) {
          host[i].mutable_grad() = some_gradient(host[i].detach(), step) * 8;
          device[i].mutable_grad() = host[i].grad().to(at::kCUDA).transpose(0, -1).contiguous().transpose(0, -1);
        }
        for (auto* side : {&host, &device}) {
          ga::Gradients gradients(*side);
          gradients.factor().divide(8.0);
          gradients.factor().require_finite();
          ga::clip_grad_norm_(gradients, 1.0);
          const auto before = (*side)[0].grad().clone();
          dynamic_cast<ga::TakesGradients&>(side == &host ? *a : *b).step(gradients);
          CHECK((*side)[0].grad().equal(before));
        }
      }
      Parameters back;
      for (auto& p : device) back.push_back(p.detach().cpu());
      const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 3e-2;
      CHECK(largest_difference(host, back) < tolerance);
    }
}
