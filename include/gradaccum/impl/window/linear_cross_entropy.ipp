// SPDX-License-Identifier: Apache-2.0
// Implements the cross entropy of a linear layer, whose logits exist for some tokens at a time.
#pragma once

#include <gradaccum/linear_cross_entropy.hpp>

#include <gradaccum/detail/window/grad_ready_hooks.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Settings of one call, which backward needs again.
struct LinearCrossEntropy final : torch::CustomClassHolder {
  std::int64_t ignore_index = 0, tokens_at_once = 1;
  double label_smoothing = 0, z_loss = 0;
  at::ScalarType product_dtype = at::kFloat;
  at::Tensor weights = {};              // of the tokens
  bool gradients_in_forward = false;    // in one pass with the losses
  std::array<at::Tensor, 3> made = {};  // these gradients: of hidden, weight and bias
};

/// Returns the dtype in which `linear` multiplies.
GRADACCUM_INLINE at::ScalarType dtype_of_products(const at::Tensor& weight) {
  const auto device = weight.device().type();
  const bool is_cast = weight.scalar_type() != at::kDouble && at::autocast::is_autocast_available(device) &&
                       at::autocast::is_autocast_enabled(device);
  return is_cast ? at::autocast::get_autocast_dtype(device) : weight.scalar_type();
}

/// Adds `gradient^T hidden`, [classes, width], to `sum`. Products in 16 bits are made for some classes at a time.
GRADACCUM_INLINE void add_product(const at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& hidden) {
  if (sum.dtype() == hidden.dtype()) {
    sum.addmm_(gradient.t(), hidden);
    return;
  }
  constexpr std::int64_t classes_at_once = 4096;
  for (std::int64_t from = 0; from < sum.size(0); from += classes_at_once) {
    const auto count = std::min(classes_at_once, sum.size(0) - from);
    sum.narrow(0, from, count).add_(at::mm(gradient.narrow(1, from, count).t(), hidden));
  }
}

/// Returns the share of each token in the mean, 0 if it is ignored. Divides by a tensor, not by the host's `items`,
/// which a captured or compiled step would keep.
GRADACCUM_INLINE at::Tensor shares_of(const at::Tensor& counted, const LinearCrossEntropy& of, at::ScalarType dtype) {
  const auto weights = of.weights.defined() ? at::where(counted, of.weights.to(dtype), 0) : counted.to(dtype);
  const auto sum = weights.sum();
  return weights / at::where(sum.ne(0), sum, 1);
}

/// Losses and gradients of all tokens, computed part by part in one pass, or in two.
class LinearCrossEntropyPass {
 public:
  LinearCrossEntropyPass(const LinearCrossEntropy& of, const at::Tensor& hidden, const at::Tensor& weight,
                         const at::Tensor& bias, const at::Tensor& classes)
      : of_(of),
        weight_(weight.to(of.product_dtype)),
        hidden_(hidden.to(of.product_dtype)),
        bias_(bias),
        classes_(classes) {
    product_ = at::empty({std::min(of.tokens_at_once, hidden.size(0)), weight.size(0)}, weight_.options());
    precise_ = weight_.element_size() < 4 ? at::empty_like(product_, at::kFloat) : product_;
  }

  at::Tensor losses = {}, highest = {}, sums = {};  ///< of each token: loss without z-loss, and two numbers of softmax
  at::Tensor to_hidden = {}, to_weight = {}, to_bias = {};  ///< gradients, of those that are defined

  /// Makes memory for the losses, which `run` then computes.
  void want_losses(at::ScalarType dtype) {
    losses = at::empty(classes_.sizes(), weight_.options().dtype(dtype));
    highest = at::empty_like(losses), sums = at::empty_like(losses);
  }
  /// Makes memory for gradients, which `run` then adds to, and for which each token's loss counts by its factor.
  void want_gradients(const at::Tensor& factors, bool of_hidden, const at::Tensor& weight_sum,
                      const at::Tensor& bias_sum, bool adds_in_place = false) {
    factors_ = factors, adds_in_place_ = adds_in_place;
    if (of_hidden) to_hidden = at::empty_like(hidden_);
    to_weight = weight_sum, to_bias = bias_sum;
  }

