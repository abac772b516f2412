// SPDX-License-Identifier: Apache-2.0
// Runs steps on the CPU: Adafactor in a few passes over each tensor, the others in one loop over all.
#pragma once

#include <gradaccum/detail/optimizers/cpu_steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/row_steps.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

template <class Step>
void step_on_cpu(const std::vector<Step>& steps, double multiplier) {
  constexpr bool by_blocks = std::is_same_v<Step, Adam8bitStep>;
  KernelLoop<typename Step::Operand> loop(steps.size(), by_blocks ? eight_bit_block : ElementLoop::cache_line);
  typename Step::Operand operand{};
  const Step* last = nullptr;
  for (auto& step : steps) {
    if (!step.parameter.is_cpu()) continue;
    if (!last || !(step.settings == last->settings)) operand.numbers = numbers_of(step.settings, multiplier);
    last = &step;
    for_each_state(step, operand, [](auto*& place, const at::Tensor* state) {
      place = static_cast<std::remove_reference_t<decltype(place)>>(state ? state->mutable_data_ptr() : nullptr);
    });
    if (step.rows)
      step_rows(step, operand);
    else
      loop.add(operand, kernel_of<Step::cpu_kernel>(), step.parameter, step.gradient, step.rounding_key);
  }
  loop.run();
}

/// A range of whole rows, or of elements of a vector. May span several small matrices.
struct AdafactorPiece {
  std::int64_t from, to, part;
  double parameter_squares = 0, update_squares = 0;
};

/// A parameter on the CPU, and its step's memory. Its pieces do not depend on the number of threads, and their sums are
/// added in order, so neither does the result.
class AdafactorTensor {
 public:
  AdafactorTensor(const AdafactorStep& step, double multiplier)
      : settings_(step.settings), owner_(step.parameter), parameter_(row_major(owner_, owner_.scalar_type())) {
    gradient_ = in_reach(step.gradient, owner_, multiplier);
    gradient_ = row_major(gradient_, gradient_type(owner_, gradient_));
    operand_.numbers = numbers_of(settings_, multiplier);
    operand_.parameter = parameter_.mutable_data_ptr();
    operand_.gradient = gradient_.const_data_ptr();
    operand_.exp_avg = step.exp_avg.defined() ? step.exp_avg.mutable_data_ptr() : nullptr;
    operand_.rounding_key = step.rounding_key.value_or(0);
    set_shape(step);
    cut();
    const bool narrow = !operand_.variance && operand_.columns < 8;
    const auto kernels_for = narrow ? narrow_adafactor_kernels : kernel_of<&Kernels::adafactor>();
    kernels_ = kernels_for(owner_.scalar_type(), gradient_.scalar_type(), step.rounding_key.has_value());
    extra_elements_ = (parameter_.is_same(owner_) ? 0 : elements()) +
                      (gradient_.is_same(step.gradient) ? 0 : elements()) + (factors_.defined() ? factors_.numel() : 0);
  }

  // The passes, in this order. Each must finish for the whole tensor before the next begins.
  void sum(AdafactorPiece& piece) const {
    const auto& o = operand_;
    if (settings_.scale_parameter)
      piece.parameter_squares = kernel_of<&Kernels::sum_of_squares>()(parameter_.scalar_type())(
          static_cast<const char*>(o.parameter) + piece.from * o.columns * parameter_.element_size(),
          (piece.to - piece.from) * o.columns);
    if (o.variance) {
      piece.update_squares = kernels_.vector_squares(o, piece.from, piece.to);
      return;
    }
    kernels_.sums(o, piece.from, piece.to, piece.part);
    if (o.parts > 1) return;
    for (auto matrix = piece.from / o.rows; matrix < piece.to / o.rows; ++matrix) make_factors(matrix);
    measure_update(piece);
  }
  void make_factors(std::int64_t matrix) const { kernels_.factors(operand_, matrix); }
  void measure_update(AdafactorPiece& piece) const {
    piece.update_squares = kernels_.update_squares(operand_, piece.from, piece.to);
  }
  void set_step_size() {
    AdafactorSums sums{static_cast<double>(elements()), 0, 0};
    for (auto& piece : pieces_) {
      sums.parameter_squares += piece.parameter_squares;
      sums.update_squares += piece.update_squares;
    }
    detail::set_step_size(operand_.numbers, settings_, sums);
  }
  void move(const AdafactorPiece& piece) const { kernels_.move(operand_, piece.from, piece.to); }
  void write_back() const { detail::write_back(owner_, parameter_); }

  std::vector<AdafactorPiece>& pieces() { return pieces_; }
  /// The number of matrices that are split into pieces. `sum` makes the factors and measures the update of all others.
  std::int64_t cut_matrices() const { return operand_.parts > 1 ? operand_.matrices : 0; }
  std::int64_t elements() const { return parameter_.numel(); }
  std::int64_t extra_elements() const { return extra_elements_; }  ///< allocated in addition to the parameter's

