// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/passes.hpp>
#include <gradaccum/verify_accumulation.hpp>

#include <gradaccum/detail/window/open_window.hpp>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

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

namespace gradaccum {

GRADACCUM_INLINE double AccumulationReport::worst() const {
  double worst = 0;
  for (auto& parameter : parameters) worst = std::max(worst, parameter.relative_error);
  return worst;
}

GRADACCUM_INLINE std::string to_string(const AccumulationReport& report) {
  constexpr std::size_t most = 5;
  auto parameters = report.parameters;
  std::stable_sort(parameters.begin(), parameters.end(),
                   [](auto& a, auto& b) { return a.relative_error > b.relative_error; });
  const bool equal = report.worst() <= report.tolerance;
  const auto* verdict = report.exact() ? "equal" : equal ? "equal, but" : "NOT EQUAL";
  std::string text = std::to_string(report.steps) + " micro-batches and one batch: " + verdict + " (tolerance " +
                     detail::scientific(report.tolerance) + ")\n";
  text += "  relative error  parameter\n";
  for (std::size_t i = 0; i < std::min(most, parameters.size()); ++i)
    text += "  " + detail::scientific(parameters[i].relative_error) + "         " + parameters[i].name + '\n';
  if (parameters.size() > most)
    text += "  and " + std::to_string(parameters.size() - most) + " more, all of them nearer\n";
  for (auto& cause : report.causes) text += "  * " + cause + '\n';
  return text;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const AccumulationReport& report) {
  return stream << to_string(report);
}

GRADACCUM_INLINE AccumulationReport detail::compare_gradients(torch::nn::Module& model, const SplitBatch& batch,
                                                              const VerifyAccumulationOptions& options) {
  TORCH_CHECK(options.steps >= 2, "verify_accumulation: steps must be >= 2, got ", options.steps);
  TORCH_CHECK(options.tolerance.value_or(0) >= 0, "verify_accumulation: tolerance must be >= 0, got ",
              options.tolerance.value_or(0));
  const auto parts = batch.split(options.steps);
  TORCH_CHECK(static_cast<std::int64_t>(parts) == options.steps,
              "verify_accumulation: split must return steps = ", options.steps, " micro-batches, got ", parts);
  std::vector<std::int64_t> rows;
  for (std::size_t part = 0; part < parts; ++part) rows.push_back(batch.rows(part));

  at::AutoGradMode with_gradients(true);
  VerifyPasses passes(model, batch.loss, std::move(rows), options.tolerance);
  const auto as_it_is = passes.model().modes();
  const auto whole = passes.gradients_of(SplitBatch::whole, as_it_is);
  const auto errors = passes.errors(passes.accumulated(as_it_is), whole);
  AccumulationReport report;
  report.steps = static_cast<std::int64_t>(passes.rows().size());
  report.tolerance = passes.tolerance();
  for (std::size_t i = 0; i < errors.size(); ++i) report.parameters.push_back({passes.names()[i], errors[i]});
  report.causes = causes_of_difference(passes, whole, report.worst() <= report.tolerance);
  return report;
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE ModelGuard::ModelGuard(torch::nn::Module& model) : parameters_(model.parameters()) {
  at::NoGradGuard no_grad;
  list("", model);
  for (auto& parameter : parameters_) keep(parameter);
  for (auto& buffer : model.buffers()) keep(buffer);
  std::vector<at::Device> devices{at::kCPU};
  for (auto& tensor : tensors_)
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) devices.push_back(tensor.device());
  for (auto device : devices) generators_.push_back(at::globalContext().defaultGenerator(device));
  random_state_ = random_state();
  for (auto& parameter : parameters_) gradients_.push_back(parameter.grad());
}

GRADACCUM_INLINE ModelGuard::~ModelGuard() {
  try {
    rewind(modes());
    for (std::size_t i = 0; i < gradients_.size(); ++i) parameters_[i].mutable_grad() = gradients_[i];
  } catch (...) {  // from a user's train(), or a lost device; a destructor must not throw
  }
}

GRADACCUM_INLINE void ModelGuard::keep(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  tensors_.push_back(tensor);
  values_.push_back(tensor.detach().clone());
}

/// Lists a module and its submodules. `named_modules` does not work for a model on the stack, without a shared_ptr.
GRADACCUM_INLINE void ModelGuard::list(const std::string& name, torch::nn::Module& module) {
  const auto i = parts_.size();
  parts_.push_back({name, &module, 0, module.is_training()});
  for (auto& child : module.named_children())
    list(name.empty() ? child.key() : name + '.' + child.key(), *child.value());
  parts_[i].end = parts_.size();
}

GRADACCUM_INLINE ModelGuard::Modes ModelGuard::modes() const {
  Modes modes;
  for (auto& part : parts_) modes.push_back(part.training);
  return modes;
}

GRADACCUM_INLINE void ModelGuard::rewind(const Modes& modes) {
  at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  for (std::size_t i = 0; i < tensors_.size(); ++i)  // by value: BatchNorm bypasses version counters
    if (!tensors_[i].equal(values_[i])) tensors_[i].copy_(values_[i]);
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard lock(generators_[i].mutex());
    generators_[i].set_state(random_state_[i]);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i)  // parents come first, and set their children
    if (parts_[i].module->is_training() != modes[i]) parts_[i].module->train(modes[i]);
}

