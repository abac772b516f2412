// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include <gradaccum/detail/compilation/device_graph.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include "support/emulated_cuda/emulated_cuda.hpp"
#include "support/kernels_on_device.hpp"

#include <ATen/core/Generator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The emulated device captures and replays graphs as a GPU does; GraphedStep relies on these properties.

namespace ga = gradaccum;
using namespace testing;

namespace {

using Graph = gradaccum::detail::GraphImplInterface;
using Tensors = std::vector<at::Tensor>;

const at::Device device(at::kCUDA, 0);
const gradaccum::detail::GraphPool new_pool{0, 0};

c10::Stream new_stream() { return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device); }

std::unique_ptr<Graph> new_graph() {
#if __has_include(<ATen/core/GraphImplInterface.h>)
  return at::create_graph_impl(at::kCUDA);
#else
  return std::unique_ptr<Graph>(emulated_cuda::new_graph());
#endif
}

void begin(Graph& graph, gradaccum::detail::GraphPool pool = new_pool) {
#if __has_include(<ATen/core/GraphImplInterface.h>)
  graph.capture_begin(pool, at::GraphCaptureMode::ThreadLocal);
#else
  graph.capture_begin(pool);
#endif
}

std::unique_ptr<Graph> captured(c10::function_ref<void()> work, gradaccum::detail::GraphPool pool = new_pool,
                                c10::Stream stream = new_stream()) {
  const c10::StreamGuard guard(stream);
  auto graph = new_graph();
  begin(*graph, pool);
  work();
  graph->capture_end();
  return graph;
}

/// The device's shared generator.
at::Generator generator() { return at::globalContext().defaultGenerator(device); }
at::Tensor random_state() { return generator().get_state(); }

Tensors clones(const Tensors& tensors) {
  Tensors copies;
  for (auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

bool equal(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](auto& left, auto& right) { return at::equal(left, right); });
}

/// Forward and backward of a training that write to buffers and use the device's random numbers.
struct Training {
  torch::nn::Sequential model;
  at::Tensor input = torch::randn({5, 4}, device), target = torch::randn({5, 3}, device);

  Training() {
    torch::manual_seed(3);
    model = torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
                                  torch::nn::Dropout(0.3), torch::nn::Linear(8, 3));
    model->to(device);
  }

  at::Tensor loss() { return torch::mse_loss(model->forward(input), target); }
  Tensors gradients(const at::Tensor& loss) { return torch::autograd::grad({loss}, model->parameters()); }
  Tensors state() const {
    auto all = model->parameters();
    for (auto& buffer : model->buffers()) all.push_back(buffer);
    all.push_back(random_state());
    all.push_back(input);
    return clones(all);
  }
  void set_state(const Tensors& state) {
    const torch::NoGradGuard no_grad;
    auto next = state.begin();
    for (auto& parameter : model->parameters()) parameter.copy_(*next++);
    for (auto& buffer : model->buffers()) buffer.copy_(*next++);
    generator().set_state(*next);
  }
};

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

const std::string refused = "operation not permitted when stream is capturing";
const std::string spoiled = "operation failed due to a previous error during capture";

}  // namespace

TEST_CASE("device: a replayed step gives the bits of the eager one", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto stream = new_stream();
  const auto stream_of_backward = GENERATE(false, true) ? new_stream() : stream;  // joined by the stream of forward
  Training training;
  const auto before = training.state();
  at::Tensor loss;
  Tensors gradients;
  const auto forward = captured([&] { loss = training.loss(); }, new_pool, stream);
  const auto backward = captured([&] { gradients = training.gradients(loss); }, forward->pool(), stream_of_backward);
  CHECK(equal(training.state(), before));
  CHECK(loss.isnan().item<bool>());  // captured only
  CHECK(backward->pool() == forward->pool());

  for (int step = 0; step < 3; ++step) {
    training.input.copy_(torch::randn({5, 4}, device));
    training.target.copy_(torch::randn({5, 3}, device));
    const auto start = training.state();
    forward->replay();
    backward->replay();
    auto replayed = training.state();
    auto results = clones(gradients);
    results.push_back(loss.detach().clone());

    training.set_state(start);
    const c10::StreamGuard guard(stream);  // the stream of the parameters' gradient accumulators
    const auto eager_loss = training.loss();
    auto eager = training.gradients(eager_loss);
    eager.push_back(eager_loss.detach());
    CHECK(equal(results, eager));
    CHECK(equal(replayed, training.state()));
    CHECK_FALSE(equal(replayed, start));
  }
}