  void run() {
    const auto tokens = classes_.size(0);
    for (std::int64_t from = 0; from < tokens; from += of_.tokens_at_once) {
      const auto count = std::min(of_.tokens_at_once, tokens - from);
      const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, from, count); };
      const auto logits = logits_of(part(hidden_));
      auto most = part(highest), sum = part(sums);
      if (losses.defined()) at::amax_out(most, logits, 1);
      if (losses.defined()) part(losses).copy_(most - wanted(logits, part(classes_)));
      logits.sub_(most.unsqueeze(1)).exp_();
      if (losses.defined()) part(losses).add_(at::sum_out(sum, logits, 1).log());
      if (factors_.defined()) add_gradients(logits, most.unsqueeze(1), sum.unsqueeze(1), part);
    }
  }

 private:
  /// Returns the logits of one part in float32 or float64, to change, in the memory of the part before.
  at::Tensor logits_of(const at::Tensor& hidden) {
    auto product = product_.narrow(0, 0, hidden.size(0));
    at::mm_out(product, hidden, weight_.t());
    const auto logits = product_.is_same(precise_) ? product : precise_.narrow(0, 0, hidden.size(0)).copy_(product);
    return bias_.defined() ? logits.add_(bias_) : logits;
  }
  /// Returns the changed logits in the dtype of products.
  at::Tensor rounded(const at::Tensor& logits) const {
    return product_.is_same(precise_) ? logits : product_.narrow(0, 0, logits.size(0)).copy_(logits);
  }

  /// Returns the logit of each token's class, mixed with the mean of all by label smoothing.
  at::Tensor wanted(const at::Tensor& logits, const at::Tensor& classes) const {
    const auto right = logits.gather(1, classes.unsqueeze(1)).squeeze(1);
    if (of_.label_smoothing == 0) return right;
    return (1 - of_.label_smoothing) * right + of_.label_smoothing * logits.mean(1);
  }

  /// Turns `exp(logits - most)` into the gradient of the logits, and multiplies.
  void add_gradients(const at::Tensor& logits, const at::Tensor& most, const at::Tensor& sum, const auto& part) {
    const auto factor = part(factors_).unsqueeze(1);
    logits.mul_(of_.z_loss > 0 ? factor * (1 + 2 * of_.z_loss * (sum.log() + most)) / sum : factor / sum);
    if (of_.label_smoothing > 0) logits.sub_(factor, of_.label_smoothing / static_cast<double>(logits.size(1)));
    logits.scatter_add_(1, part(classes_).unsqueeze(1), factor * (of_.label_smoothing - 1));
    if (to_bias.defined()) to_bias.add_(logits.sum(0));
    const auto gradient = rounded(logits);
    if (to_weight.defined()) {
      const auto lock = adds_in_place_ ? std::unique_lock(adding_in_place()) : std::unique_lock<std::mutex>();
      add_product(to_weight, gradient, part(hidden_));
    }
    if (!to_hidden.defined()) return;
    auto of_part = part(to_hidden);
    at::mm_out(of_part, gradient, weight_);
  }

  const LinearCrossEntropy& of_;
  at::Tensor weight_, hidden_;  // in the dtype of products
  at::Tensor bias_, classes_, factors_;
  at::Tensor product_, precise_;  // memory of a part's logits: in that dtype, and in 32 bits or more
  bool adds_in_place_ = false;
};

