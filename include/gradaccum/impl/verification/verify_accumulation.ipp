// SPDX-License-Identifier: Apache-2.0
// Compares one large batch with its micro-batches, and finds what makes them differ.
#pragma once

#include <gradaccum/verify_accumulation.hpp>

#include <gradaccum/detail/window/open_window.hpp>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <ostream>
#include <set>
#include <tuple>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

using GradientList = std::vector<at::Tensor>;  // one per parameter; undefined means zeros
using PartShares = std::vector<double>;        // the weight of each micro-batch's gradients
using ModuleModes = std::vector<bool>;         // for each module: true in training mode

/// Restores a model at the end of a scope: parameters, gradients, buffers, modes, and the random state of the CPU and
/// of the model's devices.
class ModelGuard {
 public:
  /// A module of the model. Its submodules follow it, up to `end`.
  struct Part {
    std::string name;
    torch::nn::Module* module;
    std::size_t end = 0;
  };

  explicit ModelGuard(torch::nn::Module& model) : parameters_(model.parameters()) {
    const at::NoGradGuard no_grad;
    list("", model);
    std::vector<at::Device> devices{at::kCPU};
    for (auto& tensors : {parameters_, model.buffers()})
      for (auto& tensor : tensors) {
        if (!tensor.defined()) continue;
        tensors_.push_back(tensor);
        values_.push_back(tensor.detach().clone());
        if (std::ranges::find(devices, tensor.device()) == devices.end()) devices.push_back(tensor.device());
      }
    for (auto device : devices) generators_.push_back(at::globalContext().defaultGenerator(device));
    random_state_ = random_state();
    for (auto& parameter : parameters_) gradients_.push_back(parameter.grad());
  }
  ModelGuard& operator=(ModelGuard&&) = delete;
  ~ModelGuard() {
    weights = 1;
    try {
      rewind(modes_);
      for (std::size_t i = 0; i < gradients_.size(); ++i) parameters_[i].mutable_grad() = gradients_[i];
    } catch (...) {  // from a user's train(), or a lost device; a destructor must not throw
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  const ModuleModes& modes() const { return modes_; }  ///< the original modes

  /// Multiplies parameters when they are restored, for an experiment with other weights. Weights of 0 change, too.
  double weights = 1;

  /// Restores parameters, buffers and random state, removes gradients, and sets modes. Leaves version counters as they
  /// are, since in the end the values are.
  void rewind(const ModuleModes& modes) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
    for (std::size_t i = 0; i < tensors_.size(); ++i)  // by value: BatchNorm bypasses version counters
      if (!tensors_[i].equal(values_[i])) tensors_[i].variable_data().copy_(values_[i]);
    if (weights != 1)
      for (auto& parameter : parameters_)
        if (parameter.is_floating_point()) parameter.variable_data().mul_(weights).add_(1e-3 * (1 - weights));
    for (std::size_t i = 0; i < generators_.size(); ++i) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(random_state_[i]);
    }
    for (std::size_t i = 0; i < parts_.size(); ++i)  // parents come first, and set their children
      if (parts_[i].module->is_training() != modes[i]) parts_[i].module->train(modes[i]);
  }
  void use_other_random_numbers() {
    for (auto& generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(generator.current_seed() + 1);
    }
  }
  std::vector<at::Tensor> random_state() const {
    std::vector<at::Tensor> states;
    for (auto generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }
  /// Returns whether the part's own buffers differ from the values that `rewind` restored.
  bool changed_buffers(const Part& part) const {
    for (auto& buffer : part.module->buffers(/*recurse=*/false))
      for (std::size_t i = 0; i < tensors_.size(); ++i)
        if (tensors_[i].is_same(buffer) && !buffer.equal(values_[i])) return true;
    return false;
  }

 private:
  /// Lists a module and its submodules. `named_modules` does not work for a model on the stack, without a shared_ptr.
  void list(const std::string& name, torch::nn::Module& module) {
    const auto i = parts_.size();
    parts_.push_back({name, &module});
    modes_.push_back(module.is_training());
    for (auto& child : module.named_children())
      list(name.empty() ? child.key() : name + '.' + child.key(), *child.value());
    parts_[i].end = parts_.size();
  }

  std::vector<Part> parts_;
  ModuleModes modes_;
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<at::Tensor> tensors_, values_;  // parameters and buffers, and their original values
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> random_state_;
};

GRADACCUM_INLINE std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps) {
  TORCH_CHECK(rows >= steps, "verify_accumulation: the batch must have a row for each of ", steps,
              " micro-batches, got ", rows);
  std::vector<std::int64_t> parts;
  for (std::int64_t i = 0; i < steps; ++i) parts.push_back(rows / steps + (i < rows % steps));
  return parts;
}

