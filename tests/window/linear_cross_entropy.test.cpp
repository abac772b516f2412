// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/checkpoint.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/embedding.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/graphed_step.hpp>
#include <gradaccum/linear_cross_entropy.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/sgd.hpp>

#include "support/device.hpp"
#include "support/files.hpp"

#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace ga = gradaccum;

namespace {

constexpr std::int64_t classes = 37, width = 6;
using Options = ga::LinearCrossEntropyOptions;

/// Leaves of a last layer, and 11 tokens, three of which are ignored.
struct Layer {
  at::Tensor hidden, weight, bias, target, weights;

  explicit Layer(at::ScalarType dtype = at::kDouble, std::int64_t tokens = 11) {
    torch::manual_seed(7);
    const auto leaf = [&](at::IntArrayRef shape, double scale) {
      return torch::randn(shape, at::kDouble).mul_(scale).to(at::kBFloat16).to(dtype).requires_grad_();
    };
    hidden = leaf({tokens, width}, 1);
    weight = leaf({classes, width}, 2);
    bias = leaf({classes}, 1);
    target = torch::randint(classes, {tokens}, torch::kLong);
    if (tokens > 9) target.index_put_({torch::tensor({1, 4, 9})}, -100);
    weights = torch::rand({tokens}, at::kDouble).to(dtype);
  }
  Layer as(at::ScalarType dtype) const {
    Layer other = *this;
    for (auto* const tensor : {&other.hidden, &other.weight, &other.bias})
      *tensor = tensor->detach().to(dtype).requires_grad_();
    other.weights = weights.to(dtype);
    return other;
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (auto& leaf : {hidden, weight, bias})
      all.push_back(leaf.grad().defined() ? leaf.grad().to(at::kDouble) : torch::zeros(leaf.sizes(), at::kDouble));
    return all;
  }
};

/// The same by the logits of all tokens. Sums in at least float32, as cross_entropy does.
at::Tensor whole_loss(const Layer& layer, const Options& options) {
  auto logits = torch::linear(layer.hidden, layer.weight, options.bias);
  if (logits.element_size() < 4) logits = logits.to(at::kFloat);
  const auto target = layer.target;
  const auto ignored = target.eq(options.ignore_index);
  auto losses = torch::nn::functional::cross_entropy(logits, target.masked_fill(ignored, 0),
                                                     torch::nn::functional::CrossEntropyFuncOptions()
                                                         .reduction(torch::kNone)
                                                         .label_smoothing(options.label_smoothing));
  losses = losses + options.z_loss * logits.logsumexp(1).square();
  auto weights = ignored.logical_not().to(losses.dtype());
  if (options.weights.defined()) weights = weights * options.weights;
  return (torch::where(ignored, torch::zeros_like(losses), losses) * weights).sum() / weights.sum();
}

double distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, ((a[i] - b[i]).norm() / b[i].norm().clamp_min(1e-300)).item<double>());
  return most;
}

Options budget_of(std::int64_t tokens, at::ScalarType dtype, Options options = {}) {
  options.memory_budget = tokens * classes * (dtype == at::kDouble ? 8 : dtype == at::kFloat ? 4 : 6);
  return options;
}

}  // namespace

