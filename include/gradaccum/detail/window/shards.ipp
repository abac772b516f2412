// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/shards.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE Shards::Shards(std::vector<at::Tensor> parameters, bool may_be_cut, int rank, int world_size)
    : parameters_(std::move(parameters)), pieces_(parameters_.size()), rank_(rank), world_size_(world_size) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> known;
  for (auto& parameter : parameters_)
    TORCH_CHECK(known.insert(parameter.unsafeGetTensorImpl()).second, "Shard: a parameter of shape ", parameter.sizes(),
                " is listed twice in the optimizer; list it once, in one group");
  std::vector<std::size_t> largest_first(size());
  std::iota(largest_first.begin(), largest_first.end(), std::size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](auto a, auto b) { return parameters_[a].nbytes() > parameters_[b].nbytes(); });
  std::vector<std::int64_t> bytes_of_rank(static_cast<std::size_t>(world_size));
  for (auto place : largest_first) divide(place, may_be_cut, bytes_of_rank);
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

/// Each rank gets as many whole units; those that are left over go to the ranks that have least.
GRADACCUM_INLINE void Shards::divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank) {
  const auto& parameter = parameters_[place];
  const auto units = parameter.numel() / unit;
  const auto element = static_cast<std::int64_t>(parameter.element_size());
  const auto least = [&](int a, int b) {
    return bytes_of_rank[static_cast<std::size_t>(a)] < bytes_of_rank[static_cast<std::size_t>(b)];
  };
  std::vector<int> ranks(static_cast<std::size_t>(world_size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::stable_sort(ranks.begin(), ranks.end(), least);
  auto& pieces = pieces_[place];
  if (!may_be_cut || units < world_size_ || !parameter.is_contiguous()) {
    pieces.push_back({ranks[0], 0, parameter.numel()});
  } else {
    std::vector<std::int64_t> units_of(static_cast<std::size_t>(world_size_), units / world_size_);
    for (std::int64_t i = 0; i < units % world_size_; ++i)
      ++units_of[static_cast<std::size_t>(ranks[static_cast<std::size_t>(i)])];
    std::int64_t begin = 0;
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto end = begin + units_of[static_cast<std::size_t>(rank)] * unit;
      pieces.push_back({rank, begin, rank + 1 == world_size_ ? parameter.numel() : end});
      begin = end;
    }
  }
  for (auto& piece : pieces) bytes_of_rank[static_cast<std::size_t>(piece.rank)] += piece.size() * element;
}

GRADACCUM_INLINE std::size_t Shards::number_of_pieces() const {
  std::size_t number = 0;
  for (auto& pieces : pieces_) number += pieces.size();
  return number;
}

GRADACCUM_INLINE Shards::Piece Shards::own_piece(std::size_t place) const {
  for (auto& piece : pieces(place))
    if (piece.rank == rank_) return piece;
  return {rank_, 0, 0};
}

GRADACCUM_INLINE at::Tensor Shards::part(std::size_t place, const Piece& piece, const at::Tensor& of) const {
  return is_cut(place) ? of.detach().reshape({-1}).narrow(0, piece.begin, piece.size()) : of;
}

GRADACCUM_INLINE void Shards::with_own(torch::optim::Optimizer& optimizer, c10::function_ref<void()> work) {
  check(optimizer);
  swap_groups(optimizer);
  struct Back {
    Shards& shards;
    torch::optim::Optimizer& optimizer;
    ~Back() { shards.swap_groups(optimizer); }
  } back{*this, optimizer};
  work();
}

GRADACCUM_INLINE void Shards::check_groups(const torch::optim::Optimizer& optimizer) const {
  std::size_t place = 0;
  bool same = true;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      same = same && place < size() && parameter.is_same(parameters_[place]);
      ++place;
    }
  TORCH_CHECK(same && place == size(),
              "Shard: the optimizer's parameters must stay those that it had when the Replicas were made; add them "
              "before that");
}

GRADACCUM_INLINE void Shards::check_place(const torch::optim::Optimizer& optimizer, std::size_t place) const {
  const auto& parameter = parameters_[place];
  const auto piece = own_piece(place);
  const auto* const begin = static_cast<const char*>(parameter.const_data_ptr()) +
                            piece.begin * static_cast<std::int64_t>(parameter.element_size());
  TORCH_CHECK(piece.size() == 0 || own_[place].const_data_ptr() == begin, "Shard: a parameter of shape ",
              parameter.sizes(),
              " must stay where it was when the Replicas were made; move the model to its device "
              "before that");
  TORCH_CHECK(own_[place].is_same(parameter) || optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0,
              "Shard: the optimizer has state of a whole parameter of shape ", parameter.sizes(),
              ", of which this process steps a part; load it by ga::load, or by ga::OptimizerState of the accumulator");
}

GRADACCUM_INLINE void Shards::check(const torch::optim::Optimizer& optimizer) const {
  check_groups(optimizer);
  for (std::size_t place = 0; place < size(); ++place) check_place(optimizer, place);
}

GRADACCUM_INLINE void Shards::swap_groups(torch::optim::Optimizer& optimizer) noexcept {
  std::size_t place = 0;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) std::swap(parameter, own_[place++]);
}

}  // namespace gradaccum::detail
