// SPDX-License-Identifier: Apache-2.0
//
// A window's clipping and step on a CUDA device, in the shape of BLOOM-560m: ours by gradaccum::compiled's kernels and
// by ATen's operations, compared to LibTorch's and to ATen's fused operation if there is one. Bound: a copy of as many
// bytes as the window reads and writes.

#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/sgd.hpp>

#include <algorithm>

#include "card.hpp"
#include "harness.hpp"
#include "parameter_sets.hpp"

namespace ga = gradaccum;
using namespace parameter_sets;
using harness::device;

namespace {

constexpr double max_norm = 1;

ParameterSet bloom(std::int64_t vocabulary, std::int64_t hidden, int blocks) {
  std::vector<std::int64_t> sizes{vocabulary * hidden, hidden, hidden};
  for (int block = 0; block < blocks; ++block) {
    sizes.insert(sizes.end(), {hidden, hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden});
    sizes.insert(sizes.end(), {hidden, hidden, 4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden});
  }
  sizes.insert(sizes.end(), {hidden, hidden});
  return {"in the shape of BLOOM-560m", sizes, hidden};
}

/// Clips in the step.
template <class Optimizer>
struct Ours {
  template <class Options>
  Ours(const ParameterSet& set, const Options& options)
      : parameters(make_parameters(set, device)), optimizer(parameters, options) {}

  void step() {
    ga::Gradients gradients(parameters);
    ga::clip_grad_norm_(gradients, max_norm);
    optimizer.step(gradients);
  }

  std::vector<at::Tensor> parameters;
  Optimizer optimizer;
};

/// Ours by ATen's operations, even if kernels are linked.
template <class Optimizer>
struct ByAten : Ours<Optimizer> {
  using Ours<Optimizer>::Ours;

  void step() {
    const auto* const kernels = ga::detail::device_kernels();
    ga::detail::set_device_kernels(nullptr);
    Ours<Optimizer>::step();
    ga::detail::set_device_kernels(kernels);
  }
};

template <class Optimizer>
struct LibTorchs {
  template <class Options>
  LibTorchs(const ParameterSet& set, const Options& options)
      : parameters(make_parameters(set, device)), optimizer(parameters, options) {}

  void step() {
    torch::nn::utils::clip_grad_norm_(parameters, max_norm);
    optimizer.step();
  }

  std::vector<at::Tensor> parameters;
  Optimizer optimizer;
};

/// Takes the norm, multiplies the gradients and calls the fused step, as Python does.
template <class AtenFused>
struct Fused : AtenFused {
  template <class Options>
  Fused(const ParameterSet& set, const Options& options) : AtenFused(make_parameters(set, device), options) {}

  void step() {
    const auto norm = at::stack(at::_foreach_norm(this->gradients)).norm();
    at::_foreach_mul_(this->gradients, norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0));
    AtenFused::step();
  }
};

/// Copies `bytes`, read and written, in parts that are larger than a device's cache.
class Copies {
 public:
  explicit Copies(double bytes)
      : times_(std::max(1, static_cast<int>(bytes / (std::int64_t{1} << 29)))),
        from_(torch::rand({static_cast<std::int64_t>(bytes / 2 / sizeof(float) / times_)}, device)),
        to_(torch::empty_like(from_)) {}
  void run() const {
    for (int i = 0; i < times_; ++i) to_.copy_(from_);
  }

 private:
  int times_;
  at::Tensor from_, to_;
};

/// `Way` must have a `step`.
template <class Way>
harness::Contestant contestant(const std::string& name, Way& way, bool compared = true) {
  return {name, [&way] { way.step(); }, compared ? way.parameters : std::vector<at::Tensor>()};
}

/// `bytes`: the bytes that the window reads and writes per parameter.
void compare(const std::string& optimizer, int bytes, std::vector<harness::Contestant> all, const ParameterSet& set,
             const harness::Options& options) {
  const Copies copies(bytes * set.elements());
  all.push_back(
      {.name = fmt::format("bound: {} bytes a parameter, copied", bytes), .run = [&] { copies.run(); }, .bound = true});
  for (auto& each : all)
    each.run = [run = each.run] {
      run();
      torch::cuda::synchronize();
    };
  harness::contest(fmt::format("clipping and {} step on a device, {}", optimizer, set.description()), all,
                   bytes * set.elements() / 1e9, "GB", options);
  harness::print_card();
}

