// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace gradaccum::detail {

class AnyOptimizer;
class Shards;
class WindowGradients;

/// The numbers that ranks exchange when a window closes: one rank's, or the sums over all. Flags are 1 or 0.
struct WindowTotals {
  double weight = 0;  ///< sum of the weights of the micro-batches
  double active = 0;  ///< flag: has closed its own window, rather than only joined other ranks'
  double samples = 0, micro_batches = 0;
  double loss = 0;      ///< mean over the window, times its weight
  double stop = 0;      ///< flag: requests the end of the training
  double signal = 0;    ///< flag: has received SIGTERM or a similar signal
  double save = 0;      ///< flag: a state is due
  double running = 0;   ///< flag: is inside a window, so that all send the gradients of one more micro-batch
  double unsent = 0;    ///< flag: has gradients that no backward has sent
  double rejected = 0;  ///< windows rejected so far
  double flops = 0;     ///< of micro-batches since the last exchange, if they are counted
  std::vector<double> used, frozen;  ///< flags by parameter: has a gradient; has none in this window
};

/// Calls `visit` with each number of const or mutable totals, in a fixed order. Does not compile without all members.
void for_each_number(auto& totals, auto visit) {
  auto& [weight, active, samples, micro_batches, loss, stop, signal, save, running, unsent, rejected, flops, used,
         frozen] = totals;
  for (auto* const number :
       {&weight, &active, &samples, &micro_batches, &loss, &stop, &signal, &save, &running, &unsent, &rejected, &flops})
    visit(*number);
  for (auto& flag : used) visit(flag);
  for (auto& flag : frozen) visit(flag);
}

/// The interface to the other ranks, for windows and saved states, independent of the transport.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Joins an optimizer, whose windows are shared from now on.
  virtual void join(AnyOptimizer& optimizer) = 0;
  /// Returns the pieces of the parameters that each rank steps; nullptr if each rank steps all parameters.
  virtual std::shared_ptr<Shards> shards() const = 0;

  /// Returns true if each backward pass sends its gradients, and the window gets its sums only when it is complete.
  virtual bool take_each_backward() const = 0;
  /// Runs a backward pass whose weight the window already has: the last one, or any if `take_each_backward()`.
  virtual void backward(const std::shared_ptr<WindowGradients>& window, const std::function<void()>& run) = 0;

  /// Replaces the sums and weights of a complete window by the totals over all ranks.
  virtual void reduce(const std::shared_ptr<WindowGradients>& window) = 0;

  /// Steps with a reduced window. All ranks have all parameters afterwards.
  virtual StepResult step(AnyOptimizer& optimizer, const std::shared_ptr<WindowGradients>& window) = 0;

  /// Called when this rank has nothing to add to `window`. Returns true if other ranks have, so that it must be closed.
  virtual bool others_continue(const std::shared_ptr<WindowGradients>& window) = 0;

  /// Ends the window, closed or discarded.
  virtual void end_window() = 0;

  virtual void all_reduce(const at::Tensor& tensor) const = 0;
  /// Gathers one state of all ranks. Rank 0's archive then also has the numbers and texts of the other ranks, whose
  /// archives keep only their own tensors, which they write themselves.
  virtual void gather(Archive& archive) const = 0;
  /// Reduces gathered values to this rank's.
  virtual void keep_own_values(Archive::Values& values) const = 0;
  /// Returns the texts of all ranks, by rank.
  virtual std::vector<std::string> all_gather_text(const std::string& own) const = 0;
  /// Ends the waiting of the other ranks, with this reason.
  virtual void give_up(const std::string& why) = 0;
};

inline std::string broadcast_text(const Communicator& peers, const std::string& on_rank_0) {
  return peers.all_gather_text(peers.rank() == 0 ? on_rank_0 : "")[0];
}

/// Runs `work`, which must succeed on all ranks. An error on one rank is thrown on all: ranks without an error of their
/// `work` throw the first failing rank's, with its number. Without peers, only runs `work`.
inline void run_on_all(const Communicator* peers, c10::function_ref<void()> work) {
  if (!peers) return work();
  std::exception_ptr own;
  std::string text;
  try {
    work();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = error.what();
  }
  const auto all = peers->all_gather_text(text);
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) throw std::runtime_error(c10::str("rank ", rank, ": ", first_line(all[rank])));
}

template <class Work>
auto on_all(const Communicator* peers, const Work& work) -> decltype(work()) {
  std::optional<decltype(work())> result;
  run_on_all(peers, [&] { result.emplace(work()); });
  return std::move(*result);
}

}  // namespace gradaccum::detail
