// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpointed_sequential.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <torch/nn/module.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace gradaccum {
class Archive;
}

namespace gradaccum::detail {

/// Finds the fastest way to run a batch through a model with `CheckpointedSequential` parts: everything kept in small
/// micro-batches, or less kept in larger ones. Compares times of micro-batches, each of which trains the model.
class CheckpointSearch {
 public:
  /// A kind of micro-batch. `most` is the maximum number of elements: rows times elements per row.
  struct Way {
    bool checkpointed = false;
    std::int64_t most = std::numeric_limits<std::int64_t>::max();
  };

  /// Collects the module's parts that have a budget, and `more`, and sets their budgets to 0.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const Way& way() const { return way_; }
  /// Returns whether the search is still going on.
  bool searches() const { return !parts_.empty() && !settled_; }
  /// Gives three quarters of `bytes` to the parts, if the way is checkpointed and they have no budget yet.
  void share(std::int64_t bytes);
  /// The bytes that all parts together may keep, or 0.
  std::int64_t budget() const { return budget_ * static_cast<std::int64_t>(parts_.size()); }
  /// The bytes planned for the parts in the latest forward pass, if the way is checkpointed; else 0.
  std::int64_t bytes() const;

  /// Records the time of a micro-batch of the most elements that this way allows. `left`: its batch has more rows.
  void took(std::int64_t elements, double seconds, bool left);
  /// Rejects this way, since even the fewest rows take too much memory, by `over` bytes if that is known. Returns false
  /// if there is no other way.
  bool fails(std::int64_t over = 0);
  /// Saves or loads the search. The same parts must have been found before.
  void state(Archive& archive);

 private:
  void go(const Way& way, bool settled);
  void set_budget(std::int64_t each);

  std::vector<std::shared_ptr<CheckpointedSequentialImpl>> parts_;
  Way way_, best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();  // per element
  double seconds_ = best_seconds_;                                 // least per element of this way so far
  int timed_ = 0;                                                  // number of times measured
  std::int64_t budget_ = 0;
  bool found_ = false, settled_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/checkpoint_search.ipp>
#endif
