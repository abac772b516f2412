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

/// How an optimizer's parameters are divided among processes, of which each steps its own pieces, and keeps moments of
/// these alone.
///
/// A parameter is cut along its memory into a piece for each rank, of whole `unit`s but for the last one's end. One
/// that is smaller than that, or does not lie in one row, is the piece of one rank; so are all of an optimizer that
/// looks at whole parameters. The largest are divided first, and what cannot be divided evenly goes to who has least.
/// The same on all ranks: it depends on the parameters alone.
class Shards {
 public:
  /// Elements of a parameter as they lie in memory, and whose they are.
  struct Piece {
    int rank = 0;
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
  };
  static constexpr std::int64_t unit = 4096;  ///< whole blocks of 8-bit moments, and whole pages of memory

  Shards(std::vector<at::Tensor> parameters, bool may_be_cut, int rank, int world_size);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  std::size_t number_of_pieces() const;
  /// In the order of memory; of one that is cut, of the ranks.
  const std::vector<Piece>& pieces(std::size_t place) const { return pieces_[place]; }
  bool is_cut(std::size_t place) const { return pieces_[place].size() > 1; }
  bool any_is_cut() const { return number_of_pieces() > size(); }
  /// This rank's; of no elements where there is none.
  Piece own_piece(std::size_t place) const;
  /// The same as a tensor, which shares the parameter's memory: the parameter itself, where it is not cut. Stays the
  /// same, so that an optimizer can keep state of it.
  const at::Tensor& own(std::size_t place) const { return own_[place]; }
  const std::vector<at::Tensor>& own() const { return own_; }
  /// Gradients of pieces are views that nobody else can clear.
  void clear_gradients();
  /// A piece of a tensor that is as large as the parameter, itself where that is not cut; shares its memory where it
  /// lies in one row.
  at::Tensor part(std::size_t place, const Piece& piece, const at::Tensor& of) const;

  /// Throws where these are others.
  void check_parameters(const std::vector<at::Tensor>& parameters) const;
  /// Throws where the optimizer has other parameters than it had, one of them elsewhere, or state of whole parameters.
  void check(const torch::optim::Optimizer& optimizer) const;

  /// After `check`: runs `work` while the groups of the optimizer have `own` in the place of the parameters.
  void with_own(torch::optim::Optimizer& optimizer, c10::function_ref<void()> work);

 private:
  static std::vector<Piece> cut(std::int64_t elements, const std::vector<std::size_t>& ranks);
  void divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank);
  void check_place(const torch::optim::Optimizer& optimizer, std::size_t place) const;
  void swap_groups(torch::optim::Optimizer& optimizer) noexcept;

  std::vector<at::Tensor> parameters_, own_;
  std::vector<std::vector<Piece>> pieces_;
  int rank_, world_size_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/shards.ipp>
#endif
