// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/concepts.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class AnyOptimizer;
class Shards;
class WindowGradients;

/// The other processes that take part in each update, as windows and saved states see them. Includes nothing that
/// sends.
class Peers {
 public:
  virtual ~Peers() = default;

  virtual int rank() const = 0;

  /// Windows of this optimizer will be shared.
  virtual void join(AnyOptimizer& optimizer) = 0;
  /// Which pieces of the parameters each process steps; none where each steps all.
  virtual std::shared_ptr<Shards> shards() const = 0;

  /// Each backward pass gives its gradients away, and the window has its sums when it is complete.
  virtual bool take_each_backward() const = 0;
  /// Runs the backward pass that fills the window, or any where each is taken. The weights of the window are those with
  /// it; gradients may be sent on the way.
  virtual void backward(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in,
                        const std::function<void()>& run) = 0;

  /// The window is complete: its sums and weights become those of all processes.
  virtual void reduce(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) = 0;

  /// Steps with a window that has been reduced: all processes have all parameters afterwards.
  virtual StepResult step(AnyOptimizer& optimizer, const std::shared_ptr<WindowGradients>& window) = 0;

  /// This process has no more to add than `window` as it is: true if others have, and `window` is to be closed with
  /// theirs.
  virtual bool others_continue(const std::shared_ptr<WindowGradients>& window,
                               std::optional<c10::ScalarType> accumulate_in) = 0;

  /// The window is given up, or over.
  virtual void end_window() = 0;

  /// The sum over all ranks, in place.
  virtual void add_up(const at::Tensor& tensor) const = 0;
  /// To save one state of all: rank 0's archive has afterwards the numbers and texts that are the others' own, too;
  /// another's has nothing but its own tensors, which it writes by itself.
  virtual void gather(Archive& archive) const = 0;
  /// Of values that have been gathered, this rank's.
  virtual void pick(Archive::Values& values) const = 0;
  /// What each rank says, by rank, on all of them.
  virtual std::vector<std::string> texts_of_all(const std::string& own) const = 0;
  /// The others' waiting ends, with this reason.
  virtual void give_up(const std::string& why) = 0;
};

/// What rank 0 says, on all ranks.
std::string said_by_first(const Peers& peers, const std::string& on_rank_0);

/// `work`, where it succeeds on all ranks: what fails on one fails on all. Without peers, just `work`.
void run_on_all(const Peers* peers, c10::function_ref<void()> work);

template <class Work>
auto on_all(const Peers* peers, const Work& work) -> decltype(work()) {
  std::optional<decltype(work())> result;
  run_on_all(peers, [&] { result.emplace(work()); });
  return std::move(*result);
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/peers.ipp>
#endif
