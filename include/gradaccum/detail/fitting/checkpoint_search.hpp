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

/// Finds the fastest way through a batch for a model with `CheckpointedSequential` parts: everything kept in small
/// micro-batches, or less kept in larger ones. By the time that micro-batches take, each of which is training.
class CheckpointSearch {
 public:
  /// What a micro-batch is like: `most` elements it has, rows times what is in a row.
  struct Way {
    bool checkpointed = false;
    std::int64_t most = std::numeric_limits<std::int64_t>::max();
  };

  /// Those of the module that have a budget, and `more`.
  void find_parts(torch::nn::Module& module, const std::vector<CheckpointedSequential>& more);

  const Way& way() const { return way_; }
  /// Times decide what comes next.
  bool searches() const { return !parts_.empty() && !settled_; }
  /// Of `bytes` the parts may keep three quarters, if the way is a checkpointed one. They keep that until it is
  /// another.
  void share(std::int64_t bytes);
  /// What all parts may keep, or 0.
  std::int64_t budget() const { return budget_ * static_cast<std::int64_t>(parts_.size()); }
  /// What they kept in the latest forward pass, if the way is a checkpointed one; else 0.
  std::int64_t bytes() const;

  /// A micro-batch of so many elements, as many as this way takes, has taken so long; `left`: its batch has more.
  void took(std::int64_t elements, double seconds, bool left);
  /// This way does not go, however few rows: they take `over` bytes too much, if that is known. False if there is no
  /// other.
  bool fails(std::int64_t over = 0);
  /// Before it there are the same parts.
  void state(Archive& archive);

 private:
  void go(const Way& way, bool settled);
  void set_budget(std::int64_t each);

  std::vector<std::shared_ptr<CheckpointedSequentialImpl>> parts_;
  Way way_, best_;
  double best_seconds_ = std::numeric_limits<double>::infinity();  // an element
  double seconds_ = best_seconds_;                                 // of this way, the least so far
  int timed_ = 0;                                                  // how often
  std::int64_t budget_ = 0;
  bool found_ = false, settled_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/fitting/checkpoint_search.ipp>
#endif
