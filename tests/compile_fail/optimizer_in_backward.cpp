// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/trainer.hpp>

#include <torch/nn/modules/linear.h>

namespace ga = gradaccum;

struct Reduces {
  void before_step(ga::Gradients&) {}
};
struct DerivedClip : ga::ClipNorm {};
struct Allowed {
  void after_backward(ga::Gradients&) {}
  void scale_gradients(ga::Factor&) {}
};

int main() {
  torch::nn::Linear model(1, 1);
  ga::optim::SGD sgd(model->parameters(), 0.1);
  const auto objective = [](auto&, auto& batch) { return batch; };
  const ga::OptimizerInBackward in_backward;
  ga::Trainer allowed(model, sgd, objective, in_backward, Allowed{}, ga::Accumulate{}, ga::Ema{},
                      [](const ga::Step&) {});
  ga::Trainer norm(model, sgd, objective, in_backward, ga::ClipNorm{});    // error: needs all gradients at once
  ga::Trainer value(model, sgd, objective, ga::ClipValue{}, in_backward);  // error: ClipNorm, ClipValue
  ga::Trainer derived(model, sgd, objective, in_backward, DerivedClip{});  // error: here each is freed as it arrives
  ga::Trainer reduced(model, sgd, objective, in_backward, Reduces{});      // error: leave one of the two out
}
