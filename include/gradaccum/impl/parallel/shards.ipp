// SPDX-License-Identifier: Apache-2.0
// Divides parameters among ranks, and lets an optimizer step this rank's pieces.
#pragma once

#include <gradaccum/detail/parallel/shards.hpp>

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/seen_tensor.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Calls `visit` with each optimizer and each of its parameters.
void for_each_parameter(const std::vector<torch::optim::Optimizer*>& optimizers, const auto& visit) {
  for (auto* const optimizer : optimizers)
    for (auto& group : optimizer->param_groups())
      for (auto& parameter : group.params()) visit(*optimizer, parameter);
}

GRADACCUM_INLINE Shards::Shards(std::vector<torch::optim::Optimizer*> optimizers, int rank, int world_size)
    : optimizers_(std::move(optimizers)), rank_(rank), world_size_(world_size) {
  const at::NoGradGuard no_grad;
  std::vector<bool> may_be_cut;
  for_each_parameter(optimizers_, [&](auto& optimizer, auto& parameter) {
    parameters_.push_back(parameter);
    may_be_cut.push_back(steps_by_elements(optimizer));
  });
  pieces_.resize(size());
  std::vector<std::size_t> largest_first(size());
  std::iota(largest_first.begin(), largest_first.end(), std::size_t{0});
  std::ranges::stable_sort(largest_first, std::greater(), [&](auto place) { return parameters_[place].nbytes(); });
  std::vector<std::int64_t> bytes_of_rank(static_cast<std::size_t>(world_size));
  for (auto place : largest_first) divide(place, may_be_cut[place], bytes_of_rank);
  for (std::size_t place = 0; place < size(); ++place) {
    const auto& parameter = parameters_[place];
    const auto piece = own_piece(place);
    if (piece.size() == parameter.numel())
      own_.push_back(parameter);
    else if (piece.size() > 0)
      own_.push_back(part(place, piece, parameter).set_requires_grad(parameter.requires_grad()));
    else
      own_.push_back(at::empty({0}, parameter.options()));
  }
}

GRADACCUM_INLINE void Shards::divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank) {
  const auto& parameter = parameters_[place];
  std::vector<std::size_t> ranks(bytes_of_rank.size());  // by their bytes, the least first
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  std::ranges::stable_sort(ranks, {}, [&](auto rank) { return bytes_of_rank[rank]; });
  auto& pieces = pieces_[place];
  if (may_be_cut && parameter.numel() / unit >= world_size_ && parameter.is_contiguous())
    pieces = cut(parameter.numel(), ranks);
  else
    pieces = {{static_cast<int>(ranks[0]), 0, parameter.numel()}};
  for (auto& piece : pieces)
    bytes_of_rank[static_cast<std::size_t>(piece.rank)] +=
        piece.size() * static_cast<std::int64_t>(parameter.element_size());
}

/// Gives each rank an equal number of whole units; remaining ones go to the first in `ranks`.
GRADACCUM_INLINE std::vector<Shards::Piece> Shards::cut(std::int64_t elements, const std::vector<std::size_t>& ranks) {
  const auto number = static_cast<std::int64_t>(ranks.size()), units = elements / unit;
  std::vector<std::int64_t> units_of(ranks.size(), units / number);
  for (std::size_t i = 0; i < static_cast<std::size_t>(units % number); ++i) ++units_of[ranks[i]];
  std::vector<Piece> pieces;
  std::int64_t begin = 0;
  for (auto count : units_of) {
    pieces.push_back({static_cast<int>(pieces.size()), begin, begin + count * unit});
    begin = pieces.back().end;
  }
  pieces.back().end = elements;
  return pieces;
}

GRADACCUM_INLINE void Shards::with_own(c10::function_ref<void()> work) {
  swap_groups();
  const auto back = c10::make_scope_exit([&] { swap_groups(); });
  work();
}

GRADACCUM_INLINE void Shards::check_parameters(const std::vector<at::Tensor>& parameters) const {
  TORCH_CHECK(
      same_parameters(parameters, parameters_),
      "Shard: the optimizer's parameters must not change after the Replicas are constructed; add them before that");
}

GRADACCUM_INLINE void Shards::check() const {
  std::vector<at::Tensor> now;
  for_each_parameter(optimizers_, [&](auto&, auto& parameter) { now.push_back(parameter); });
  check_parameters(now);
  std::size_t place = 0;
  for_each_parameter(optimizers_, [&](auto& optimizer, auto& parameter) {
    const auto piece = own_piece(place);
    const auto* const begin = static_cast<const char*>(parameter.const_data_ptr()) +
                              piece.begin * static_cast<std::int64_t>(parameter.element_size());
    const auto& own = own_[place++];
    TORCH_CHECK(piece.size() == 0 || own.const_data_ptr() == begin, "Shard: a parameter of shape ", parameter.sizes(),
                " must keep its memory after the Replicas are constructed; move the model to its device before that");
    TORCH_CHECK(own.is_same(parameter) || optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0,
                "Shard: the optimizer has state of a whole parameter of shape ", parameter.sizes(),
                ", of which this rank steps a shard; load it by ga::load, or by ga::OptimizerState of the accumulator");
  });
}

GRADACCUM_INLINE void Shards::check_can_be_stepped() const {
  std::size_t place = 0;
  for_each_parameter(optimizers_, [&](auto& optimizer, auto&) {
    TORCH_CHECK(!is_cut(place++) || steps_by_elements(optimizer), "Shard: ", type_name(optimizer),
                " was set to step whole parameters after they had been sharded; call stochastic_rounding before the "
                "Replicas are constructed");
  });
}

GRADACCUM_INLINE void Shards::swap_groups() noexcept {
  std::size_t place = 0;
  for_each_parameter(optimizers_, [&](auto&, auto& parameter) { std::swap(parameter, own_[place++]); });
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