GRADACCUM_INLINE double largest(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.abs().max().to(at::kDouble).item<double>() : 0.0;
}

/// Returns the largest absolute value of all elements; NaN if one is NaN.
GRADACCUM_INLINE double largest(const GradientList& gradients) {
  double all = 0;
  for (auto& gradient : gradients) {
    const auto one = largest(gradient);
    if (detail::is_nan(one)) return one;
    all = std::max(all, one);
  }
  return all;
}

/// Holds parameters without an optimizer. LibTorch's optimizers refuse parameters that are not leaves.
struct NeverStepped {
  std::vector<torch::optim::OptimizerParamGroup> groups;

  auto& param_groups() { return groups; }
  void step() {}
  void zero_grad() {}
};

/// Runs forward and backward passes of one batch and of its micro-batches, each from the same state of the model.
class VerifyPasses {
 public:
  /// The tolerance defaults to one for the parameters' dtype.
  VerifyPasses(torch::nn::Module& module, const SplitBatch& batch, const VerifyAccumulationOptions& options)
      : model(module), batch_(batch) {
    divide(options.steps);
    std::unordered_set<const void*> known;  // a shared parameter has several names
    for (auto& item : module.named_parameters()) {
      auto& parameter = item.value();
      if (!parameter.requires_grad() || !known.insert(parameter.unsafeGetTensorImpl()).second) continue;
      names.push_back(item.key());
      parameters_.push_back(parameter);
      const auto dtype = at::toRealValueType(parameter.scalar_type());
      rounding_ = std::max(rounding_, dtype == at::kDouble  ? 0x1p-52
                                      : dtype == at::kFloat ? 0x1p-23
                                      : dtype == at::kHalf  ? 0x1p-10
                                                            : 0x1p-7);
    }
    TORCH_CHECK(!names.empty(), "verify_accumulation: a parameter of the model must require grad, but none does");
    tolerance = options.tolerance.value_or(rounding_ < 1e-15 ? 1e-10 : rounding_ < 1e-6 ? 1e-4 : 10 * rounding_);
  }

  /// Divides the batch into this number of micro-batches.
  void divide(std::int64_t steps) {
    const auto parts = batch_.split(steps);
    TORCH_CHECK(static_cast<std::int64_t>(parts) == steps, "verify_accumulation: split must return steps = ", steps,
                " micro-batches, got ", parts);
    rows.clear();
    for (std::size_t part = 0; part < parts; ++part) rows.push_back(batch_.rows(part));
  }

  /// Returns the gradients of a micro-batch, or of the whole batch.
  GradientList gradients_of(std::int64_t batch, const ModuleModes& modes, bool other_random_numbers = false) {
    model.rewind(modes);
    if (other_random_numbers) model.use_other_random_numbers();
    const auto loss = batch_.loss(batch);
    loss.check();
    Window::check_weight(loss.items);
    if (loss.items > 0) loss.backward();
    return gradients();
  }