 private:
  void set_shape(const AdafactorStep& step) {
    auto& o = operand_;
    if (step.variance.defined()) {
      o.variance = step.variance.mutable_data_ptr();
      o.rows = elements();
      o.matrices = o.columns = o.parts = 1;
      return;
    }
    o.rows = owner_.size(-2);
    o.columns = owner_.size(-1);
    o.matrices = elements() / (o.rows * o.columns);
    o.row_var = step.row_var.mutable_data_ptr();
    o.col_var = step.col_var.mutable_data_ptr();
    // Many rows, as each part has its own column sums; but not too many, since these have the state's dtype.
    constexpr std::int64_t least_rows = 1 << 7, most_rows = 1 << 12, most_parts = 16;
    o.parts = std::clamp<std::int64_t>(o.rows / least_rows, 1, std::max(most_parts, o.rows / most_rows));
    factors_ = at::zeros({o.matrices * (o.rows + o.parts * o.columns)}, step.row_var.options());
    o.row_factors = factors_.mutable_data_ptr();
    o.column_factors = static_cast<char*>(o.row_factors) + o.matrices * o.rows * factors_.element_size();
  }

  void cut() {
    const auto& o = operand_;
    const auto all_rows = o.matrices * o.rows;
    if (o.parts > 1) {
      for (std::int64_t matrix = 0; matrix < o.matrices; ++matrix)
        for (std::int64_t part = 0; part < o.parts; ++part)
          pieces_.push_back(
              {matrix * o.rows + part * o.rows / o.parts, matrix * o.rows + (part + 1) * o.rows / o.parts, part});
      return;
    }
    constexpr std::int64_t piece = 1 << 14;  // elements
    const auto unit = o.variance ? 1 : o.rows;
    const auto rows = std::max<std::int64_t>(1, piece / (unit * o.columns)) * unit;
    for (std::int64_t from = 0; from < all_rows; from += rows)
      pieces_.push_back({from, std::min(from + rows, all_rows), 0});
  }

  AdafactorSettings settings_;
  at::Tensor owner_, parameter_, gradient_, factors_;
  AdafactorOperand operand_;
  AdafactorKernels kernels_;
  std::vector<AdafactorPiece> pieces_;
  std::int64_t extra_elements_ = 0;
};

/// Runs all passes over some tensors. `each(count, body)` calls `body(i)` for each i below `count`.
template <class Each>
void run_passes(const std::vector<AdafactorTensor*>& tensors, const Each& each) {
  std::vector<std::pair<AdafactorTensor*, AdafactorPiece*>> pieces, cut;
  std::vector<std::pair<AdafactorTensor*, std::int64_t>> matrices;
  for (auto* tensor : tensors) {
    for (auto& piece : tensor->pieces()) pieces.emplace_back(tensor, &piece);
    for (std::int64_t i = 0; i < tensor->cut_matrices(); ++i) matrices.emplace_back(tensor, i);
    if (tensor->cut_matrices() > 0)
      for (auto& piece : tensor->pieces()) cut.emplace_back(tensor, &piece);
  }
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->sum(*pieces[i].second); });
  each(matrices.size(), [&](std::size_t i) { matrices[i].first->make_factors(matrices[i].second); });
  each(cut.size(), [&](std::size_t i) { cut[i].first->measure_update(*cut[i].second); });
  for (auto* tensor : tensors) tensor->set_step_size();
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->move(*pieces[i].second); });
}

/// Gives each small tensor to a single thread, whose cache keeps the gradient from pass to pass and which never waits
/// for others. Splits tensors that are too large to balance the threads.
GRADACCUM_INLINE void run_passes(std::vector<AdafactorTensor>& tensors) {
  const auto parallel = [](std::size_t count, const auto& body) {
    if (count == 1) return body(0);  // starting threads would take longer
    if (count > 1)
      parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) { body(static_cast<std::size_t>(i)); });
  };
  const auto serial = [](std::size_t count, const auto& body) {
    for (std::size_t i = 0; i < count; ++i) body(i);
  };
  std::vector<AdafactorTensor*> whole, large;
  std::int64_t elements = 0;
  for (auto& tensor : tensors) elements += tensor.elements();
  const auto threads = at::get_num_threads();
  for (auto& tensor : tensors) (2 * threads * tensor.elements() <= elements ? whole : large).push_back(&tensor);
  std::stable_sort(whole.begin(), whole.end(), [](auto* a, auto* b) { return a->elements() > b->elements(); });
  const auto stride = static_cast<std::size_t>(threads);
  parallel(std::min(stride, whole.size()), [&](std::size_t first) {
    for (auto i = first; i < whole.size(); i += stride) run_passes({whole[i]}, serial);
  });
  run_passes(large, parallel);
  for (auto& tensor : tensors) tensor.write_back();
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier) {
  std::vector<AdafactorTensor> tensors;
  std::int64_t extra = 0;
  for (auto& step : steps) {
    if (!step.parameter.is_cpu() || step.parameter.numel() == 0) continue;
    tensors.emplace_back(step, multiplier);
    extra += tensors.back().extra_elements();
    if (extra <= most_copied) continue;
    run_passes(tensors);
    tensors.clear();
    extra = 0;
  }
  run_passes(tensors);
}

#ifdef GRADACCUM_COMPILED
template void step_on_cpu(const std::vector<AdamStep>&, double);
template void step_on_cpu(const std::vector<SgdStep>&, double);
template void step_on_cpu(const std::vector<Adam8bitStep>&, double);
#endif

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
