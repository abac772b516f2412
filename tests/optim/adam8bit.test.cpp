// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/training_state.hpp>

#include "support/leaves.hpp"
#include "support/models.hpp"
#include "support/run_kernel.hpp"

#include <ATen/Parallel.h>

#include <limits>
#include <sstream>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
using namespace testing;
using ga::optim::Adam8bitOptions;
using ga::optim::AdamW8bitOptions;
using inner::InstructionSet;

namespace {

constexpr std::int64_t block = inner::eight_bit_block;

// Computes the paper's map: seven decades, each divided evenly, 0 and 1.
std::vector<double> papers_map(bool is_signed) {
  std::vector<double> numbers{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int size = (is_signed ? 1 : 2) << decade;
    for (int i = 0; i < size; ++i) {
      const double number = std::pow(10.0, decade - 6) * (0.1 + 0.9 * (i + 0.5) / size);
      numbers.push_back(number);
      if (is_signed) numbers.push_back(-number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Returns the codes after a step with beta1 = beta2 = 0: of the gradient, and of its square.
std::pair<at::Tensor, at::Tensor> codes_of(const at::Tensor& gradient, InstructionSet set) {
  auto parameter = torch::zeros_like(gradient);
  const auto m = torch::full_like(gradient, 127, at::kByte), v = torch::zeros_like(gradient, at::kByte);
  const auto m_scale = torch::zeros({inner::eight_bit_blocks(gradient.numel())}), v_scale = torch::zeros_like(m_scale);
  const inner::Adam8bitStep step{{.eps = 1e-8}};
  testing::run_kernel(
      set, step, {at::kFloat, at::kFloat, false},
      {.parameter = parameter.mutable_data_ptr(),
       .gradient = gradient.const_data_ptr(),
       .state = {m.mutable_data_ptr(), v.mutable_data_ptr(), m_scale.mutable_data_ptr(), v_scale.mutable_data_ptr()}},
      gradient.numel());
  return {m, v};
}

// Puts numbers into blocks that begin with 1, so that the scale is 1.
at::Tensor in_blocks_of_scale_1(std::vector<float> numbers) {
  const auto all = torch::tensor(numbers);
  const auto rows = (all.numel() + block - 2) / (block - 1);
  const auto filled = torch::constant_pad_nd(all, {0, rows * (block - 1) - all.numel()}).view({rows, block - 1});
  return torch::cat({torch::ones({rows, 1}), filled}, 1).flatten().contiguous();
}

// Counts the codes whose number in the map is not the nearest.
std::int64_t not_nearest(const at::Tensor& numbers, const at::Tensor& codes, const inner::DynamicMap& map) {
  const auto values = torch::tensor(at::ArrayRef<float>(map.values)).to(at::kDouble);
  const auto x = numbers.to(at::kDouble);
  const auto nearest = (x.unsqueeze(1) - values).abs().amin(1);
  return ((x - values.index_select(0, codes.to(at::kLong))).abs() != nearest).sum().item<std::int64_t>();
}

ga::optim::Adam8bitParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  return static_cast<ga::optim::Adam8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}
at::Tensor first_moment(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = state_of(optimizer, parameter);
  return inner::decoded({state.exp_avg, state.exp_avg_scale}, true);
}
at::Tensor second_moment(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = state_of(optimizer, parameter);
  return inner::decoded({state.exp_avg_sq, state.exp_avg_sq_scale}, false);
}

at::Tensor gradient_like(const at::Tensor& parameter, int seed) {
  return torch::randn(parameter.sizes(), at::detail::createCPUGenerator(seed), at::kFloat)
      .mul_(0.01)
      .to(parameter.scalar_type());
}

}  // namespace

TEST_CASE("DynamicMap: the paper's numbers, in order") {
  for (bool is_signed : {true, false}) {
    const auto& values = is_signed ? inner::signed_map().values : inner::second_moment_map().values;
    const auto paper = papers_map(is_signed);
    REQUIRE(paper.size() == values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      CHECK(std::abs(values[i] - paper[i]) <= 3e-5 * std::abs(paper[i]));
      if (i > 0) CHECK(values[i] > values[i - 1]);
    }
  }
  CHECK(inner::signed_map().values[inner::zero_code] == 0);
  CHECK(inner::signed_map().values[255] == 1);
  CHECK(inner::second_moment_map().values[0] == 0);
  CHECK(inner::second_moment_map().values[255] == 1);
}

TEST_CASE("8-bit codes: codes are the nearest number of the map, for every instruction set") {
  std::vector<float> numbers{0.0f, 1.0f, -1.0f, 1e-30f, -1e-30f, 1e-45f};
  const auto near = [&](float x) {
    for (float up = x, down = x, i = 0; i < 4; ++i) {
      numbers.insert(numbers.end(), {up, down});
      up = std::nextafter(up, 2.0f), down = std::nextafter(down, -2.0f);
    }
  };
  for (std::size_t i = 1; i < 256; ++i) {
    const auto& values = inner::signed_map().values;
    near(values[i - 1]);
    near(values[i - 1] + (values[i] - values[i - 1]) / 2);
  }
  torch::manual_seed(1);
  const auto random = torch::rand({20'000}) * 2 - 1, small = random * torch::pow(10, -7 * torch::rand({20'000}));
  for (auto& some : {random, small})
    numbers.insert(numbers.end(), some.data_ptr<float>(), some.data_ptr<float>() + 20'000);
  std::erase_if(numbers, [](float x) { return std::abs(x) > 1; });
  const auto gradient = in_blocks_of_scale_1(numbers);
  for (auto set : testing::instruction_sets()) {
    const auto [m, v] = codes_of(gradient, set);
    CHECK(not_nearest(gradient, m, inner::signed_map()) == 0);
    const auto square = gradient * gradient;
    const auto tiny = square.gt(0).logical_and(square.lt(1.625e-7));  // a second moment never becomes 0
    CHECK(not_nearest(square.masked_fill(tiny, 0), v.masked_fill(tiny, 0), inner::second_moment_map()) == 0);
    CHECK(v.masked_select(tiny).eq(1).all().item<bool>());
    CHECK(tiny.sum().item<int>() > 1000);
    CHECK(not_nearest(gradient, (m + 1).clamp_max(255).to(at::kByte), inner::signed_map()) > 1000);  // control
  }
}

TEST_CASE("Adam8bit: one step is Adam's on the decoded moments, for every instruction set, dtype and size") {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (auto gradient_dtype : {dtype, at::kFloat})
      for (auto set : testing::instruction_sets())
        for (std::int64_t n : {1, 255, 256, 257, 300, 1000, 8192 + 77}) {
          INFO(dtype << ' ' << gradient_dtype << ", " << n << " elements");
          torch::manual_seed(static_cast<std::uint64_t>(n));
          auto p = torch::randn({n}).to(dtype);
          const auto g = torch::randn({n}).mul(0.01).to(gradient_dtype);
          auto m = inner::encoded(torch::randn({n}).mul(0.01), true),
               v = inner::encoded(torch::rand({n}).mul(1e-4), false);
          auto whole_p = p.to(at::kDouble), whole_m = inner::decoded(m, true).to(at::kDouble),
               whole_v = inner::decoded(v, false).to(at::kDouble);
          const double multiplier = 0.5, lr = 1e-2, decay = 0.1;
          const inner::Adam8bitStep step{{lr, 0.9, 0.99, 1e-8, decay, false, /*decoupled=*/true, /*step=*/3}};
          testing::run_kernel(set, step, {dtype, gradient_dtype, false},
                              {.multiplier = multiplier,
                               .parameter = p.mutable_data_ptr(),
                               .gradient = g.const_data_ptr(),
                               .state = {m.codes.mutable_data_ptr(), v.codes.mutable_data_ptr(),
                                         m.scales.mutable_data_ptr(), v.scales.mutable_data_ptr()}},
                              n);

          const auto gradient = g.to(at::kDouble) * multiplier;
          whole_m = whole_m * 0.9 + gradient * 0.1;
          whole_v = whole_v * 0.99 + gradient * gradient * 0.01;
          whole_p = whole_p * (1 - lr * decay) -
                    lr * (whole_m / (1 - std::pow(0.9, 3))) / ((whole_v / (1 - std::pow(0.99, 3))).sqrt() + 1e-8);
          const double rounding = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
          CHECK(torch::allclose(p.to(at::kDouble), whole_p, rounding, rounding));
          // A code's neighbors differ by at most 1/2 of the number's size (near 0: all of it).
          const auto blocks = [](const at::Tensor& t) {
            const auto missing = inner::eight_bit_blocks(t.numel()) * inner::eight_bit_block - t.numel();
            return torch::constant_pad_nd(t.flatten(), {0, missing})
                .view({-1, inner::eight_bit_block})
                .abs()
                .amax(1, true);
          };
          const auto scale_error = (m.scales - blocks(whole_m).flatten()).abs().max().item<double>();
          CHECK(scale_error <= 1e-6 * whole_m.abs().max().item<double>());
          CHECK((inner::decoded(m, true) - whole_m).abs().max().item<double>() <=
                0.5 * 0.0142 * whole_m.abs().max().item<double>());
          CHECK((inner::decoded(v, false) - whole_v).abs().max().item<double>() <=
                0.5 * 0.0072 * whole_v.abs().max().item<double>());
        }
}

TEST_CASE("Adam8bit: within the tolerances of bitsandbytes' test") {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (std::int64_t columns : {32, 257}) {
      INFO(dtype << ", " << columns);
      torch::manual_seed(3);
      auto coded = leaf(torch::randn({1024, columns}).mul(0.1).to(dtype));
      auto whole = leaf(coded.detach().to(at::kFloat));
      ga::optim::Adam8bit ours({coded}, Adam8bitOptions(1e-3));
      ga::optim::Adam reference({whole}, torch::optim::AdamOptions(1e-3));
      double error = 0, relative = 0, moved = 0;
      constexpr int steps = 50;
      for (int step = 0; step < steps; ++step) {
        coded.mutable_grad() = gradient_like(coded, step);
        whole.mutable_grad() = coded.grad().to(at::kFloat);
        const auto before = coded.detach().clone().to(at::kFloat);
        ours.step();
        reference.step();
        const torch::NoGradGuard no_grad;
        moved += (coded.to(at::kFloat) - before).abs().mean().item<double>() / steps;
        const auto difference = (coded.to(at::kFloat) - whole).abs();
        error += difference.mean().item<double>() / steps;
        relative += (difference / whole.abs().clamp_min(1e-9)).mean().item<double>() / steps;
        auto& state = static_cast<torch::optim::AdamParamState&>(*reference.state().at(whole.unsafeGetTensorImpl()));
        const auto outliers = [](const at::Tensor& a, const at::Tensor& b) {
          return a.isclose(b, /*rtol=*/1e-3, /*atol=*/3e-3).logical_not().sum().item<int>();
        };
        CHECK(outliers(first_moment(ours, coded), state.exp_avg()) < 20);
        CHECK(outliers(second_moment(ours, coded), state.exp_avg_sq()) < 20);
        whole.copy_(coded);  // compares each step separately
        state.exp_avg().copy_(first_moment(ours, coded));
        state.exp_avg_sq().copy_(second_moment(ours, coded));
      }
      CHECK(error < (dtype == at::kFloat ? 6e-5 : 1.7e-4));
      CHECK(moved > 1.5e-4);  // the steps are far larger
      CHECK(relative < (dtype == at::kFloat ? 6e-3 : 1.6e-2));
    }
}

TEST_CASE("Adam8bit: small tensors, float64 and complex ones are updated bitwise as by Adam") {
  const auto check = [](const at::Tensor& start, bool same) {
    auto a = leaf(start.clone()), b = leaf(start.clone());
    ga::optim::AdamW8bit ours({a}, AdamW8bitOptions(0.01).weight_decay(0.1));
    ga::optim::AdamW theirs({b}, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
    for (int step = 0; step < 3; ++step) {
      a.mutable_grad() = torch::randn_like(start);
      b.mutable_grad() = a.grad();
      ours.step();
      theirs.step();
    }
    CHECK(torch::equal(a, b) == same);
  };
  torch::manual_seed(4);
  check(torch::randn({4095}), true);
  check(torch::randn({}), true);
  check(torch::randn({0, 7}), true);
  check(torch::randn({64, 100}, at::kDouble), true);
  check(torch::randn({64, 100}, at::kComplexFloat), true);
  check(torch::randn({4096}), false);
}

TEST_CASE("Adam8bit: parameters that keep their moments in 32 bits are updated bitwise as by Adam") {
  const auto embedding = torch::randn({100, 64}), weight = torch::randn({64, 128});
  auto kept = leaf(embedding.clone()), coded = leaf(weight.clone()), plain = leaf(embedding.clone());
  ga::optim::Adam8bit adam({kept, coded}, Adam8bitOptions(1e-2));
  ga::optim::Adam reference({plain}, torch::optim::AdamOptions(1e-2));
  adam.keep_in_32_bits({kept});
  for (int i = 0; i < 3; ++i) {
    const auto gradient = torch::randn_like(embedding);
    kept.mutable_grad() = gradient.clone();
    plain.mutable_grad() = gradient.clone();
    coded.mutable_grad() = torch::randn_like(weight);
    adam.step();
    reference.step();
  }
  CHECK(at::equal(kept, plain));
  const auto dtype_of_moments = [&](const at::Tensor& parameter) {
    auto& state = *adam.state().at(parameter.unsafeGetTensorImpl());
    return static_cast<ga::optim::Adam8bitParamState&>(state).exp_avg.scalar_type();
  };
  CHECK(dtype_of_moments(kept) == at::kFloat);
  CHECK(dtype_of_moments(coded) == at::kByte);  // the others are unchanged

  REQUIRE_ERROR("before the first step", adam.keep_in_32_bits({kept, coded}));
  REQUIRE_ERROR("must be given parameters of this optimizer", adam.keep_in_32_bits({plain}));
}

TEST_CASE("Adam8bit and AdamW8bit: coupled and decoupled weight decay") {
  const auto start = torch::full({4096}, 2.0);
  const auto stepped = [&](auto&& make) {
    auto parameter = leaf(start.clone());
    auto optimizer = make(parameter);
    parameter.mutable_grad() = torch::full({4096}, 1.0);
    optimizer->step();
    return parameter.detach()[0].template item<double>();
  };
  const auto coupled = stepped([](const at::Tensor& p) {
    return std::make_unique<ga::optim::Adam8bit>(Parameters{p}, Adam8bitOptions(0.1).weight_decay(0.5));
  });
  const auto decoupled = stepped([](const at::Tensor& p) {
    return std::make_unique<ga::optim::AdamW8bit>(Parameters{p}, AdamW8bitOptions(0.1).weight_decay(0.5));
  });
  CHECK(coupled == Approx(2 - 0.1));
  CHECK(decoupled == Approx(2 * (1 - 0.05) - 0.1));
}

TEST_CASE("Adam8bit: moments stay with their elements for parameters of any strides") {
  torch::manual_seed(5);
  const auto start = torch::randn({96, 64});
  const auto run = [&](const at::Tensor& parameter, bool transposed_gradient) {
    ga::optim::Adam8bit optimizer({parameter}, Adam8bitOptions(0.01));
    for (int step = 0; step < 4; ++step) {
      const auto gradient = gradient_like(start, step);
      parameter.mutable_grad() = transposed_gradient ? gradient.t().contiguous().t() : gradient;
      optimizer.step();
    }
    return parameter.detach().contiguous();
  };
  const auto expected = run(leaf(start.clone()), false);
  CHECK(torch::equal(run(leaf(start.clone()), true), expected));
  const auto gaps = torch::zeros({96, 128});
  CHECK(torch::equal(run(leaf(gaps.slice(1, 0, 64).copy_(start)), false), expected));
  CHECK(gaps.slice(1, 64).eq(0).all().item<bool>());
  // Other blocks have other scales, but results are close.
  const auto transposed = run(leaf(start.t().contiguous().t()), false);
  CHECK_FALSE(torch::equal(transposed, expected));
  CHECK((transposed - expected).abs().max().item<double>() < 0.02);

  // The layout of a parameter with moments changes.
  auto parameter = leaf(start.clone());
  ga::optim::Adam8bit optimizer({parameter}, Adam8bitOptions(0.01));
  parameter.mutable_grad() = gradient_like(start, 1);
  optimizer.step();
  const auto before = first_moment(optimizer, parameter);
  parameter.set_data(parameter.detach().t().contiguous().t());
  parameter.mutable_grad() = torch::zeros_like(start);
  optimizer.step();
  const auto after = first_moment(optimizer, parameter);
  CHECK((after - 0.9 * before).abs().max().item<double>() < 0.02 * before.abs().max().item<double>());
}

TEST_CASE("Adam8bit: the same bits with any number of threads") {
  const auto run = [](int threads) {
    const auto before = at::get_num_threads();
    at::set_num_threads(threads);
    torch::manual_seed(6);
    Parameters parameters = leaves({torch::randn({300, 301}), torch::randn({5000}), torch::randn({70})});
    ga::optim::AdamW8bit optimizer(parameters, AdamW8bitOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : parameters) parameter.mutable_grad() = gradient_like(parameter, step);
      optimizer.step();
    }
    at::set_num_threads(before);
    std::vector<at::Tensor> all;
    for (auto& parameter : parameters) all.push_back(parameter.detach().flatten());
    return torch::cat(all);
  };
  const auto one = run(1);
  CHECK(torch::equal(run(2), one));
  CHECK(torch::equal(run(5), one));
}

TEST_CASE("Adam8bit: after saving and loading, the next steps are the same to the bit") {
  torch::manual_seed(8);
  torch::nn::Sequential model(torch::nn::Linear(100, 80), torch::nn::Linear(80, 3));
  const auto step = [](auto& optimizer, torch::nn::Sequential& net, int seed) {
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = gradient_like(parameter, seed);
    optimizer.step();
  };
  ga::optim::Adam8bit original(model->parameters(), Adam8bitOptions(0.01));
  for (int i = 0; i < 5; ++i) step(original, model, i);
  auto by_position = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  auto by_name = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  torch::nn::Sequential first(by_position), second(by_name);
  ga::optim::Adam8bit loaded(first->parameters(), Adam8bitOptions(0.5)),
      named(second->parameters(), Adam8bitOptions(0.01));
  std::stringstream file;
  torch::save(original, file);
  torch::load(loaded, file);
  const auto state = original.named_state(model->named_parameters());
  CHECK(state.at("exp_avg.0.weight").scalar_type() == at::kByte);
  CHECK(state.at("exp_avg_scale.0.weight").sizes() == at::IntArrayRef{(8000 + 255) / 256});
  CHECK(state.at("exp_avg.0.bias").scalar_type() == at::kFloat);
  named.load_named_state(second->named_parameters(), state);
  for (int i = 5; i < 8; ++i) {
    step(original, model, i);
    step(loaded, first, i);
    step(named, second, i);
  }
  CHECK(torch::equal(flat(first), flat(model)));
  CHECK(torch::equal(flat(second), flat(model)));
}

TEST_CASE("Adam8bit: moments stay with their elements in files, which store them row by row") {
  const auto make = [](at::MemoryFormat format) {
    torch::manual_seed(8);
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(40, 30, 3));
    conv->to(at::kFloat);
    conv->weight.set_data(conv->weight.detach().contiguous(format));
    return conv;
  };
  const auto step = [](auto& optimizer, torch::nn::Conv2d& net, int seed) {
    torch::manual_seed(seed);
    // Numbers of a channel have similar sizes, different from other channels, so blocks have different scales.
    const auto sizes = torch::pow(10.0, torch::arange(40).remainder(5)).reshape({1, 40, 1, 1});
    net->weight.mutable_grad() = torch::empty_like(net->weight).copy_(torch::randn({30, 40, 3, 3}) * sizes);
    optimizer.step();
  };
  for (auto from : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast})
    for (auto to : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      CAPTURE(from, to);
      auto first = make(from), second = make(to);
      ga::optim::Adam8bit original(first->parameters(), Adam8bitOptions(0.01));
      for (int i = 0; i < 5; ++i) step(original, first, i);
      ga::Archive saved;
      saved("optimizer", ga::OptimizerState(original, first));
      auto values = saved.values();
      for (auto& [name, value] : values)
        if (auto* const tensor = std::get_if<at::Tensor>(&value)) *tensor = tensor->clone(at::MemoryFormat::Contiguous);
      ga::optim::Adam8bit loaded(second->parameters(), Adam8bitOptions(0.01));
      {
        const torch::NoGradGuard no_grad;
        second->weight.copy_(first->weight);
      }
      ga::Archive file(std::move(values));
      file("optimizer", ga::OptimizerState(loaded, second));
      for (int i = 5; i < 8; ++i) step(original, first, i), step(loaded, second, i);
      const auto difference = (first->weight - second->weight).abs().max().item<float>();
      if (from == to)
        CHECK(difference == 0);
      else
        CHECK(difference < 0.01);  // blocks differ; a step is 0.01, and misplaced moments would make 0.03
    }
}

TEST_CASE("Adam8bit: state of another model is refused, and nothing changes") {
  torch::manual_seed(9);
  torch::nn::Linear model(100, 80);
  ga::optim::Adam8bit optimizer(model->parameters(), Adam8bitOptions(0.01));
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = gradient_like(parameter, 1);
  optimizer.step();
  const auto names = model->named_parameters();
  const auto good = optimizer.named_state(names);
  const auto before = flat(model);
  const auto with = [&](const std::string& name, const at::Tensor& tensor) {
    auto state = good;
    state[name] = tensor;
    return state;
  };
  const auto without = [&](const std::string& name) {
    auto state = good;
    state.erase(name);
    return state;
  };
  const auto refused = [&](const std::string& why, const inner::NamedTensors& state) {
    REQUIRE_ERROR(why, optimizer.load_named_state(names, state));
    for (auto& [name, tensor] : optimizer.named_state(names)) CHECK(torch::equal(tensor, good.at(name)));
  };
  refused("state was loaded for another model", with("exp_avg.weight", torch::zeros({80, 99}, at::kByte)));
  refused("state was loaded for another model", with("exp_avg_scale.weight", torch::zeros({5})));
  refused("state was loaded for another model", with("exp_avg_scale.weight", torch::zeros({32}, at::kDouble)));
  refused("state was loaded for another model", with("exp_avg_sq.weight", torch::zeros({80, 100})));
  refused("state was loaded for another model", without("exp_avg_sq_scale.weight"));
  refused("must both exist", without("exp_avg_sq.bias"));
  refused("incomplete", without("step.weight"));
  refused("whole number >= 0", with("step.weight", torch::tensor(-1.0)));
  refused("no parameter or state of this optimizer matches", with("exp_avg.other", torch::zeros({3})));

  // In a file, which LibTorch reads, it is detected at the next step, before any update.
  auto& state = state_of(optimizer, model->weight);
  state.exp_avg_scale = torch::zeros({3});
  REQUIRE_ERROR("state was loaded for another model", optimizer.step());
  CHECK(torch::equal(flat(model), before));
}

TEST_CASE("Adam8bit: gradients that are not finite") {
  torch::manual_seed(10);
  auto parameter = leaf(torch::randn({4096}));
  const auto start = parameter.detach().clone();
  ga::optim::Adam8bit optimizer({parameter}, Adam8bitOptions(0.01));
  const auto step_with = [&](double number) {
    parameter.mutable_grad() = gradient_like(parameter, 1);
    parameter.mutable_grad()[300] = number;
    ga::Gradients gradients({parameter});
    gradients.factor().require_finite();
    optimizer.step(gradients);
  };
  step_with(std::numeric_limits<double>::infinity());
  CHECK(torch::equal(parameter, start));
  CHECK(optimizer.state().empty());
  // Without a scaler non-finite numbers are not hidden. Only the number's block becomes non-finite.
  for (double number : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    auto other = leaf(start.clone());
    ga::optim::Adam8bit plain({other}, Adam8bitOptions(0.01));
    for (int step = 0; step < 2; ++step) {
      other.mutable_grad() = gradient_like(other, step);
      if (step == 0) other.mutable_grad()[300] = number;
      plain.step();
    }
    const auto finite = other.detach().isfinite().view({16, block});
    CHECK_FALSE(finite[1].any().item<bool>());
    CHECK(finite.sum().item<int>() == 15 * block);
  }
}

TEST_CASE("Adam8bit: blocks of zeros, of denormals, and of one large number among small ones") {
  auto parameter = leaf(torch::ones({4096}));
  ga::optim::Adam8bit optimizer({parameter}, Adam8bitOptions(0.01));
  for (int step = 0; step < 20; ++step) {
    auto gradient = torch::zeros({16, block});
    gradient[1].fill_(1e-42);
    gradient[2].fill_(1e-5);
    gradient[2][7] = 1.0;  // the other squares are 1e-10 of its square
    parameter.mutable_grad() = gradient.view({-1});
    optimizer.step();
  }
  const auto moved = (1 - parameter.detach()).view({16, block});
  CHECK(moved[0].eq(0).all().item<bool>());
  CHECK(moved[1].eq(0).all().item<bool>());  // eps is far larger than the update
  CHECK(moved.isfinite().all().item<bool>());
  CHECK(moved[2][7].item<double>() == Approx(0.2).epsilon(0.02));
  CHECK(moved[2][8].item<double>() > 0);
  CHECK(moved[2][8].item<double>() <= 0.21);  // not 30 times too large
}

TEST_CASE("Adam8bit: with an accumulator, the step of the mean gradient; of a shorter window, too") {
  const auto batches = make_batches({5, 5, 5, 5, 3}, at::kFloat);
  const auto make = [] {
    torch::manual_seed(11);
    return torch::nn::Sequential(torch::nn::Linear(4, 2048), torch::nn::Tanh(), torch::nn::Linear(2048, 3));
  };
  auto accumulated = make(), joined_model = make(), other = make();
  ga::optim::AdamW8bit a(accumulated->parameters(), AdamW8bitOptions(1e-3)),
      b(joined_model->parameters(), AdamW8bitOptions(1e-3)), c(other->parameters(), AdamW8bitOptions(1e-3));
  ga::GradAccumulator optimizer(a, {.steps = 4});
  for (auto& batch : batches) {
    loss_of(accumulated, batch).backward();
    optimizer.clip_grad_norm_(0.01);
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.flush();
  for (auto [from, to] : {std::pair(0, 4), std::pair(4, 5)}) {
    for (auto* each : {&joined_model, &other}) loss_of(*each, joined(batches, from, to)).backward();
    torch::nn::utils::clip_grad_norm_(joined_model->parameters(), 0.01);
    b.step();
    c.step();
    b.zero_grad();
    c.zero_grad();
  }
  CHECK(distance(accumulated, joined_model) < 1e-5);
  CHECK(distance(accumulated, other) > 1e-4);  // control: not clipped
}

TEST_CASE("Adam8bit: bytes") {
  constexpr std::int64_t n = 1 << 20;
  ga::MemoryMeter meter;
  auto parameter = leaf(torch::zeros({n}));
  ga::optim::AdamW8bit optimizer({parameter}, AdamW8bitOptions(1e-3));
  parameter.mutable_grad() = torch::zeros({n});
  optimizer.step();
  CHECK(static_cast<double>(meter.live_bytes()) <= 10.04 * n);
  CHECK(static_cast<double>(meter.peak_bytes()) <= 10.1 * n);
}

TEST_CASE("Adam8bit: refuses invalid options and parameters") {
  auto parameter = leaf(torch::zeros({5000}));
  const auto make = [&](Adam8bitOptions options) { ga::optim::Adam8bit({parameter}, options); };
  REQUIRE_ERROR("Adam8bit: lr must be >= 0, got -1", make(Adam8bitOptions(-1)));
  REQUIRE_ERROR("Adam8bit: betas must be in [0, 1)", make(Adam8bitOptions(1).betas({1.0, 0.9})));
  REQUIRE_ERROR("Adam8bit: eps must be >= 0", make(Adam8bitOptions(1).eps(std::nan(""))));
  REQUIRE_ERROR("Adam8bit: weight_decay must be >= 0", make(Adam8bitOptions(1).weight_decay(-0.1)));
  REQUIRE_ERROR("amsgrad must be false", make(Adam8bitOptions(1).amsgrad(true)));
  REQUIRE_ERROR("listed twice", [&] {
    ga::optim::Adam8bit twice({parameter, parameter}, Adam8bitOptions(1));
    parameter.mutable_grad() = torch::ones({5000});
    twice.step();
  }());
  ga::optim::Adam8bit optimizer({parameter}, Adam8bitOptions(1));
  const torch::optim::OptimizerParamGroup of_another({}, std::make_unique<ga::optim::AdamW8bitOptions>(0.1));
  REQUIRE_ERROR("options of a group must be Adam8bitOptions", optimizer.add_param_group(of_another));
  REQUIRE_ERROR("options of a group must be Adam8bitOptions", ga::optim::Adam8bit({of_another}));
  CHECK(optimizer.param_groups().size() == 1);
}

TEST_CASE("Adam8bit: groups with separate options, a schedule, parameters without a gradient") {
  Parameters parameters = leaves({torch::zeros({5000}), torch::zeros({5000}), torch::zeros({5000})});
  std::vector<torch::optim::OptimizerParamGroup> groups{{{parameters[0], parameters[2]}},
                                                        {{parameters[1]}, std::make_unique<Adam8bitOptions>(0.5)}};
  ga::optim::Adam8bit optimizer(groups, Adam8bitOptions(0.1));
  for (int i : {0, 1}) parameters[i].mutable_grad() = torch::ones({5000});
  optimizer.step();
  CHECK(parameters[0][0].item<double>() == Approx(-0.1));
  CHECK(parameters[1][0].item<double>() == Approx(-0.5));
  CHECK(parameters[2].eq(0).all().item<bool>());
  CHECK(optimizer.state().size() == 2);
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  schedule.step();
  schedule.step();
  CHECK(optimizer.param_groups()[0].options().get_lr() == Approx(0.05));
}

TEST_CASE("Adam8bit: learns what Adam learns") {
  const auto rosenbrock = [](const at::Tensor& x) {
    return (x.slice(0, 1) - x.slice(0, 0, -1).square()).square().mul(100).sum() +
           (1 - x.slice(0, 0, -1)).square().sum();
  };
  const auto train = [&](auto make) {
    torch::manual_seed(12);
    auto x = leaf(torch::rand({4096}));
    auto optimizer = make(x);
    for (int step = 0; step < 1500; ++step) {
      optimizer->zero_grad();
      rosenbrock(x).backward();
      optimizer->step();
    }
    return rosenbrock(x).template item<double>();
  };
  const auto whole =
      train([](auto& x) { return std::make_unique<ga::optim::Adam>(Parameters{x}, torch::optim::AdamOptions(1e-2)); });
  const auto coded =
      train([](auto& x) { return std::make_unique<ga::optim::Adam8bit>(Parameters{x}, Adam8bitOptions(1e-2)); });
  const auto start = [&] {
    torch::manual_seed(12);
    return rosenbrock(torch::rand({4096})).item<double>();
  }();
  CHECK(whole < 0.1 * start);
  CHECK(coded < 1.1 * whole);
}

TEST_CASE("Adam8bit: learns exclusive or") {
  torch::manual_seed(13);
  torch::nn::Sequential model(torch::nn::Linear(2, 2048), torch::nn::Tanh(), torch::nn::Linear(2048, 1));
  const auto x = torch::tensor({{0.0, 0.0}, {0.0, 1.0}, {1.0, 0.0}, {1.0, 1.0}}).to(at::kFloat);
  const auto y = torch::tensor({{0.0}, {1.0}, {1.0}, {0.0}}).to(at::kFloat);
  ga::optim::AdamW8bit adamw(model->parameters(), AdamW8bitOptions(3e-3).weight_decay(0));
  const auto loss = [&] { return torch::binary_cross_entropy_with_logits(model->forward(x), y); };
  CHECK(loss().item<double>() > 0.3);
  for (int step = 0; step < 300; ++step) {
    adamw.zero_grad();
    loss().backward();
    adamw.step();
  }
  CHECK(state_of(adamw, model->named_parameters()["0.weight"]).coded());
  CHECK(loss().item<double>() < 0.05);
}

TEST_CASE("Adam8bit: windows that end in all ways") {
  const auto batches = make_batches({5, 5, 5, 5, 3}, at::kFloat);
  const auto make = [] {
    torch::manual_seed(14);
    return torch::nn::Sequential(torch::nn::Linear(4, 1024), torch::nn::Tanh(), torch::nn::Linear(1024, 3));
  };
  enum class End { flush, discard, carry };
  for (auto end : {End::flush, End::discard, End::carry}) {
    auto model = make(), expected = make();
    ga::optim::Adam8bit adam(model->parameters(), Adam8bitOptions(1e-3)),
        reference(expected->parameters(), Adam8bitOptions(1e-3));
    ga::GradAccumulator optimizer(adam, {.steps = 2});
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : batches) {
        optimizer.backward({loss_of(model, batch), batch.data.size(0)});
        optimizer.step();
        optimizer.zero_grad();
      }
      if (end == End::flush) optimizer.flush();
      if (end == End::discard) optimizer.discard();
    }
    auto twice = batches;
    twice.insert(twice.end(), batches.begin(), batches.end());
    std::vector<std::pair<int, int>> windows{{0, 2}, {2, 4}, {4, 6}, {6, 8}, {8, 10}};
    if (end == End::flush) windows = {{0, 2}, {2, 4}, {4, 5}, {5, 7}, {7, 9}, {9, 10}};
    if (end == End::discard) windows = {{0, 2}, {2, 4}, {5, 7}, {7, 9}};
    for (auto [from, to] : windows) {
      loss_of(expected, joined(twice, from, to)).backward();
      reference.step();
      reference.zero_grad();
    }
    CHECK(optimizer.updates() == static_cast<std::int64_t>(windows.size()));
    CHECK(distance(model, expected) < 1e-4);
  }
}

TEST_CASE("Adam8bit: moments of 8 bits for a parameter in float64 are refused before any update") {
  auto small = torch::ones({10}).requires_grad_(), large = torch::ones({5000}).requires_grad_();
  const auto named = [&](const at::Tensor& one) {
    torch::OrderedDict<std::string, at::Tensor> all;
    all.insert("large", one);
    return all;
  };
  ga::optim::Adam8bit adam({small, large}, ga::optim::Adam8bitOptions(0.1));
  large.mutable_grad() = torch::ones_like(large);
  adam.step();
  auto wide = torch::ones({5000}, at::kDouble).requires_grad_();
  ga::optim::Adam8bit other({wide}, ga::optim::Adam8bitOptions(0.1));
  torch::OrderedDict<std::string, at::Tensor> names;
  names.insert("large", large);
  names.insert("small", small);
  REQUIRE_ERROR("must be floating for a parameter in Double",
                other.load_named_state(named(wide), adam.named_state(names)));
  CHECK(other.named_state(named(wide)).empty());
}