/// Reads gradients for the norm and for the step, which also reads and writes parameters and momentum.
void compare_sgd(const ParameterSet& set, const harness::Options& options) {
  const auto hyper = torch::optim::SGDOptions(1e-3).momentum(0.9);
  Ours<ga::optim::SGD> ours(set, hyper);
  LibTorchs<torch::optim::SGD> theirs(set, hyper);
  ByAten<ga::optim::SGD> by_aten(set, hyper);
  Fused<AtenFusedSGD> fused(set, hyper);
  compare("SGD", 24,
          {contestant("ga::optim::SGD with momentum", ours), contestant("torch::optim::SGD with momentum", theirs),
           contestant("ga::optim::SGD by ATen's operations", by_aten),
           contestant("at::_foreach_norm, _foreach_mul_, _fused_sgd_", fused)},
          set, options);
}

/// Reads and writes two moments instead of SGD's momentum.
void compare_adamw(const ParameterSet& set, const harness::Options& options) {
  const torch::optim::AdamWOptions hyper(1e-3);
  Ours<ga::optim::AdamW> ours(set, hyper);
  LibTorchs<torch::optim::AdamW> theirs(set, hyper);
  ByAten<ga::optim::AdamW> by_aten(set, hyper);
  Fused<AtenFusedAdamW> fused(set, hyper);
  compare("AdamW", 32,
          {contestant("ga::optim::AdamW", ours), contestant("torch::optim::AdamW", theirs),
           contestant("ga::optim::AdamW by ATen's operations", by_aten),
           contestant("at::_foreach_norm, _foreach_mul_, _fused_adamw_", fused)},
          set, options);
}

/// Reads and writes two moments of one byte each. LibTorch has no such optimizer: the peer is ours in float32.
void compare_8bit(const ParameterSet& set, const harness::Options& options) {
  const torch::optim::AdamWOptions hyper(1e-3);
  Ours<ga::optim::AdamW8bit> ours(set, hyper);
  Ours<ga::optim::AdamW> in_float32(set, hyper);
  compare("AdamW8bit", 20,
          {contestant("ga::optim::AdamW8bit", ours), contestant("ga::optim::AdamW", in_float32, /*compared=*/false)},
          set, options);
}

/// Adafactor needs sums over whole tensors first: gradients are read for the averages (and the norm), for the RMS of
/// the update and for the step; parameters are read for their RMS and for the step, which writes them. LibTorch has no
/// such optimizer.
void compare_adafactor(const ParameterSet& set, const harness::Options& options) {
  const ga::optim::AdafactorOptions hyper(1e-3);
  Ours<ga::optim::Adafactor> ours(set, hyper);
  compare("Adafactor", 24, {contestant("ga::optim::Adafactor", ours)}, set, options);
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t vocabulary = 250'880, hidden = 1'024;
  int blocks = 24;
  const auto options = harness::parse(
      argc, argv, "A window's clipping and step on a CUDA device, against LibTorch's and ATen's fused", [&](auto& app) {
        app.add_option("--vocabulary", vocabulary, "rows of the largest tensor")->check(CLI::Range(1, 10'000'000));
        app.add_option("--hidden", hidden, "columns of it; the others grow with their square")
            ->check(CLI::Range(1, 16'384));
        app.add_option("--blocks", blocks, "of 12 tensors each")->check(CLI::Range(1, 1'000));
      });
  if (!harness::is_there("steps on a device")) return 0;
  const auto set = bloom(vocabulary, hidden, blocks);
  compare_sgd(set, options);
  compare_adamw(set, options);
  if (!ga::detail::device_kernels()) return 0;  // ATen has neither of these steps
  compare_8bit(set, options);
  compare_adafactor(set, options);
}