  /// Returns the mean gradients, as an accumulator computes them; with `shares`, the sum of the micro-batches'
  /// gradients, each times its share.
  GradientList accumulated(const ModuleModes& modes, const PartShares* shares = nullptr) {
    model.rewind(modes);
    losses.clear(), items.clear();
    NeverStepped never_stepped{{torch::optim::OptimizerParamGroup(parameters_)}};
    OpenWindow window(std::make_unique<OptimizerOf<NeverStepped>>(never_stepped),
                      static_cast<std::int64_t>(rows.size()), {});
    for (std::size_t i = 0; i < rows.size(); ++i) {
      auto loss = batch_.loss(static_cast<std::int64_t>(i));
      loss.check();
      losses.push_back(loss.mean.detach().to(at::kDouble).item<double>());
      items.push_back(loss.items);
      if (shares) loss.items = (*shares)[i];
      window.backward(std::move(loss), {});
      window.complete_micro_batch();
    }
    auto mean = window.closing()->handle();
    if (shares) mean.factor().multiply(mean.items());  // a sum rather than a mean
    if (window.has_weight()) mean.apply();
    return gradients();
  }

  /// Runs a forward pass of the first micro-batch, to observe its effects.
  void forward(const ModuleModes& modes) {
    model.rewind(modes);
    batch_.loss(0);
  }

  /// Returns max|a - b| / max|b| for each parameter; infinity if one is not finite. If both are rounding noise relative
  /// to the model's largest gradient, divides by that gradient: the bias of a layer before a normalisation has a
  /// gradient of 0.
  std::vector<double> errors(const GradientList& a, const GradientList& b) const {
    const double all = largest(b), noise = std::min(0.1, 100 * rounding_) * all;
    std::vector<double> errors;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double of_a = largest(a[i]), of_b = largest(b[i]);
      const double apart = a[i].defined() && b[i].defined() ? largest(a[i].sub(b[i])) : a[i].defined() ? of_a : of_b;
      double error = std::numeric_limits<double>::infinity();
      if (detail::is_finite(apart)) error = apart == 0 ? 0 : apart / (std::max(of_a, of_b) <= noise ? all : of_b);
      errors.push_back(error);
    }
    return errors;
  }
  double error(const GradientList& a, const GradientList& b) const { return std::ranges::max(errors(a, b)); }
  bool differ(const GradientList& a, const GradientList& b) const { return error(a, b) > tolerance; }
  /// Returns the error of micro-batches with these shares.
  double error(const ModuleModes& modes, const PartShares& shares) {
    const auto sum = accumulated(modes, &shares);
    return error(sum, gradients_of(SplitBatch::whole, modes));
  }

  std::vector<std::int64_t> rows;  // of the micro-batches
  std::vector<std::string> names;  // of the parameters
  double tolerance = 0;
  ModelGuard model;
  std::vector<double> losses, items;  // of the micro-batches in the last call of `accumulated`

 private:
  GradientList gradients() {
    GradientList gradients;
    for (auto& parameter : parameters_) {
      auto& gradient = gradients.emplace_back(std::move(parameter.mutable_grad()));
      if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
    }
    return gradients;
  }

  const SplitBatch& batch_;
  std::vector<at::Tensor> parameters_;
  double rounding_ = 0;  // machine epsilon of the coarsest dtype
};

/// Returns the share of each number in their sum.
template <class Number>
PartShares shares_of(const std::vector<Number>& numbers) {
  const double all = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  PartShares shares;
  for (auto number : numbers) shares.push_back(all > 0 ? static_cast<double>(number) / all : 0);
  return shares;
}

/// Returns some elements of each gradient as one float64 vector on the CPU, enough to solve for a few unknowns.
GRADACCUM_INLINE at::Tensor sample_of(const GradientList& gradients, const GradientList& like) {
  constexpr std::int64_t most = 4096;
  std::vector<at::Tensor> samples;
  for (std::size_t i = 0; i < like.size(); ++i) {
    if (!like[i].defined()) continue;
    auto flat = (gradients[i].defined() ? gradients[i] : at::zeros_like(like[i])).flatten();
    flat = flat.slice(0, 0, flat.numel(), flat.numel() / most + 1).cpu();
    samples.push_back((flat.is_complex() ? at::view_as_real(flat.resolve_conj()).flatten() : flat).to(at::kDouble));
  }
  return at::cat(samples);
}

/// Lists the first values: `3, 3, 2, 2`, or `1, 2, 3, 4, 5, 6, and 7 more`, where `rest` is the text before 7.
template <class Value>
std::string listed(const std::vector<Value>& values, const std::string& rest = ", and ") {
  constexpr std::size_t most = 6;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, values.size()); ++i) text += c10::str(i > 0 ? ", " : "", values[i]);
  return values.size() <= most ? text : text + rest + std::to_string(values.size() - most) + " more";
}

