// SPDX-License-Identifier: Apache-2.0
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>

#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

namespace ga = gradaccum;

struct WrongArgument {
  void before_step(int) {}
};
struct WrongFactor {
  void scale_gradients(ga::Gradients&) {}
};
struct WrongClose {
  void before_close(ga::Gradients&) {}
};
struct NoReturn {
  void ready() {}
};
struct Nothing {
  void before_steps(ga::Gradients&) {}
};
struct Sealed final {
  void before_step(ga::Gradients&) {}
};
struct NoScope {
  void forward_scope() {}
};
struct Nameless {
  void after_step(const ga::Step&) {}
  void state(ga::Archive&) {}
};

struct NoName {
  void add(const ga::Loss&) {}
  double value() const { return 0; }
};
struct NoAdd {
  std::string_view name = "no_add";
  double value() const { return 0; }
};
struct NoValue {
  std::string_view name = "no_value";
  void add(const ga::Loss&) {}
};
struct Hides {
  std::string_view name = "hides";
  at::Tensor sum = torch::zeros({});
  void add(const ga::Loss& loss) { sum += loss.mean; }
  double value() const { return sum.item<double>(); }
};

struct Counts {
  void after_step(const ga::Step&) const {}
};

int main() {
  torch::nn::Linear model(1, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  torch::optim::LBFGS lbfgs(model->parameters());
  ga::GradAccumulator accumulator(sgd);
  const auto& constant = *model;
  static_cast<void>(lbfgs);
  static_cast<void>(constant);
  std::vector<at::Tensor> batches;
  const auto objective = [](auto&, auto& batch) { return batch; };
  ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2});
  ga::Trainer twice(model, sgd, objective, Counts{}, Counts{});
  ga::Trainer wrong(model, sgd, objective, WrongArgument{});         // error: before_step must be callable as before_step\(ga::Gradients&\)
  ga::Trainer factor(model, sgd, objective, WrongFactor{});          // error: scale_gradients must be callable as scale_gradients\(ga::Factor&\)
  ga::Trainer close(model, sgd, objective, WrongClose{});            // error: before_close must be callable as before_close\(\)
  ga::Trainer no_return(model, sgd, objective, NoReturn{});          // error: ready must be callable as bool ready\(\)
  ga::Trainer nameless(model, sgd, objective, Nameless{});           // error: with state\(ga::Archive&\) goes a member std::string_view name
  ga::Trainer no_scope(model, sgd, objective, NoScope{});            // error: forward_scope must give back the guard
  ga::Trainer same(model, sgd, objective, ga::ClipNorm{}, ga::ClipNorm{});  // error: the same static member name
  twice.policy<Counts>();                                            // error: needs P to be one of its policies, and the only one
  trainer.policy<ga::ClipNorm>();                                    // error: needs P to be one of its policies
  ga::Trainer nothing(model, sgd, objective, Nothing{});             // error: expected a policy, which has one of the hooks of policy.hpp
  ga::Trainer sealed(model, sgd, objective, Sealed{});               // error: a policy must not be final
  struct Half : ga::MixedPrecision {};
  ga::Trainer half(model, sgd, objective, Half{});                   // error: derived from a policy of the library with a Running
  ga::Trainer number(model, sgd, objective, 3);                      // error: expected a policy
  ga::Trainer wrapped(model, accumulator, objective);                // error: give it the optimizer itself, and ga::Accumulate
  ga::Trainer closures(model, lbfgs, objective);                     // error: LBFGS calls its closure several times a step
  ga::Trainer gone(torch::nn::LinearImpl(1, 1), sgd, objective);     // error: holds a plain module by reference
  ga::Trainer fixed(constant, sgd, objective);                       // error: a module that is const cannot be trained
  ga::Trainer lost(model, torch::optim::SGD({}, 0.1), objective);    // error: holds the optimizer by reference
  ga::Trainer none(objective, sgd, objective);                       // error: a model is a torch::nn::Module, a ModuleHolder
  ga::Trainer typo(model, sgd, objective, ga::Accumulate{.step = 2});  // error: step
  ga::Trainer copy(trainer);                                         // error: deleted
  trainer.evaluate(batches, Nothing{});                              // error: metric: needs a member std::string_view name
  trainer.evaluate(batches, NoAdd{});                                // error: metric: needs a member void add\(const ga::Loss&\)
  trainer.evaluate_on_all(batches, NoValue{});                       // error: metric: needs a member double value\(\)
  trainer.evaluate(batches, Hides{});                                // error: metric: needs a member void reset\(\)
  ga::Trainer validated(model, sgd, objective, ga::Validate(batches, NoName{}));  // error: metric: needs a member std::string_view name
}