TEST_CASE("linear_cross_entropy: loss and gradients are those of all logits, in parts of any size") {
  const bool biased = GENERATE(false, true), weighted = GENERATE(false, true);
  const double smoothing = GENERATE(0.0, 0.1, 1.0), z_loss = GENERATE(0.0, 0.05);
  const Layer whole;
  const auto options_of = [&](const Layer& layer) {
    Options options{.label_smoothing = smoothing, .z_loss = z_loss};
    if (biased) options.bias = layer.bias;
    if (weighted) options.weights = layer.weights;
    return options;
  };
  const auto expected = whole_loss(whole, options_of(whole));
  (3 * expected).backward();
  for (const std::int64_t at_once : {1, 2, 5, 11, 100}) {
    CAPTURE(biased, weighted, smoothing, z_loss, at_once);
    const Layer layer;
    const auto loss = ga::linear_cross_entropy(layer.hidden, layer.weight, layer.target,
                                               budget_of(at_once, at::kDouble, options_of(layer)));
    CHECK(loss.mean.item<double>() == Approx(expected.item<double>()).epsilon(1e-12));
    (2 * loss.mean).backward({}, /*retain_graph=*/true);  // by gradients that forward has made
    loss.mean.backward();                                 // by gradients that backward makes, and adds in place
    CHECK(distance(layer.gradients(), whole.gradients()) < 1e-12);
    const auto counted = layer.target.ne(-100);
    const auto items = weighted ? layer.weights.masked_select(counted).sum() : counted.sum();
    CHECK(loss.items == Approx(items.item<double>()));
    CHECK((loss.output * (weighted ? layer.weights : torch::ones_like(layer.weights))).sum().item<double>() ==
          Approx(loss.mean.item<double>() * loss.items));
    CHECK_FALSE(loss.output.requires_grad());
    CHECK(loss.output[4].item<double>() == 0);
  }
}

TEST_CASE("linear_cross_entropy: in float32 and 16 bits no further from float64 than all logits") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  const bool autocast = dtype != at::kFloat && GENERATE(false, true);
  const std::int64_t tokens = 300;
  Layer exact(at::kDouble, tokens);
  whole_loss(exact, {}).backward();
  const auto error_of = [&](const std::function<at::Tensor(const Layer&)>& loss_of) {
    const auto layer = exact.as(autocast ? at::kFloat : dtype);
    {
      const ga::Autocast scope(at::kCPU, autocast ? dtype : at::kBFloat16, autocast);
      loss_of(layer).backward();
    }
    auto gradients = layer.gradients(), expected = exact.gradients();
    gradients.pop_back(), expected.pop_back();
    return distance(gradients, expected);
  };
  const auto whole = error_of([](auto& layer) { return whole_loss(layer, {}); });
  const auto parts = error_of([&](auto& layer) {
    return ga::linear_cross_entropy(layer.hidden, layer.weight, layer.target, budget_of(7, dtype)).mean;
  });
  CAPTURE(dtype, autocast, whole, parts);
  CHECK(parts <= 1.2 * whole);
  CHECK(whole > 1e-9);
}

TEST_CASE("linear_cross_entropy: NaN, infinities, ignored tokens and none") {
  const auto loss_of = [](const Layer& layer, Options options = {}) {
    return ga::linear_cross_entropy(layer.hidden, layer.weight, layer.target, budget_of(3, at::kDouble, options));
  };
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    for (const std::int64_t token : {0, 4}) {  // the second is ignored
      CAPTURE(value, token);
      const Layer whole, layer;
      for (const auto& one : {whole, layer}) one.hidden.data()[token].fill_(value);
      const auto expected = whole_loss(whole, {});
      expected.backward();
      const auto loss = loss_of(layer);
      loss.mean.backward();
      CHECK(loss.mean.isnan().item<bool>() == expected.isnan().item<bool>());
      CHECK(at::equal(layer.hidden.grad().isnan(), whole.hidden.grad().isnan()));
      CHECK(at::equal(layer.weight.grad().isnan(), whole.weight.grad().isnan()));
    }
  Layer none;
  none.target.fill_(-100);
  const auto loss = loss_of(none);
  CHECK(loss.items == 0);
  CHECK(loss.mean.item<double>() == 0);
  none.target.fill_(5);
  CHECK(loss_of(none, {.ignore_index = 5}).items == 0);
  const auto empty = ga::linear_cross_entropy(none.hidden.slice(0, 0, 0), none.weight, none.target.slice(0, 0, 0));
  CHECK(empty.items == 0);
  CHECK(empty.mean.item<double>() == 0);

  torch::optim::SGD sgd({none.weight}, 0.1);
  ga::GradAccumulator optimizer(sgd);
  optimizer.backward(loss);
  CHECK_FALSE(none.weight.grad().defined());
}