/// Formats a number as `3.1e-02`.
GRADACCUM_INLINE std::string scientific(double value) {
  char text[16];
  std::snprintf(text, sizeof(text), "%.1e", value);
  return text;
}

/// Finds by experiment why micro-batches give other gradients than one batch. Returns a sentence per cause.
///
/// Starts with all modules in evaluation mode, where only the loss can be a cause, and looks for a weighted sum of the
/// micro-batches' gradients that equals the whole batch's. Continues with some modules in training mode.
class CauseSearch {
 public:
  explicit CauseSearch(VerifyPasses& passes)
      : passes_(passes),
        parts_(passes.model.parts()),
        candidates_(passes.model.modes()),
        evaluation_(parts_.size(), false) {}

  /// `gradients`: from one batch. `mean`: from the micro-batches. `equal`: whether they were equal.
  std::vector<std::string> run(GradientList mean, const GradientList& gradients, bool equal) {
    const double size = largest(gradients);
    if (!detail::is_finite(size))
      return {"the gradients of the whole batch are not finite: there is nothing to compare"};
    if (size == 0) say("the gradients of the whole batch are 0: there is nothing to compare");
    const auto& modes = passes_.model.modes();
    const bool random = passes_.differ(whole(modes, /*other_random_numbers=*/true), gradients);
    if (random && passes_.differ(whole(modes), gradients)) return {state_of_its_own("batch gives")};
    if (equal && !random) return causes_;
    if (equal) mean.clear();
    try {
      if (!equal && keep_a_state(std::move(mean))) return {state_of_its_own("micro-batches give")};
      look_closer(random);
      if (causes_.empty()) say("in evaluation mode the gradients are equal, but no module alone makes the difference");
    } catch (const std::exception& error) {
      const auto* const torch = dynamic_cast<const c10::Error*>(&error);
      say(std::string("the search ended early, with the model in evaluation mode: ") +
          (torch ? torch->what_without_backtrace() : error.what()));
    }
    return causes_;
  }

 private:
  using Parts = std::set<std::size_t>;  // indices of modules

  static std::string state_of_its_own(const std::string& who) {
    return "the same " + who +
           " other gradients each time, from the same random numbers: the objective or a module keeps a state of its "
           "own (a running maximum or a hidden state that no buffer holds), or draws from a generator of its own";
  }

  /// Runs the micro-batches again, after the whole batch and after themselves, because a module may keep a state
  /// between passes. Returns whether they give other gradients.
  bool keep_a_state(GradientList mean) {
    for (int i = 0; i < 2 && detail::is_finite(largest(mean)); ++i) {
      auto again = passes_.accumulated(passes_.model.modes());
      if (passes_.differ(again, mean)) return true;
      mean = std::move(again);
    }
    return false;
  }

  /// `random`: random numbers matter.
  void look_closer(bool random) {
    const bool always_random =
        random && passes_.differ(whole(evaluation_, /*other_random_numbers=*/true), whole(evaluation_));
    if (always_random)
      say("random numbers are drawn in evaluation mode, too, by the objective or by a forward() that does not ask "
          "is_training(): other ones for micro-batches than for one batch");
    const auto shares = always_random ? std::nullopt : shares_in_loss();
    const auto draw = random ? parts_that_draw() : Parts();
    const auto statistics = parts_with_statistics(shares);
    name(draw, "draws random numbers in training mode, other ones for micro-batches than for one batch");
    name(statistics, "computes over its whole batch in training mode, and changes its buffers");
    if (!shares) return;
    const auto breaks = [&](const ModuleModes& modes) { return passes_.error(modes, *shares) > passes_.tolerance; };
    name(parts_that(breaks), "computes over its whole batch in training mode");
  }

