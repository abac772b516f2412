// SPDX-License-Identifier: Apache-2.0
//
// Mixed precision and clipping after backward: unscale, look for non-finite numbers, take the norm, clip, step. Ours is
// a factor and two passes over memory; the peers are possible sequences of ATen's operations. Bound: the norm must read
// the gradients, 4 bytes per parameter, before the step can move its 28.

#include <gradaccum/gradients.hpp>
#include <gradaccum/optim/adamw.hpp>

#include "harness.hpp"
#include "parameter_sets.hpp"

namespace ga = gradaccum;
using namespace parameter_sets;

namespace {

// A scale of 1, because others would shrink the gradients, which are unscaled in place, from run to run. For the same
// reason clipping halves them once; afterwards they have the greatest norm allowed.
constexpr double scale = 1;
double max_norm_of(const ParameterSet& set) { return std::sqrt(set.elements()) / 2; }

at::Tensor norm_of(const std::vector<at::Tensor>& gradients) { return at::stack(at::_foreach_norm(gradients)).norm(); }

/// Python's GradScaler.unscale_ and step, clip_grad_norm_ and fused AdamW, without Python's overhead.
void step_in_four_passes(AtenFusedAdamW& adamw, double max_norm) {
  auto found_inf = torch::zeros({}), inverse_scale = torch::full({}, 1 / scale);
  at::_amp_foreach_non_finite_check_and_unscale_(adamw.gradients, found_inf, inverse_scale);
  at::_foreach_mul_(adamw.gradients, (max_norm / (norm_of(adamw.gradients) + 1e-6)).clamp_max(1.0));
  if (found_inf.item<float>() == 0) adamw.step();
}

/// Lets the optimizer clip, which divides by `grad_scale`.
void step_with_folded_clip(AtenFusedAdamW& adamw, double max_norm) {
  auto found_inf = torch::zeros({}), inverse_scale = torch::full({}, 1 / scale);
  at::_amp_foreach_non_finite_check_and_unscale_(adamw.gradients, found_inf, inverse_scale);
  const auto clip = ((norm_of(adamw.gradients) + 1e-6) / max_norm).clamp_min(1.0);
  adamw.step(clip, found_inf);
}

/// Lets the optimizer unscale, too, and checks only the norm, in which overflowing squares count as infinite.
void step_with_all_folded(AtenFusedAdamW& adamw, double max_norm) {
  const auto norm = norm_of(adamw.gradients) / scale;
  const auto found_inf = norm.isfinite().logical_not().to(torch::kFloat);
  adamw.step(((norm + 1e-6) / max_norm).clamp_min(1.0) * scale, found_inf);
}

void compare(const ParameterSet& set, const harness::Options& options) {
  torch::NoGradGuard no_grad;  // saves ATen some bookkeeping
  const auto max_norm = max_norm_of(set);
  const auto hyper = torch::optim::AdamWOptions(1e-3).eps(1);  // a large eps makes clipping change the result
  const auto our_parameters = make_parameters(set), torch_parameters = make_parameters(set);
  ga::optim::AdamW ours(our_parameters, hyper);
  torch::optim::AdamW torch_adamw(torch_parameters, hyper);
  AtenFusedAdamW four_passes(make_parameters(set), hyper), folded_clip(make_parameters(set), hyper),
      all_folded(make_parameters(set), hyper);
  const Stream stream(set);

  const auto our_tail = [&] {
    ga::Gradients gradients(our_parameters);
    gradients.factor().divide(scale);
    gradients.factor().require_finite();
    ga::clip_grad_norm_(gradients, max_norm);
    ours.step(gradients);
  };
  const auto torch_tail = [&] {
    torch::nn::utils::clip_grad_norm_(torch_parameters, max_norm);
    torch_adamw.step();
  };
  const auto least_tail = [&] {
    stream.g.sum();
    stream.run();
  };
  harness::contest("Unscale, check, clip and AdamW step, " + set.description(),
                   {{"Gradients, clip_grad_norm_, ga::optim::AdamW", our_tail, our_parameters},
                    {"ATen: unscale, norm, multiply, fused step", [&] { step_in_four_passes(four_passes, max_norm); },
                     four_passes.parameters},
                    {"ATen: unscale, norm, fused step that clips",
                     [&] { step_with_folded_clip(folded_clip, max_norm); }, folded_clip.parameters},
                    {"ATen: norm, fused step that does the rest", [&] { step_with_all_folded(all_folded, max_norm); },
                     all_folded.parameters},
                    {"LibTorch: clip_grad_norm_, AdamW (no unscaling)", torch_tail, torch_parameters},
                    {.name = "bound: 32 bytes a parameter", .run = least_tail, .bound = true}},
                   32 * set.elements() / 1e9, "GB", options);
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = harness::parse(argc, argv, "What follows backward in mixed precision, up to the step of AdamW");
  for (auto& set : all()) compare(set, options);
}
