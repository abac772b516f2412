// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace gradaccum::detail {

/// The division of an optimizer's parameters among ranks. Each rank steps, and keeps moments of, its own pieces only.
///
/// A parameter is cut along its memory into a piece per rank, in multiples of `unit` except at its end. A parameter
/// that is too small for that, or not contiguous, goes to one rank as a whole; so do all parameters of an optimizer
/// whose step needs whole parameters. The largest are divided first, and remainders go to the rank with the fewest
/// bytes. The division depends on the parameters only, so it is equal on all ranks. Several optimizers share one.
class Shards {
 public:
  /// A range of a parameter's elements in memory, and its rank.
  struct Piece {
    int rank = 0;
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
  };
  static constexpr std::int64_t unit = 4096;  ///< elements: whole blocks of 8-bit moments, whole pages of memory

  Shards(std::vector<torch::optim::Optimizer*> optimizers, int rank, int world_size);

  const std::vector<torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  std::size_t number_of_pieces() const {
    std::size_t number = 0;
    for (auto& pieces : pieces_) number += pieces.size();
    return number;
  }
  /// Returns the pieces of a parameter in memory order, which is the order of ranks if it is cut.
  const std::vector<Piece>& pieces(std::size_t place) const { return pieces_[place]; }
  bool is_cut(std::size_t place) const { return pieces_[place].size() > 1; }
  /// Returns this rank's piece, without elements if it has none.
  Piece own_piece(std::size_t place) const {
    const auto& own = pieces(place)[is_cut(place) ? static_cast<std::size_t>(rank_) : 0];
    return own.rank == rank_ ? own : Piece{rank_, 0, 0};
  }
  /// Returns this rank's piece as a tensor that shares the parameter's memory; the parameter itself if it is not cut.
  /// It is always the same tensor, so that an optimizer can keep state for it.
  const at::Tensor& own(std::size_t place) const { return own_[place]; }
  const std::vector<at::Tensor>& own() const { return own_; }
  /// Clears the gradients of pieces: they are views that no other code can clear.
  void clear_gradients() {
    for (std::size_t place = 0; place < size(); ++place)
      if (!own_[place].is_same(parameters_[place])) own_[place].mutable_grad().reset();
  }
  /// Returns a piece of a tensor of the parameter's size: the tensor itself if the parameter is not cut, a view if it
  /// is contiguous.
  at::Tensor part(std::size_t place, const Piece& piece, const at::Tensor& of) const {
    return is_cut(place) ? of.detach().reshape({-1}).narrow(0, piece.begin, piece.size()) : of;
  }

  void check_parameters(const std::vector<at::Tensor>& parameters) const;
  /// Throws if an optimizer's parameters or their memory have changed, or if it has state of whole parameters.
  void check() const;
  /// Throws if an optimizer would step pieces, and needs whole parameters by now.
  void check_can_be_stepped() const;

  /// Runs `work`, after `check`, while the optimizers' groups hold `own` in place of the parameters.
  void with_own(c10::function_ref<void()> work);

 private:
  static std::vector<Piece> cut(std::int64_t elements, const std::vector<std::size_t>& ranks);
  void divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank);
  void swap_groups() noexcept;

  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<at::Tensor> parameters_, own_;
  std::vector<std::vector<Piece>> pieces_;
  int rank_, world_size_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/shards.ipp>
#endif