GRADACCUM_INLINE void ModelGuard::use_other_random_numbers() {
  for (auto& generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + 1);
  }
}

GRADACCUM_INLINE std::vector<at::Tensor> ModelGuard::random_state() const {
  std::vector<at::Tensor> states;
  for (auto generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

GRADACCUM_INLINE bool ModelGuard::changed_buffers(const Part& part) const {
  for (auto& buffer : part.module->buffers(/*recurse=*/false))
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (tensors_[i].is_same(buffer) && !buffer.equal(values_[i])) return true;
  return false;
}

GRADACCUM_INLINE std::string name_of(const ModelGuard::Part& part) {
  auto type = type_name(*part.module);
  if (type.ends_with("Impl")) type.resize(type.size() - 4);
  return (part.name.empty() ? "the model itself" : part.name) + " (" + type + ")";
}

GRADACCUM_INLINE std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps) {
  TORCH_CHECK(rows >= steps, "verify_accumulation: the batch must have a row for each of ", steps,
              " micro-batches, got ", rows);
  std::vector<std::int64_t> parts;
  for (std::int64_t i = 0; i < steps; ++i) parts.push_back(rows / steps + (i < rows % steps));
  return parts;
}

/// The machine epsilon of the coarsest dtype.
GRADACCUM_INLINE double rounding_of(const std::vector<at::Tensor>& parameters) {
  double rounding = 0;
  for (auto& parameter : parameters) {
    const auto dtype = at::toRealValueType(parameter.scalar_type());
    rounding = std::max(rounding, dtype == at::kDouble  ? 0x1p-52
                                  : dtype == at::kFloat ? 0x1p-23
                                  : dtype == at::kHalf  ? 0x1p-10
                                                        : 0x1p-7);
  }
  return rounding;
}

/// The error that rounding may cause in a sum over a batch.
GRADACCUM_INLINE double default_tolerance(double rounding) {
  if (rounding < 1e-15) return 1e-10;
  if (rounding < 1e-6) return 1e-4;
  return 10 * rounding;
}

GRADACCUM_INLINE double largest(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.abs().max().to(at::kDouble).item<double>() : 0.0;
}

GRADACCUM_INLINE double largest(const GradientList& gradients) {
  double all = 0;
  for (auto& gradient : gradients) {
    const auto one = largest(gradient);
    if (!(one <= all)) all = one;  // also if NaN
    if (std::isnan(all)) return all;
  }
  return all;
}

GRADACCUM_INLINE double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return largest(a.defined() ? a : b);
  return largest(a.sub(b));
}

/// max|a - b| / max|b| for each parameter; infinity if one is not finite. If both are rounding noise next to the
/// model's largest gradient, divides by that one: the bias of a layer before a normalisation has a gradient of 0.
GRADACCUM_INLINE std::vector<double> relative_errors(const GradientList& a, const GradientList& b, double rounding) {
  const double all = largest(b), noise = std::min(0.1, 100 * rounding) * all;
  std::vector<double> errors;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double of_a = largest(a[i]), of_b = largest(b[i]), apart = largest_difference(a[i], b[i]);
    const double error = apart == 0 ? 0 : apart / (std::max(of_a, of_b) <= noise ? all : of_b);
    errors.push_back(std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
  }
  return errors;
}