TEST_CASE("device: a graph keeps the host's old numbers, and reads the device's current ones", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto x = torch::ones({3}, device);
  auto of_host = torch::full({}, 2.0);
  const auto pinned = torch::full({3}, 5.0, at::TensorOptions().pinned_memory(true));
  const auto result = torch::zeros({3}, device), copy = torch::zeros({3}, device);
  const auto to_host = torch::zeros({3}, at::TensorOptions().pinned_memory(true));
  double factor = 10;
  const auto numbers = torch::rand({20}, device).unbind();
  const auto scaled = [&] {  // the float64 factor does not change the dtype
    Tensors results;
    for (auto& number : numbers) results.push_back(number * 0.1);
    return results;
  };
  Tensors results;
  const auto graph = captured([&] {
    results = scaled();
    result.copy_(x * of_host * factor);
    copy.copy_(pinned, /*non_blocking=*/true);
    to_host.copy_(result, /*non_blocking=*/true);
  });
  CHECK(to_host.sum().item<double>() == 0);
  of_host.fill_(3);
  factor = 100;
  pinned.fill_(7);
  x.fill_(4);
  graph->replay();
  CHECK(at::equal(result.cpu(), torch::full({3}, 80.0)));  // not 4 * 3 * 100
  CHECK(equal(results, scaled()));
  CHECK(at::equal(copy.cpu(), torch::full({3}, 7.0)));
  CHECK(at::equal(to_host, torch::full({3}, 80.0)));
}

TEST_CASE("device: indices that a captured forward computes serve its backward", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto table = torch::randn({6, 4}, device).requires_grad_(), x = torch::randn({1, 6, 4}, device);
  const auto loss_of = [&] {
    const auto hidden = torch::embedding(table, torch::arange(6, device)) * x;
    return torch::max_pool2d(hidden, {2, 2}).sum() + hidden.gather(2, x.argmax(2, /*keepdim=*/true)).sum();
  };
  at::Tensor loss, gradient;
  const auto stream = new_stream();
  const auto forward = captured([&] { loss = loss_of(); }, new_pool, stream);
  const auto backward =
      captured([&] { gradient = torch::autograd::grad({loss}, {table})[0]; }, forward->pool(), stream);
  x.copy_(torch::randn_like(x));
  forward->replay();
  backward->replay();
  const auto eager = loss_of();
  CHECK(at::equal(loss, eager));
  CHECK(at::equal(gradient, torch::autograd::grad({eager}, {table})[0]));
}

TEST_CASE("device: results in given, resized or shared tensors", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto a = torch::randn({3, 4}, device), b = torch::randn({4, 2}, device);
  auto out = torch::empty({0}, device), transposed = torch::randn({4, 3}, device);
  const auto before = transposed.clone();
  const auto same_memory = torch::from_blob(transposed.data_ptr(), {12}, transposed.options());
  at::Tensor sum;
  const auto graph = captured([&] {
    at::mm_out(out, a, b);
    transposed.t().add_(a);
    same_memory.mul_(2);
    sum = torch::cat({out.view({-1}), transposed.view({-1})}).sum();
  });
  CHECK(at::equal(transposed, before));
  a.copy_(torch::randn({3, 4}, device));
  graph->replay();
  CHECK(at::equal(out, at::mm(a, b)));
  CHECK(at::equal(transposed, (before + a.t()) * 2));
  CHECK(at::equal(sum, torch::cat({out.view({-1}), transposed.view({-1})}).sum()));
}