  /// Returns the shares of the micro-batches' gradients in the whole batch's, if there are any, and reports why they
  /// differ from the shares of items.
  std::optional<PartShares> shares_in_loss() {
    const auto gradients = whole(evaluation_);
    const auto as_returned = passes_.error(passes_.accumulated(evaluation_), gradients);
    const auto items = shares_of(passes_.items), rows = shares_of(passes_.rows);
    const auto fits = [&](const PartShares& shares) {
      return !passes_.differ(passes_.accumulated(evaluation_, &shares), gradients);
    };
    if (as_returned <= passes_.tolerance) return items;
    if (rows != items && fits(rows)) {
      say("the loss is a mean over rows, and the micro-batches have unequal ones (" + listed(passes_.rows) +
          "): return ga::Loss{mean, rows}");
      return rows;
    }
    if (const PartShares sum(rows.size(), 1.0); fits(sum)) {
      say(c10::str("the loss is a sum, not a mean: the whole batch has ", rows.size(),
                   " times the gradient of a micro-batch; divide it by its rows"));
      return sum;
    }
    if (as_returned <= 0.05 && is_rounding()) {
      say("the error of " + scientific(as_returned) +
          " is rounding (autocast, TF32), as it points elsewhere for weights a few percent larger: give a tolerance "
          "above it");
      return std::nullopt;
    }
    if (sample_of(gradients, gradients).numel() <= static_cast<std::int64_t>(rows.size())) {
      say("the loss is no mean over rows: over what, so few parameters do not tell; ask with fewer steps");
      return std::nullopt;
    }
    const auto solved = solve_shares(gradients);
    if (fits(solved)) return say_shares(solved) ? std::optional(solved) : std::nullopt;
    if (const auto parts = parts_with_buffers_changed(evaluation_); !parts.empty()) {
      name(parts,
           "changes its buffers in evaluation mode, too, as a running baseline does: each micro-batch meets what the "
           "one "
           "before it left; change them once for each update, after step()");
      return std::nullopt;
    }
    say(is_sum_and_more() ? "the loss is a sum, and a term that is no sum over samples, as a penalty on weights: the "
                            "micro-batches have that term once each; divide the sum alone by its rows"
                          : "no sum of the micro-batches' gradients is the whole batch's, in evaluation mode either: "
                            "what a sample adds to the loss depends on the others, as in a contrastive loss, in a "
                            "ratio of sums (Dice) or in a BatchNorm without running statistics");
    return std::nullopt;
  }

  /// Returns the difference between the sum of the micro-batches' gradients, each times its share, and the whole
  /// batch's.
  at::Tensor sampled_error(const PartShares* shares = nullptr) {
    const auto gradients = whole(evaluation_);
    return sample_of(passes_.accumulated(evaluation_, shares), gradients) - sample_of(gradients, gradients);
  }

  /// Returns whether the error is rounding: with other weights, which round differently in 16 bits, it has another
  /// direction.
  bool is_rounding() {
    constexpr int tries = 4;
    at::Tensor sum;
    for (int i = 0; i < tries; ++i) {
      passes_.model.weights = 1 + 0x1p-6 * i;
      auto error = sampled_error();
      error /= error.norm().clamp_min(1e-300);  // may grow with the weights
      sum = sum.defined() ? sum + error : error;
    }
    passes_.model.weights = 1;
    return sum.square().sum().item<double>() < 0.8 * tries * tries;
  }

  /// Returns whether the sum of the micro-batches' gradients has a term n - 1 times too often, for two values of n. A
  /// user's function may refuse another number of micro-batches.
  bool is_sum_and_more() {
    const auto steps = static_cast<std::int64_t>(passes_.rows.size()), others = steps > 2 ? std::int64_t{2} : 3;
    if (std::accumulate(passes_.rows.begin(), passes_.rows.end(), std::int64_t{0}) < others) return false;
    const auto too_much = [&](std::int64_t count) {
      passes_.divide(count);
      const PartShares sum(passes_.rows.size(), 1.0);
      return sampled_error(&sum) / (count - 1);
    };
    try {
      const auto other = too_much(others), term = too_much(steps);
      return (term - other).norm().item<double>() <= passes_.tolerance * term.norm().item<double>();
    } catch (const std::exception&) {
      passes_.divide(steps);
      return false;
    }
  }