GRADACCUM_INLINE VerifyPasses::VerifyPasses(torch::nn::Module& model, LossOf loss_of, std::vector<std::int64_t> rows,
                                            std::optional<double> tolerance)
    : guard_(model), loss_of_(std::move(loss_of)), rows_(std::move(rows)) {
  std::unordered_set<const void*> known;  // a shared parameter has several names
  for (auto& item : model.named_parameters()) {
    auto& parameter = item.value();
    if (!parameter.requires_grad() || !known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    names_.push_back(item.key());
    parameters_.push_back(parameter);
  }
  TORCH_CHECK(!parameters_.empty(), "verify_accumulation: a parameter of the model must require grad, but none does");
  tolerance_ = tolerance.value_or(default_tolerance(rounding_of(parameters_)));
}

GRADACCUM_INLINE std::vector<double> VerifyPasses::errors(const GradientList& a, const GradientList& b) const {
  return relative_errors(a, b, rounding_of(parameters_));
}

GRADACCUM_INLINE double VerifyPasses::error(const GradientList& a, const GradientList& b) const {
  const auto all = errors(a, b);
  return *std::max_element(all.begin(), all.end());
}

GRADACCUM_INLINE GradientList VerifyPasses::gradients_of(std::int64_t batch, const Modes& modes,
                                                         bool other_random_numbers) {
  guard_.rewind(modes);
  if (other_random_numbers) guard_.use_other_random_numbers();
  const auto loss = loss_of_(batch);
  loss.check();
  Window::check_weight(loss.items);
  if (loss.items > 0) loss.backward();
  return take();
}

/// Parameters without an optimizer.
struct NeverStepped {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  auto& param_groups() { return groups; }
  void step() {}
  void zero_grad() {}
};

GRADACCUM_INLINE GradientList VerifyPasses::accumulated(const Modes& modes, const std::vector<double>* shares) {
  guard_.rewind(modes);
  losses_.clear(), items_.clear();
  NeverStepped parameters{{torch::optim::OptimizerParamGroup(parameters_)}};
  OpenWindow window(std::make_unique<OptimizerOf<NeverStepped>>(parameters), static_cast<std::int64_t>(rows_.size()),
                    {});
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    auto loss = loss_of_(static_cast<std::int64_t>(i));
    loss.check();
    losses_.push_back(loss.mean.detach().to(at::kDouble).item<double>());
    items_.push_back(loss.items);
    if (shares) loss.items = (*shares)[i];
    window.backward(std::move(loss), {});
    window.complete_micro_batch();
  }
  Gradients mean(window.closing());
  if (shares) mean.factor().multiply(mean.items());  // a sum rather than a mean
  if (window.has_weight()) mean.apply();
  return take();
}

GRADACCUM_INLINE void VerifyPasses::forward(const Modes& modes) {
  at::NoGradGuard no_grad;
  guard_.rewind(modes);
  loss_of_(0);
}

GRADACCUM_INLINE GradientList VerifyPasses::take() {
  GradientList taken;
  for (auto& parameter : parameters_) {
    auto& gradient = taken.emplace_back(std::move(parameter.mutable_grad()));
    parameter.mutable_grad().reset();
    if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  }
  return taken;
}

/// The share of each number in their sum.
template <class Number>
std::vector<double> shares_of(const std::vector<Number>& numbers) {
  const double all = std::accumulate(numbers.begin(), numbers.end(), 0.0);
  std::vector<double> shares;
  for (auto number : numbers) shares.push_back(all > 0 ? static_cast<double>(number) / all : 0);
  return shares;
}

/// Some elements of each gradient as one float64 vector on the CPU, enough to solve for a few unknowns.
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

/// Finds the share of each micro-batch's gradient in the whole batch's by least squares, as a gradient has more
/// elements than there are micro-batches. Returns nothing unless the shares add up to 1, as those of a mean do. The
/// share of a gradient that is not finite is 0.
GRADACCUM_INLINE std::optional<std::vector<double>> solve_shares(VerifyPasses& passes, const ModelGuard::Modes& modes,
                                                                 const GradientList& whole) {
  const auto wanted = sample_of(whole, whole);
  const auto count = static_cast<std::int64_t>(passes.rows().size());
  std::vector<at::Tensor> columns, finite;
  for (std::int64_t i = 0; i < count; ++i) {
    auto column = sample_of(passes.gradients_of(i, modes), whole);
    finite.push_back(column.isfinite().all());
    columns.push_back(finite.back().item<bool>() ? column : at::zeros_like(column));
  }
  const auto found = std::get<0>(at::linalg_lstsq(at::stack(columns, 1), wanted.unsqueeze(1), {}, "gelsd"));
  // Sets shares of zero columns to exactly 0: solved ones may be close to 0, and that times NaN is NaN.
  const auto clamped = found.flatten().clamp_min(0).mul(at::stack(finite)).contiguous();
  if (std::abs(clamped.sum().item<double>() - 1) > 0.05) return std::nullopt;
  return std::vector<double>(clamped.data_ptr<double>(), clamped.data_ptr<double>() + count);
}