class LinearCrossEntropyFunction : public torch::autograd::Function<LinearCrossEntropyFunction> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  /// Returns the mean and the losses of the tokens. `hidden`: [tokens, width]; `target`: [tokens].
  static Tensors forward(Context* context, const at::Tensor& hidden, const at::Tensor& weight,
                         const std::optional<at::Tensor>& given_bias, const at::Tensor& target,
                         const c10::intrusive_ptr<LinearCrossEntropy>& of) {
    const auto bias = given_bias.value_or(at::Tensor()), counted = target.ne(of->ignore_index);
    const auto classes = at::where(counted, target, 0);
    const auto dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto shares = shares_of(counted, *of, dtype);
    LinearCrossEntropyPass pass(*of, hidden, weight, bias, classes);
    pass.want_losses(dtype);
    if (of->gradients_in_forward)
      pass.want_gradients(shares, hidden.requires_grad(), zeros_for(weight.requires_grad(), weight, shares),
                          zeros_for(bias.defined() && bias.requires_grad(), bias, shares));
    pass.run();
    of->made = {pass.to_hidden, pass.to_weight, pass.to_bias};
    if (of->z_loss > 0) pass.losses.add_(pass.sums.log().add_(pass.highest).square_(), of->z_loss);
    pass.losses.masked_fill_(counted.logical_not(), 0);
    context->save_for_backward({hidden, weight, bias, classes, shares, pass.highest, pass.sums});
    context->saved_data["of"] = c10::IValue::make_capsule(of);
    context->mark_non_differentiable({pass.losses});
    return {pass.losses.mul(shares).sum(), pass.losses};
  }

  static Tensors backward(Context* context, const Tensors& seeds) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear_cross_entropy: create_graph must be false, because it has no double backward; for that, "
                "compute the cross entropy of all logits");
    if (!seeds[0].defined()) return Tensors(5);
    const auto of = c10::static_intrusive_pointer_cast<LinearCrossEntropy>(context->saved_data["of"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto &hidden = saved[0], &weight = saved[1], &bias = saved[2];
    auto gradients = std::exchange(of->made, {});  // a second backward computes them
    if (std::ranges::any_of(gradients, [](auto& gradient) { return gradient.defined(); })) {
      for (auto& gradient : gradients)
        if (gradient.defined()) gradient.mul_(seeds[0]);
    } else {
      gradients = computed(
          *of, saved, seeds[0],
          {context->needs_input_grad(0), context->needs_input_grad(1), bias.defined() && context->needs_input_grad(2)});
    }
    const auto as = [](const at::Tensor& gradient, const at::Tensor& parameter) {
      return gradient.defined() ? gradient.to(parameter.scalar_type()) : gradient;
    };
    return {as(gradients[0], hidden), as(gradients[1], weight), as(gradients[2], bias), {}, {}};
  }

 private:
  static at::Tensor zeros_for(bool needed, const at::Tensor& parameter, const at::Tensor& like) {
    return needed ? at::zeros(parameter.sizes(), like.options()) : at::Tensor();
  }

  /// Computes gradients from the saved tensors. Adds the weight's to its existing gradient if nothing needs it whole.
  static std::array<at::Tensor, 3> computed(const LinearCrossEntropy& of, const Tensors& saved, const at::Tensor& seed,
                                            std::array<bool, 3> needed) {
    const auto &hidden = saved[0], &weight = saved[1], &bias = saved[2], &classes = saved[3];
    const auto factors = saved[4] * seed;
    const bool in_place = needed[1] && weight.is_leaf() && is_added_in_place(weight, factors);
    LinearCrossEntropyPass pass(of, hidden, weight, bias, classes);
    pass.highest = saved[5], pass.sums = saved[6];
    pass.want_gradients(factors, needed[0], in_place ? weight.grad() : zeros_for(needed[1], weight, factors),
                        zeros_for(needed[2], bias, factors), in_place);
    pass.run();
    if (in_place) say_added(weight);
    return {pass.to_hidden, in_place ? at::Tensor() : pass.to_weight, pass.to_bias};
  }
};

GRADACCUM_INLINE void check_arguments(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                      const LinearCrossEntropyOptions& options) {
  TORCH_CHECK(hidden.dim() > 0 && weight.dim() == 2 && hidden.size(-1) == weight.size(1) && weight.numel() > 0,
              "linear_cross_entropy: hidden must be [..., width] and weight [classes, width], got ", hidden.sizes(),
              " and ", weight.sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong &&
                  target.sizes() == hidden.sizes().slice(0, static_cast<std::size_t>(hidden.dim() - 1)),
              "linear_cross_entropy: target must be int64 in the shape of hidden without its width, ", hidden.sizes(),
              ", got ", target.scalar_type(), " ", target.sizes());
  if (target.is_cpu() && !torch::jit::tracer::isTracing()) {  // save_step allows no values on the host
    const auto outside =
        target.lt(0).logical_or_(target.ge(weight.size(0))).logical_and_(target.ne(options.ignore_index));
    TORCH_CHECK(!outside.any().item<bool>(), "linear_cross_entropy: targets must be at least 0 and less than the ",
                weight.size(0), " classes, or the ignore_index ", options.ignore_index, ", got ",
                target.masked_select(outside)[0].item<std::int64_t>());
  }
  const auto& [bias, weights, ignore_index, label_smoothing, z_loss, memory_budget, items] = options;
  TORCH_CHECK(!bias.defined() || bias.sizes() == weight.sizes().slice(0, 1),
              "linear_cross_entropy: bias must be [classes], got ", bias.sizes(), " for ", weight.size(0), " classes");
  TORCH_CHECK(!weights.defined() || (weights.sizes() == target.sizes() && !weights.requires_grad()),
              "linear_cross_entropy: weights must have the shape of target, ", target.sizes(),
              ", and not require gradients, got ", weights.sizes());
  if (weights.defined() && weights.is_cpu() && !torch::jit::tracer::isTracing())
    TORCH_CHECK(!weights.lt(0).any().item<bool>(), "linear_cross_entropy: weights must be >= 0, got ",
                weights.min().item<double>());
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1,
              "linear_cross_entropy: label_smoothing must be in [0, 1], got ", label_smoothing);
  TORCH_CHECK(z_loss >= 0 && std::isfinite(z_loss), "linear_cross_entropy: z_loss must be finite and >= 0, got ",
              z_loss);
  TORCH_CHECK(memory_budget > 0, "linear_cross_entropy: memory_budget must be > 0 bytes, got ", memory_budget);
  TORCH_CHECK(!items || (*items >= 0 && std::isfinite(*items)),
              "linear_cross_entropy: items must be finite and >= 0, got ", items.value_or(0));
}