TEST_CASE("device: waiting operations cannot be captured, and leave the stream usable", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto x = torch::arange(1.0, 5.0, device);
  auto host = torch::zeros({4}), pinned = torch::zeros({4}, at::TensorOptions().pinned_memory(true));
  const auto stream = new_stream();
  c10::Event event(at::kCUDA);
  event.record(c10::impl::VirtualGuardImpl(at::kCUDA).getDefaultStream(device));
  const std::vector<std::pair<std::string, std::function<void()>>> works{
      {"item", [&] { x.sum().item<double>(); }},
      {"a mask", [&] { x.index({x > 2}); }},
      {"nonzero", [&] { x.nonzero(); }},
      {"to the host", [&] { host.copy_(x); }},
      {"to the host's pinned memory", [&] { pinned.copy_(x); }},
      {"from the host", [&] { x.copy_(host); }},
      {"from memory that is not pinned", [&] { x.copy_(host, /*non_blocking=*/true); }},
      {"a stream", [&] { stream.synchronize(); }},
      {"the device", [&] { torch::cuda::synchronize(0); }},
      {"an event", [&] { event.synchronize(); }},
      {"a query", [&] { event.query(); }}};
  for (auto& [name, work] : works) {
    CAPTURE(name);
    const c10::StreamGuard guard(stream);
    const auto graph = new_graph();
    const auto state = random_state();
    begin(*graph);
    const auto drawn = torch::rand({2}, device);
    x.mul_(2);
    const auto waits = emulated_cuda::counts().waits;
    CHECK_THAT(error_of(work), Catch::Matchers::Contains(refused));
    CHECK(emulated_cuda::counts().waits == waits);
    CHECK_THAT(error_of([&] { x.add_(1); }), Catch::Matchers::Contains(spoiled));
    CHECK_THAT(error_of([&] { graph->capture_end(); }), Catch::Matchers::Contains(spoiled));
    CHECK(at::equal(x.cpu(), torch::arange(1.0, 5.0)));
    CHECK(host.sum().item<double>() == 0);
    CHECK(pinned.sum().item<double>() == 0);
    CHECK(at::equal(random_state(), state));
    CHECK(error_of([&] { graph->replay(); }) != "none");
    work();
    host.zero_();
    pinned.zero_();
    x.copy_(torch::arange(1.0, 5.0));
    begin(*graph);  // the same graph and stream
    x.add_(1);
    graph->capture_end();
    graph->replay();
    CHECK(at::equal(x.cpu(), torch::arange(2.0, 6.0)));
    x.copy_(torch::arange(1.0, 5.0));
  }
}

TEST_CASE("device: where a capture may begin and end, and its work", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto graph = new_graph(), other = new_graph();
  const auto x = torch::ones({2}, device), elsewhere = torch::ones({2}, at::Device(at::kCUDA, 1));
  CHECK_THAT(error_of([&] { begin(*graph); }), Catch::Matchers::Contains("non-default stream"));
  CHECK(error_of([&] { graph->replay(); }) != "none");
  CHECK(error_of([&] { graph->capture_end(); }) != "none");
  CHECK(error_of([&] { graph->pool(); }) != "none");
  const c10::StreamGuard guard(new_stream());
  begin(*graph);
  CHECK(error_of([&] { begin(*other); }) != "none");
  x.add_(1);
  {
    const c10::StreamGuard outside(new_stream());
    x.mul_(3);                            // executed
    CHECK(x.sum().item<double>() == 12);  // the emulated device also executes captured work
    CHECK(error_of([&] { graph->capture_end(); }) != "none");
  }
  elsewhere.add_(1);  // work on another device is executed
  const auto another = generator().clone();
  CHECK_THAT(error_of([&] { x.uniform_(0, 1, another); }), Catch::Matchers::Contains("not in capture mode"));
  graph->capture_end();
  CHECK(x.sum().item<double>() == 2);
  CHECK(elsewhere.sum().item<double>() == 4);
  graph->replay();
  CHECK(x.sum().item<double>() == 4);
  CHECK(elsewhere.sum().item<double>() == 4);
  CHECK(error_of([&] { begin(*graph); }) != "none");
  begin(*other);
  CHECK_THAT(error_of([&] { graph->replay(); }), Catch::Matchers::Contains(refused));
  CHECK(error_of([&] { other->capture_end(); }) != "none");
  CHECK(std::unique_ptr<Graph>(emulated_cuda::new_graph()) != nullptr);
}

TEST_CASE("device: streams that wait for a captured stream are captured with it", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto x = torch::ones({2}, device), weight = torch::ones({2}, device).requires_grad_();
  const auto stream = new_stream(), joined = new_stream();
  const auto graph = captured(
      [&] {
        c10::Event event(at::kCUDA);
        event.record(stream);
        event.block(joined);
        const c10::StreamGuard guard(joined);
        x.add_(1);
      },
      new_pool, stream);
  {
    const c10::StreamGuard guard(joined);
    x.mul_(3);  // not captured any more
  }
  CHECK(x.sum().item<double>() == 6);
  graph->replay();
  CHECK(x.sum().item<double>() == 8);

  // Gradients are accumulated on the stream of their accumulator, which was made before here.
  const auto older = weight * 2;
  const auto gradient = [&] { captured([&] { torch::autograd::grad({(weight * x + weight * 3).sum()}, {weight}); }); };
  CHECK_THAT(error_of(gradient), Catch::Matchers::Contains("would make the legacy stream depend"));
}