/// Finds modules that treat micro-batches differently from one batch in training mode.
class ModuleSearch {
 public:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  explicit ModuleSearch(VerifyPasses& passes)
      : passes_(passes), parts_(passes.model().parts()), candidates_(passes.model().modes()) {}

  /// Returns sentences that name the modules. `random`: random numbers matter. `shares`: weights by which the
  /// micro-batches equal the whole batch in evaluation mode; null if there are none.
  std::vector<std::string> run(bool random, const Shares* shares) {
    const auto draw = random ? that_draw() : Parts();
    const auto statistics = with_statistics(shares);
    name(draw, sentences::draws);
    name(statistics, sentences::statistics);
    if (!shares) return sentences_;
    Parts others;
    descend(
        0, [&](const Modes& modes) { return passes_.unequal(modes, *shares); }, others);
    name(others, sentences::over_the_batch);
    return sentences_;
  }

 private:
  using Parts = std::set<std::size_t>;  // indices of modules

  /// Finds modules that leave another random state than a forward pass in evaluation mode.
  Parts that_draw() {
    const auto state_after = [&](const Modes& modes) {
      passes_.forward(modes);
      return passes_.model().random_state();
    };
    const auto quiet = state_after(only({}));
    Parts found;
    const auto draws = [&](const Modes& modes) {
      const auto state = state_after(modes);
      return !std::equal(state.begin(), state.end(), quiet.begin(), [](auto& a, auto& b) { return a.equal(b); });
    };
    descend(0, draws, found);
    return found;
  }

  /// Finds modules whose buffers a forward pass changes. With `shares`, keeps only classes that break the equality,
  /// which a counter in a buffer does not.
  Parts with_statistics(const Shares* shares) {
    passes_.forward(candidates_);
    std::map<std::string, Parts> by_class;
    for (std::size_t i = 0; i < parts_.size(); ++i)
      if (candidates_[i] && passes_.model().changed_buffers(parts_[i]))
        by_class[type_name(*parts_[i].module)].insert(i);
    Parts found;
    for (auto& [type, parts] : by_class)
      if (!shares || passes_.unequal(only(parts), *shares)) found.insert(parts.begin(), parts.end());
    return found;
  }

  /// Adds modules that pass the test alone. Skips a module's children if it fails the test together with them.
  template <class Test>
  void descend(std::size_t part, const Test& test, Parts& found) const {
    const auto end = parts_[part].end;
    Parts inside;
    for (auto i = part; i < end; ++i) inside.insert(i);
    const auto none = only({}), alone = only({part}), all = only(inside);
    if (all == none || !test(all)) return;
    if (alone == all || (alone != none && test(alone))) found.insert(part);
    for (auto child = part + 1; child < end; child = parts_[child].end) descend(child, test, found);
  }

  Modes only(const Parts& parts) const {
    Modes modes(parts_.size(), false);
    for (auto part : parts) modes[part] = candidates_[part];
    return modes;
  }

  void name(const Parts& parts, const char* what) {
    std::vector<std::string> names;
    for (auto part : parts) {
      names.push_back(name_of(parts_[part]));
      candidates_[part] = false;
    }
    if (!names.empty()) sentences_.push_back(listed(names, " and ") + ": " + what);
  }

  VerifyPasses& passes_;
  const std::vector<ModelGuard::Part>& parts_;
  Modes candidates_;  // modules in training mode, not found yet
  std::vector<std::string> sentences_;
};

class CauseSearch {
 public:
  explicit CauseSearch(VerifyPasses& passes)
      : passes_(passes), as_it_is_(passes.model().modes()), quiet_(as_it_is_.size(), false) {}