  /// Reports why the whole batch's gradient is the sum of the micro-batches', times these shares. Returns whether they
  /// are as of a mean over items: they add up to 1, and are the same for other weights.
  bool say_shares(PartShares shares) {
    passes_.model.weights = 0.5;
    const auto error = passes_.error(evaluation_, shares);
    passes_.model.weights = 1;
    const bool is_mean = std::abs(std::accumulate(shares.begin(), shares.end(), -1.0)) <= 0.05;
    for (auto& share : shares) share = std::round(1000 * share) / 1000;
    if (!is_mean || error > 10 * passes_.tolerance) {
      say("the loss is no mean over items: the whole batch's gradient is the sum of the micro-batches' times (" +
          listed(shares) +
          "), as of a root or a logarithm of a mean (RMSE); return the mean itself, or a mean over the items "
          "that the model chose as ga::Loss{mean, items}");
      return false;
    }
    auto text = "the loss is a mean over items that the micro-batches have unequal shares of (" + listed(shares) +
                "), as valid tokens are: return ga::Loss{mean, items}";
    const auto lost = std::ranges::find_if(passes_.losses, [](double loss) { return !detail::is_finite(loss); });
    if (lost != passes_.losses.end())
      text += c10::str("; with 0 items where there are none: the loss of number ", lost - passes_.losses.begin(),
                       " is not finite");
    say(text);
    return true;
  }

  /// Finds the share of each micro-batch's gradient in the whole batch's by least squares, as a gradient has more
  /// elements than there are micro-batches. The share of a gradient that is not finite is 0.
  PartShares solve_shares(const GradientList& whole) {
    const auto wanted = sample_of(whole, whole);
    const auto count = static_cast<std::int64_t>(passes_.rows.size());
    std::vector<at::Tensor> columns, finite;
    for (std::int64_t i = 0; i < count; ++i) {
      auto column = sample_of(passes_.gradients_of(i, evaluation_), whole);
      finite.push_back(column.isfinite().all());
      columns.push_back(finite.back().item<bool>() ? column : at::zeros_like(column));
    }
    const auto found = std::get<0>(at::linalg_lstsq(at::stack(columns, 1), wanted.unsqueeze(1), {}, "gelsd"));
    // Sets shares of zero columns to exactly 0: solved ones may be close to 0, and times NaN they are NaN.
    const auto clamped = found.flatten().clamp_min(0).mul(at::stack(finite)).contiguous();
    return PartShares(clamped.data_ptr<double>(), clamped.data_ptr<double>() + count);
  }

  /// Finds modules whose forward pass in training mode leaves another random state than in evaluation mode.
  Parts parts_that_draw() {
    const auto state_after = [&](const ModuleModes& modes) {
      passes_.forward(modes);
      return passes_.model.random_state();
    };
    const auto without = state_after(evaluation_);
    return parts_that([&](const ModuleModes& modes) {
      return !std::ranges::equal(state_after(modes), without, [](auto& a, auto& b) { return a.equal(b); });
    });
  }

  /// Finds modules whose buffers a forward pass changes.
  Parts parts_with_buffers_changed(const ModuleModes& modes) {
    passes_.forward(modes);
    Parts found;
    for (std::size_t i = 0; i < parts_.size(); ++i)
      if (passes_.model.changed_buffers(parts_[i])) found.insert(i);
    return found;
  }

  /// Finds modules whose buffers change in training mode. With `shares`, keeps only classes that break the equality,
  /// which a counter in a buffer does not.
  Parts parts_with_statistics(const std::optional<PartShares>& shares) {
    std::map<std::string, Parts> by_class;
    for (auto i : parts_with_buffers_changed(candidates_))
      if (candidates_[i]) by_class[type_name(*parts_[i].module)].insert(i);
    Parts found;
    for (auto& [type, parts] : by_class)
      if (!shares || passes_.error(only(parts), *shares) > passes_.tolerance) found.insert(parts.begin(), parts.end());
    return found;
  }