/// Returns the sum of the counted tokens' weights. Waits for a device.
GRADACCUM_INLINE double count_items(const at::Tensor& counted, const at::Tensor& weights) {
  return (weights.defined() ? at::where(counted, weights, 0).sum() : counted.sum()).item<double>();
}

/// Returns true if forward computes the gradients, which saves the second computation of the logits: if that needs no
/// second table besides the weight's gradient, and if multiplying by backward's seed later rounds no 16-bit gradients.
GRADACCUM_INLINE bool are_made_in_forward(const at::Tensor& hidden, const at::Tensor& weight,
                                          at::ScalarType product_dtype) {
  if (!at::GradMode::is_enabled() || c10::elementSize(product_dtype) < 4) return false;
  if (!weight.requires_grad()) return hidden.requires_grad();
  return !weight.is_leaf() || !weight.grad().defined();
}

/// Returns the number of tokens whose logits fit into the budget, so that all parts are almost equally large.
GRADACCUM_INLINE std::int64_t tokens_at_once(std::int64_t tokens, std::int64_t classes, at::ScalarType product_dtype,
                                             std::int64_t budget) {
  const auto of_product = static_cast<std::int64_t>(c10::elementSize(product_dtype));
  const auto of_logit = of_product < 4 ? of_product + 4 : of_product;
  const auto fitting = std::max<std::int64_t>(budget / (classes * of_logit), 1);
  const auto parts = std::max<std::int64_t>((tokens + fitting - 1) / fitting, 1);
  return std::max<std::int64_t>((tokens + parts - 1) / parts, 1);
}

/// Computes the mean and the losses of the tokens, in parts for the budget. `dtype`: of the products.
GRADACCUM_INLINE std::tuple<at::Tensor, at::Tensor> mean_and_losses(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& target,
    const std::optional<at::Tensor>& weights, std::int64_t ignore_index, double label_smoothing, double z_loss,
    std::int64_t memory_budget, at::ScalarType dtype) {
  auto of = c10::make_intrusive<LinearCrossEntropy>();
  of->ignore_index = ignore_index;
  of->label_smoothing = label_smoothing;
  of->z_loss = z_loss;
  of->product_dtype = dtype;
  of->tokens_at_once = tokens_at_once(target.numel(), weight.size(0), dtype, memory_budget);
  if (weights) of->weights = weights->reshape({-1});
  of->gradients_in_forward = are_made_in_forward(hidden, weight, dtype);
  const auto results =
      LinearCrossEntropyFunction::apply(hidden.reshape({-1, hidden.size(-1)}), weight, bias, target.reshape({-1}), of);
  return {results[0], results[1].view_as(target)};
}

/// Returns `mean_and_losses` as an operation of LibTorch, which save_step records whole. gradaccum-compile-step has the
/// same operation.
GRADACCUM_INLINE auto mean_and_losses_as_operation() {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const c10::OperatorName name("gradaccum::linear_cross_entropy", "");
  if (!c10::Dispatcher::singleton().findSchema(name)) {  // another library of the process may have registered it
    static torch::Library library(torch::Library::FRAGMENT, "gradaccum", std::nullopt, __FILE__, __LINE__);
    library.def(
        "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? weights, "
        "int ignore_index, float label_smoothing, float z_loss, int memory_budget, ScalarType dtype) "
        "-> (Tensor, Tensor)",
        &mean_and_losses);
  }
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("gradaccum::linear_cross_entropy", "")
      .typed<decltype(mean_and_losses)>();
}

}  // namespace detail

GRADACCUM_INLINE Loss linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                           const LinearCrossEntropyOptions& options) {
  detail::check_arguments(hidden, weight, target, options);
  const auto items =
      options.items ? *options.items : detail::count_items(target.ne(options.ignore_index), options.weights);
  const auto if_defined = [](const at::Tensor& of) { return of.defined() ? std::optional(of) : std::nullopt; };
  const auto compute = [&](const auto& function) {
    return function(hidden, weight, if_defined(options.bias), target, if_defined(options.weights), options.ignore_index,
                    options.label_smoothing, options.z_loss, options.memory_budget, detail::dtype_of_products(weight));
  };
  auto [mean, losses] =
      torch::jit::tracer::isTracing()
          ? compute([](const auto&... all) { return detail::mean_and_losses_as_operation().call(all...); })
          : compute(detail::mean_and_losses);
  return Loss{std::move(mean), items}.with(std::move(losses), target);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