  std::vector<std::string> run(const GradientList& gradients, bool equal) {
    const double size = largest(gradients);
    if (!std::isfinite(size)) return {sentences::not_finite};
    if (size == 0) say(sentences::zero);
    const bool random = passes_.differ(whole(as_it_is_, /*other_random_numbers=*/true), gradients);
    if (random && passes_.differ(whole(as_it_is_), gradients)) return {sentences::not_a_function};
    if (equal && !random) return causes_;
    try {
      look_closer(random);
      if (causes_.empty()) say(sentences::no_module_alone);
    } catch (const c10::Error& error) {
      say(sentences::ended_early + std::string(error.what_without_backtrace()));
    } catch (const std::exception& error) {
      say(sentences::ended_early + std::string(error.what()));
    }
    return causes_;
  }

 private:
  using Modes = ModelGuard::Modes;
  using Shares = std::vector<double>;

  void look_closer(bool random) {
    const bool always_random = random && passes_.differ(whole(quiet_, /*other_random_numbers=*/true), whole(quiet_));
    if (always_random) say(sentences::always_random);
    const auto shares = always_random ? std::nullopt : shares_in_loss();
    for (auto& sentence : ModuleSearch(passes_).run(random, shares ? &*shares : nullptr)) say(sentence);
  }

  /// The shares of the micro-batches' gradients in the whole batch's, if there are any.
  std::optional<Shares> shares_in_loss() {
    const auto gradients = whole(quiet_);
    const auto as_returned = passes_.error(passes_.accumulated(quiet_), gradients);
    const auto items = shares_of(passes_.items()), rows = shares_of(passes_.rows());
    const auto fits = [&](const Shares& shares) {
      return !passes_.differ(passes_.accumulated(quiet_, shares), gradients);
    };
    if (as_returned <= passes_.tolerance()) return items;
    if (rows != items && fits(rows)) return say(sentences::rows(passes_.rows())), rows;
    const Shares sum(rows.size(), 1.0);
    if (fits(sum)) return say(sentences::sum(rows.size())), sum;
    if (sample_of(gradients, gradients).numel() <= static_cast<std::int64_t>(rows.size()))
      return say(sentences::too_few_parameters), std::nullopt;
    const auto solved = solve_shares(passes_, quiet_, gradients);
    if (solved && fits(*solved)) return say(sentences::items(*solved, passes_.losses())), solved;
    return say(sentences::coupling(as_returned)), std::nullopt;
  }

  void say(const std::string& sentence) { causes_.push_back(sentence); }
  GradientList whole(const Modes& modes, bool other_random_numbers = false) {
    return passes_.gradients_of(SplitBatch::whole, modes, other_random_numbers);
  }

  VerifyPasses& passes_;
  Modes as_it_is_, quiet_;
  std::vector<std::string> causes_;
};

GRADACCUM_INLINE std::vector<std::string> causes_of_difference(VerifyPasses& passes, const GradientList& whole,
                                                               bool equal) {
  return CauseSearch(passes).run(whole, equal);
}

GRADACCUM_INLINE std::string scientific(double value) {
  char text[16];
  std::snprintf(text, sizeof(text), "%.1e", value);
  return text;
}

namespace sentences {

GRADACCUM_INLINE std::string rows(const std::vector<std::int64_t>& rows) {
  return "the loss is a mean over rows, and the micro-batches have unequal ones (" + listed(rows) +
         "): return ga::Loss{mean, rows}";
}

GRADACCUM_INLINE std::string sum(std::size_t steps) {
  return "the loss is a sum, not a mean: the whole batch has " + std::to_string(steps) +
         " times the gradient of a micro-batch; divide it by its rows";
}

GRADACCUM_INLINE std::string items(std::vector<double> shares, const std::vector<double>& losses) {
  for (auto& share : shares) share = std::round(1000 * share) / 1000;
  std::string text = "the loss is a mean over items that the micro-batches have unequal shares of (" + listed(shares) +
                     "), as valid tokens are: return ga::Loss{mean, items}";
  for (std::size_t i = 0; i < losses.size(); ++i)
    if (!std::isfinite(losses[i]))
      return text + "; with 0 items where there are none: the loss of number " + std::to_string(i) + " is not finite";
  return text;
}

GRADACCUM_INLINE std::string coupling(double error) {
  std::string text =
      "no sum of the micro-batches' gradients is the whole batch's, in evaluation mode either: what a sample adds to "
      "the loss depends on the others, as in a contrastive loss or in a BatchNorm without running statistics";
  if (error > 0.05) return text;
  return text + "; or, as the error there is but " + scientific(error) +
         ", it is rounding (autocast, TF32): then a tolerance above it";
}

}  // namespace sentences
}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