TEST_CASE("linear_cross_entropy: any leading dimensions, frozen parts, strides, and items from the host") {
  const Layer layer(at::kDouble, 12);
  const auto loss_of = [&](const at::Tensor& hidden, const at::Tensor& target) {
    return ga::linear_cross_entropy(hidden, layer.weight, target, budget_of(5, at::kDouble));
  };
  const auto flat = loss_of(layer.hidden, layer.target);
  const auto shaped = loss_of(layer.hidden.view({2, 3, 2, width}), layer.target.view({2, 3, 2}));
  CHECK(at::equal(shaped.mean, flat.mean));
  CHECK(shaped.output.sizes() == at::IntArrayRef({2, 3, 2}));
  const auto strided = layer.hidden.detach().t().contiguous().t();
  CHECK(loss_of(strided, layer.target).mean.item<double>() == Approx(flat.mean.item<double>()));
  CHECK(loss_of(layer.hidden[0], layer.target[0]).items == 1);

  flat.mean.backward();
  const auto expected = layer.hidden.grad().clone();
  layer.hidden.mutable_grad() = at::Tensor();
  const auto frozen = layer.weight.detach();
  ga::linear_cross_entropy(layer.hidden, frozen, layer.target).mean.backward();
  CHECK(at::allclose(layer.hidden.grad(), expected));
  CHECK_FALSE(ga::linear_cross_entropy(layer.hidden.detach(), frozen, layer.target).mean.requires_grad());
  at::NoGradGuard no_grad;
  const auto given = ga::linear_cross_entropy(layer.hidden, layer.weight, layer.target, {.items = 3});
  CHECK(given.items == 3);
  CHECK(given.mean.item<double>() == Approx(flat.mean.item<double>()));
}

TEST_CASE("linear_cross_entropy: windows of uneven micro-batches, tied weights, and a loss scale are the large batch") {
  const bool tied = GENERATE(false, true), scaled = GENERATE(false, true), in_backward = GENERATE(false, true);
  if (in_backward && scaled) return;
  const auto train = [&](std::vector<std::int64_t> ends) {
    torch::manual_seed(3);
    auto table = torch::randn({classes, width}, at::kDouble).requires_grad_();
    auto head = tied ? table : torch::randn({classes, width}, at::kDouble).requires_grad_();
    const auto tokens = torch::randint(classes, {11}, torch::kLong);
    auto target = torch::randint(classes, {11}, torch::kLong);
    target.index_put_({torch::tensor({0, 1, 5})}, -100);
    std::vector<at::Tensor> parameters{table};
    if (!tied) parameters.push_back(head);
    ga::optim::SGD sgd(parameters, ga::optim::SGDOptions(0.5));
    ga::GradAccumulator optimizer(sgd, {.steps = static_cast<std::int64_t>(ends.size()), .in_backward = in_backward});
    ga::AmpScaler scaler({.init_scale = 1024, .enabled = scaled});
    for (int window = 0; window < 2; ++window) {
      std::int64_t from = 0;
      for (const auto to : ends) {
        const auto part = [&](const at::Tensor& all) { return all.slice(0, from, to); };
        const auto hidden = ga::embedding(part(tokens), table).tanh();
        const auto loss = ga::linear_cross_entropy(hidden, head, part(target), budget_of(2, at::kDouble));
        optimizer.backward(scaler.scale(loss));
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
        from = to;
      }
    }
    return torch::cat({table.detach(), head.detach()});
  };
  const auto large = train({11});
  CHECK((train({2, 3, 11}) - large).norm().item<double>() < 1e-12);  // the first has ignored tokens only
  CHECK((train({4, 9, 11}) - large).norm().item<double>() < 1e-12);
  CHECK((train({4, 9}) - large).norm().item<double>() > 1e-3);
}

