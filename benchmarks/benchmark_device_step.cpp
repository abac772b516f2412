// SPDX-License-Identifier: Apache-2.0
//
// A window's clipping and step of AdamW on a CUDA device, in the shape of BLOOM-560m: ours by the kernels of
// gradaccum::compiled and by ATen's operations, against LibTorch's own and ATen's fused operation; then with moments of
// 8 bits, against ours in float32. Bound: what the device takes to copy as many bytes.

#include <gradaccum/clip_grad.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>

#include "harness.hpp"
#include "parameter_sets.hpp"

namespace ga = gradaccum;
using namespace parameter_sets;

namespace {

const at::Device device(at::kCUDA, 0);

ParameterSet bloom(std::int64_t vocabulary, std::int64_t hidden) {
  std::vector<std::int64_t> sizes{vocabulary * hidden, hidden, hidden};
  for (int block = 0; block < 24; ++block) {
    sizes.insert(sizes.end(), {hidden, hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden});
    sizes.insert(sizes.end(), {hidden, hidden, 4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden});
  }
  sizes.insert(sizes.end(), {hidden, hidden});
  return {"in the shape of BLOOM-560m", sizes};
}

/// To its end on the device.
std::function<void()> timed(const std::function<void()>& run) {
  return [run] {
    run();
    torch::cuda::synchronize();
  };
}

/// Clipped on the way.
template <class Optimizer>
void step_ours(Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  ga::Gradients gradients(parameters);
  ga::clip_grad_norm_(gradients, 1.0);
  optimizer.step(gradients);
}

/// As Python does it: the norm, a pass over the gradients, the step.
void step_fused(AtenFusedAdamW& fused) {
  const auto norm = at::stack(at::_foreach_norm(fused.gradients)).norm();
  at::_foreach_mul_(fused.gradients, norm.add(1e-6).reciprocal().clamp_max(1.0));
  fused.step();
}

/// Copies so many bytes, read and written, in parts that are larger than a device's cache.
class Copies {
 public:
  explicit Copies(double bytes)
      : from_(torch::rand({std::int64_t{1} << 26}, device)),
        to_(torch::empty_like(from_)),
        times_(static_cast<int>(bytes / (2.0 * static_cast<double>(from_.nbytes())) + 0.5)) {}
  void run() const {
    for (int i = 0; i < times_; ++i) to_.copy_(from_);
  }
  double bytes() const { return times_ * 2.0 * static_cast<double>(from_.nbytes()); }

 private:
  at::Tensor from_, to_;
  int times_;
};

/// By ATen's operations, whatever kernels there are.
void without_kernels(const std::function<void()>& run) {
  const auto* const kernels = ga::detail::device_kernels();
  ga::detail::set_device_kernels(nullptr);
  run();
  ga::detail::set_device_kernels(kernels);
}

void compare_adamw(const ParameterSet& set, const harness::Options& options) {
  torch::NoGradGuard no_grad;
  const torch::optim::AdamWOptions hyper(1e-3);
  const auto our_parameters = make_parameters(set, device), aten_parameters = make_parameters(set, device),
             torch_parameters = make_parameters(set, device);
  ga::optim::AdamW ours(our_parameters, hyper), by_aten(aten_parameters, hyper);
  torch::optim::AdamW torch_adamw(torch_parameters, hyper);
  AtenFusedAdamW fused(make_parameters(set, device), hyper);
  const Copies copies(32 * set.elements());
  harness::contest(
      "clipping and AdamW step on a device, " + set.description(),
      {{"ga::optim::AdamW", timed([&] { step_ours(ours, our_parameters); }), our_parameters},
       {"torch::optim::AdamW", timed([&] {
          torch::nn::utils::clip_grad_norm_(torch_parameters, 1.0);
          torch_adamw.step();
        }),
        torch_parameters},
       {"ga::optim::AdamW by ATen's operations",
        timed([&] { without_kernels([&] { step_ours(by_aten, aten_parameters); }); }), aten_parameters},
       {"at::_foreach_norm, _foreach_mul_, _fused_adamw_", timed([&] { step_fused(fused); }), fused.parameters},
       {.name = "bound: 32 bytes a parameter, copied", .run = timed([&] { copies.run(); }), .bound = true}},
      copies.bytes() / 1e9, "GB", options);
}

void compare_8bit(const ParameterSet& set, const harness::Options& options) {
  torch::NoGradGuard no_grad;
  const torch::optim::AdamWOptions hyper(1e-3);
  const auto parameters = make_parameters(set, device), float_parameters = make_parameters(set, device);
  ga::optim::AdamW8bit ours(parameters, hyper);
  ga::optim::AdamW in_float32(float_parameters, hyper);
  const Copies copies(20 * set.elements());
  harness::contest(
      "clipping and AdamW8bit step on a device, " + set.description(),
      {{"ga::optim::AdamW8bit", timed([&] { step_ours(ours, parameters); })},
       {"ga::optim::AdamW", timed([&] { step_ours(in_float32, float_parameters); })},
       {.name = "bound: 20 bytes a parameter, copied", .run = timed([&] { copies.run(); }), .bound = true}},
      copies.bytes() / 1e9, "GB", options);
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t vocabulary = 250'880, hidden = 1'024;
  const auto options = harness::parse(
      argc, argv, "A step of AdamW on a CUDA device against torch::optim::AdamW and at::_fused_adamw_", [&](auto& app) {
        app.add_option("--vocabulary", vocabulary, "rows of the largest tensor")->check(CLI::Range(1, 10'000'000));
        app.add_option("--hidden", hidden, "columns of it; the others grow with their square")
            ->check(CLI::Range(1, 16'384));
      });
  if (!torch::cuda::is_available()) {
    fmt::print("steps on a device: there is no CUDA device that LibTorch can use, so nothing is measured\n");
    return 0;
  }
  if (!ga::detail::device_kernels())
    fmt::print("steps on a device: this program has no kernels for it (GRADACCUM_CUDA), so all is by ATen\n");
  const auto set = bloom(vocabulary, hidden);
  compare_adamw(set, options);
  compare_8bit(set, options);
}