TEST_CASE("device: a graph that is destroyed during a capture undoes it", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const auto x = torch::ones({2}, device);
  const c10::StreamGuard guard(new_stream());
  {
    const auto graph = new_graph();
    begin(*graph);
    x.add_(1);
  }
  CHECK(x.sum().item<double>() == 2);
  x.add_(1);
  CHECK(x.sum().item<double>() == 4);
}

TEST_CASE("device: a graph's memory is not reused while it or another one of its pool lives", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  constexpr std::int64_t of_a_mebibyte = 1 << 18;
  const auto x = torch::ones({of_a_mebibyte}, device);
  // Rounds to MiB, because autograd's threads may still free small tensors of earlier tests.
  const auto mebibytes = [] { return emulated_cuda::memory().bytes >> 20; };
  const auto before = mebibytes();
  const void* address = nullptr;
  at::Tensor kept;
  auto first = captured([&] {
    const auto passing = x + 1;
    address = passing.const_data_ptr();
    kept = passing * 2;
  });
  auto second = captured([&] { kept.add(1); }, first->pool());
  const auto with_graphs = mebibytes();
  CHECK(with_graphs >= before + 3);
  {
    Tensors others;
    for (int i = 0; i < 100; ++i) others.push_back(torch::zeros({of_a_mebibyte}, device));
    for (auto& other : others) CHECK(other.const_data_ptr() != address);
    first->replay();
    for (auto& other : others) CHECK(other.sum().item<double>() == 0);
  }
  CHECK(mebibytes() == with_graphs);
  CHECK(kept.sum().item<double>() == 4 * of_a_mebibyte);
  first.reset();
  CHECK(mebibytes() == with_graphs);
  second.reset();
  CHECK(mebibytes() == before + 1);  // the kept tensor, which is ordinary memory now
  CHECK(kept.sum().item<double>() == 4 * of_a_mebibyte);
  kept.reset();
  CHECK(mebibytes() == before);
}

TEST_CASE("device: a replay is one launch, and allocates no memory", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  Training training;
  at::Tensor loss;
  Tensors gradients;
  emulated_cuda::reset_counts();
  const auto forward = captured([&] { loss = training.loss(); });
  const auto backward = captured([&] { gradients = training.gradients(loss); }, forward->pool());
  CHECK(emulated_cuda::counts().launches == 0);
  const auto allocations = emulated_cuda::memory().allocations;
  for (int i = 0; i < 3; ++i) {
    forward->replay();
    backward->replay();
  }
  CHECK(emulated_cuda::counts().launches == 6);
  CHECK(emulated_cuda::counts().waits == 0);
  CHECK(emulated_cuda::memory().allocations == allocations);
}

TEST_CASE("device: the library's kernels are captured", "[cuda]") {
  if (!emulated_cuda::is_loaded()) SKIP(KernelsOnDevice::only_emulated);
  const KernelsOnDevice kernels;
  const Tensors gradients{torch::randn({40, 30}, device), torch::randn({70}, device)};
  at::Tensor norms;
  const auto graph = captured([&] { norms = ga::detail::norms(gradients, 2); });
  for (auto& gradient : gradients) gradient.copy_(torch::randn_like(gradient));
  graph->replay();
  CHECK(at::equal(norms, ga::detail::norms(gradients, 2)));

  const auto parameter = torch::randn({300}, device).requires_grad_();
  parameter.mutable_grad() = torch::randn({300}, device);
  const auto start = parameter.detach().clone();
  ga::optim::SGD optimizer({parameter}, ga::optim::SGDOptions(0.5));
  const auto stepped = captured([&] { optimizer.step(); });
  CHECK(at::equal(parameter.detach(), start));
  parameter.mutable_grad().fill_(2);
  stepped->replay();
  CHECK(at::equal(parameter.detach(), start - 1));
}