TEST_CASE("linear_cross_entropy: adds to an existing gradient in place, unless a hook needs it whole") {
  const Layer layer(at::kFloat);
  const auto backward = [&] {
    ga::linear_cross_entropy(layer.hidden.detach(), layer.weight, layer.target, budget_of(4, at::kFloat))
        .mean.backward();
  };
  backward();
  const auto sum = layer.weight.grad();
  const auto once = sum.clone();
  const auto version = sum._version();
  backward();
  CHECK(layer.weight.grad().is_same(sum));
  CHECK(sum._version() == version + 3);  // for 4, 4 and 3 tokens
  CHECK(at::allclose(sum, 2 * once));
  at::Tensor seen;
  layer.weight.register_hook([&](const at::Tensor& gradient) { seen = gradient.clone(); });
  backward();
  CHECK(at::allclose(seen, once));
  CHECK(at::allclose(layer.weight.grad(), 3 * once));
}

TEST_CASE("linear_cross_entropy: takes at most its budget, besides the gradients") {
  torch::manual_seed(1);
  const std::int64_t tokens = 400, vocabulary = 3000, wide = 16;
  auto hidden = torch::randn({tokens, wide}).requires_grad_(),
       weight = torch::randn({vocabulary, wide}).requires_grad_();
  const auto target = torch::randint(vocabulary, {tokens}, torch::kLong);
  const auto peak_of = [&](std::int64_t budget) {
    hidden.mutable_grad() = torch::zeros_like(hidden);
    weight.mutable_grad() = torch::zeros_like(weight);
    ga::MemoryMeter meter;
    ga::linear_cross_entropy(hidden, weight, target, {.memory_budget = budget}).mean.backward();
    return meter.peak_bytes();
  };
  const std::int64_t few_numbers = tokens * (wide * 4 + 6 * 8);  // hidden's gradient; losses, targets and the like
  CHECK(peak_of(200'000) < 200'000 + few_numbers);
  CHECK(peak_of(2'000'000) < 2'000'000 + few_numbers);
  CHECK(peak_of(2'000'000) > 1'000'000);
  CHECK(peak_of(std::int64_t{1} << 40) > tokens * vocabulary * 4);
  weight.mutable_grad() = at::Tensor();  // forward makes a table, which becomes the gradient
  ga::MemoryMeter meter;
  ga::linear_cross_entropy(hidden, weight, target, {.memory_budget = 200'000}).mean.backward();
  CHECK(meter.peak_bytes() < 200'000 + few_numbers + vocabulary * wide * 4);
}

TEST_CASE("linear_cross_entropy: in a checkpoint it has the same gradients") {
  const Layer plain, recomputed;
  const auto loss_of = [](const Layer& layer) {
    return [&layer](const at::Tensor& hidden) {
      return ga::linear_cross_entropy(hidden.tanh(), layer.weight, layer.target, budget_of(3, at::kDouble)).mean;
    };
  };
  loss_of(plain)(plain.hidden).backward();
  ga::checkpoint(loss_of(recomputed), recomputed.hidden).backward();
  CHECK(distance(recomputed.gradients(), plain.gradients()) < 1e-12);
}

TEST_CASE("linear_cross_entropy: save_step records it for any number of rows") {
  const testing::Directory directory;
  const Layer layer(at::kFloat);
  torch::nn::Linear head(torch::nn::LinearOptions(width, classes).bias(false));
  using Batch = std::pair<at::Tensor, at::Tensor>;
  Batch batch{layer.hidden.detach(), layer.target};
  const auto recorded = ga::save_step(
      head,
      [](torch::nn::Linear& model, const Batch& rows) {
        return ga::linear_cross_entropy(rows.first, model->weight, rows.second, {.label_smoothing = 0.1, .items = 1});
      },
      batch, directory / "step");
  std::ostringstream text;
  text << recorded;
  CHECK(testing::contains(text.str(), "Float [*, 6], Long [*]"));
}

TEST_CASE("linear_cross_entropy: on a device, also in graphs, it is the host's", "[cuda]") {
  if (!torch::cuda::is_available() || !testing::has_graphs(at::kCUDA)) SKIP("needs a CUDA device with graphs");
  const Layer host(at::kFloat);
  torch::nn::Linear head(torch::nn::LinearOptions(width, classes).bias(false));
  head->weight.data().copy_(host.weight.data());
  using Batch = std::pair<at::Tensor, at::Tensor>;
  const auto objective = [](torch::nn::Linear& model, const Batch& batch) {
    return ga::linear_cross_entropy(batch.first, model->weight, batch.second, {.memory_budget = 1000, .items = 1});
  };
  const auto batch_of = [&](std::int64_t ignored) {  // graphs must count the tokens of each batch
    auto target = host.target.clone();
    target.slice(0, 0, ignored).fill_(-100);
    return Batch{host.hidden.detach(), target};
  };
  for (int i = 0; i < 4; ++i) ga::Loss{objective(head, batch_of(i)).mean, 1.0 + i}.backward();
  const auto expected = head->weight.grad().clone();
  head->zero_grad();
  head->to(at::kCUDA);
  ga::GraphedStep step(head, objective);
  for (int i = 0; i < 4; ++i) {
    const Batch batch{batch_of(i).first.cuda(), batch_of(i).second.cuda()};
    ga::Loss{step(batch).mean, 1.0 + i}.backward();
  }
  CHECK(step.report().replayed == 4);
  CHECK(at::allclose(head->weight.grad().cpu(), expected, 1e-5, 1e-6));
  CHECK(ga::linear_cross_entropy(host.hidden.cuda(), head->weight, host.target.cuda()).items == 8);
}

TEST_CASE("linear_cross_entropy: arguments that do not fit, and a second derivative") {
  const Layer layer;
  const auto &hidden = layer.hidden, &weight = layer.weight, &bias = layer.bias, &target = layer.target,
             &weights = layer.weights;
  const auto loss_of = [&](Options options) { return ga::linear_cross_entropy(hidden, weight, target, options); };
  REQUIRE_ERROR("hidden must be [..., width] and weight [classes, width], got [11, 6] and [6, 37]",
                ga::linear_cross_entropy(hidden, weight.t(), target));
  REQUIRE_ERROR("target must be int64 in the shape of hidden without its width, [11, 6], got Int [11]",
                ga::linear_cross_entropy(hidden, weight, target.to(at::kInt)));
  REQUIRE_ERROR("got Long [10]", ga::linear_cross_entropy(hidden, weight, target.slice(0, 1)));
  REQUIRE_ERROR("less than the 37 classes, or the ignore_index -1, got -100", loss_of({.ignore_index = -1}));
  REQUIRE_ERROR("got 37", ga::linear_cross_entropy(hidden, weight, target.masked_fill(target.eq(-100), 37)));
  REQUIRE_ERROR("bias must be [classes], got [6] for 37 classes", loss_of({.bias = weight[0]}));
  REQUIRE_ERROR("weights must have the shape of target", loss_of({.weights = bias}));
  REQUIRE_ERROR("got Long [11, 6, 1]",
                ga::linear_cross_entropy(hidden, weight, torch::zeros({11, 6, 1}, torch::kLong)));
  REQUIRE_ERROR("weights must be >= 0, got -1", loss_of({.weights = torch::full_like(weights, -1)}));
  REQUIRE_ERROR("and not require gradients", loss_of({.weights = weights.clone().requires_grad_()}));
  REQUIRE_ERROR("label_smoothing must be in [0, 1], got 1.5", loss_of({.label_smoothing = 1.5}));
  REQUIRE_ERROR("z_loss must be finite and >= 0, got nan", loss_of({.z_loss = std::nan("")}));
  REQUIRE_ERROR("memory_budget must be > 0 bytes, got 0", loss_of({.memory_budget = 0}));
  REQUIRE_ERROR("items must be finite and >= 0, got -1", loss_of({.items = -1}));
  REQUIRE_ERROR("create_graph must be false", loss_of({}).mean.backward({}, true, /*create_graph=*/true));
}