  /// Finds modules of a part that pass the test alone. Skips a module's children if it fails the test together with
  /// them.
  template <class Test>
  Parts parts_that(const Test& test, std::size_t part = 0) const {
    const auto end = parts_[part].end;
    Parts inside, found;
    for (auto i = part; i < end; ++i) inside.insert(i);
    const auto alone = only({part}), all = only(inside);
    if (all == evaluation_ || !test(all)) return found;
    if (alone == all || (alone != evaluation_ && test(alone))) found.insert(part);
    for (auto child = part + 1; child < end; child = parts_[child].end) found.merge(parts_that(test, child));
    return found;
  }

  ModuleModes only(const Parts& parts) const {
    auto modes = evaluation_;
    for (auto part : parts) modes[part] = candidates_[part];
    return modes;
  }

  /// Reports `what` about these modules, which are then no candidates any more.
  void name(const Parts& parts, const std::string& what) {
    std::vector<std::string> names;
    for (auto i : parts) {
      auto type = type_name(*parts_[i].module);
      if (type.ends_with("Impl")) type.resize(type.size() - 4);
      names.push_back((parts_[i].name.empty() ? "the model itself" : parts_[i].name) + " (" + type + ")");
      candidates_[i] = false;
    }
    if (!names.empty()) say(listed(names, " and ") + ": " + what);
  }

  void say(const std::string& sentence) { causes_.push_back(sentence); }
  GradientList whole(const ModuleModes& modes, bool other_random_numbers = false) {
    return passes_.gradients_of(SplitBatch::whole, modes, other_random_numbers);
  }

  VerifyPasses& passes_;
  const std::vector<ModelGuard::Part>& parts_;
  ModuleModes candidates_;  // modules in training mode, not found yet
  const ModuleModes evaluation_;
  std::vector<std::string> causes_;
};

GRADACCUM_INLINE AccumulationReport compare_gradients(torch::nn::Module& model, const SplitBatch& batch,
                                                      const VerifyAccumulationOptions& options) {
  TORCH_CHECK(options.steps >= 2, "verify_accumulation: steps must be >= 2, got ", options.steps);
  TORCH_CHECK(options.tolerance.value_or(0) >= 0, "verify_accumulation: tolerance must be >= 0, got ",
              options.tolerance.value_or(0));
  const at::AutoGradMode with_gradients(true);
  VerifyPasses passes(model, batch, options);
  const auto& modes = passes.model.modes();
  auto mean = passes.accumulated(modes);  // first: the whole batch may leave a state in a module's members
  const auto whole = passes.gradients_of(SplitBatch::whole, modes);
  const auto errors = passes.errors(mean, whole);
  AccumulationReport report;
  report.steps = options.steps;
  report.tolerance = passes.tolerance;
  for (std::size_t i = 0; i < errors.size(); ++i) report.parameters.push_back({passes.names[i], errors[i]});
  report.causes = CauseSearch(passes).run(std::move(mean), whole, report.worst() <= report.tolerance);
  return report;
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE double AccumulationReport::worst() const {
  double worst = 0;
  for (auto& parameter : parameters) worst = std::max(worst, parameter.relative_error);
  return worst;
}

GRADACCUM_INLINE std::string to_string(const AccumulationReport& report) {
  constexpr std::size_t most = 5;
  auto parameters = report.parameters;
  std::ranges::stable_sort(parameters, std::greater<>(), &AccumulationReport::Parameter::relative_error);
  const bool equal = report.worst() <= report.tolerance;
  const auto* verdict = report.exact() ? "equal" : equal ? "equal, but" : "NOT EQUAL";
  std::string text = std::to_string(report.steps) + " micro-batches and one batch: " + verdict + " (tolerance " +
                     detail::scientific(report.tolerance) + ")\n";
  text += "  relative error  parameter\n";
  for (std::size_t i = 0; i < std::min(most, parameters.size()); ++i)
    text += "  " + detail::scientific(parameters[i].relative_error) + "         " + parameters[i].name + '\n';
  if (parameters.size() > most)
    text += "  and " + std::to_string(parameters.size() - most) + " more with smaller errors\n";
  for (auto& cause : report.causes) text += "  * " + cause + '\n';
  return text;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report) {
  return stream << to_string(report);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
