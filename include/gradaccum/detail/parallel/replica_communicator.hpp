// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/parallel/heartbeat.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace gradaccum::detail {

class GradientExchange;
class Shards;

/// The other replicas of a model. Windows are summed over all of them.
///
/// A rank that has closed its window sends its weight, and all ranks receive the sums. A rank without data reports that
/// instead, and follows as long as another has closed one. So ranks may have different numbers of micro-batches in a
/// window, and of windows.
///
/// With sharded gradients, a rank can hold only few that others have not taken yet. So it announces each backward that
/// sends them: ranks that have closed their window, or have no data, then send what they have left, or zeros, and sum
/// again, until no rank runs a backward.
class ReplicaCommunicator final : public Communicator {
 public:
  ReplicaCommunicator(std::shared_ptr<Connections> links, const ReplicasOptions& options);

  /// Connects devices directly, if each rank has these parameters on a device of its own.
  void connect(const std::vector<at::Tensor>& parameters);
  /// Drops the connections when the replicas are destroyed. Further training then throws.
  void disconnect();

  /// Returns a line for each group of a sharded optimizer with what must be equal on all ranks: otherwise their parts
  /// are stepped differently, and nothing in the parameters shows it.
  std::string settings_of_divided() const;

  std::function<WindowTotals()> report = {};  ///< further numbers of this rank
  std::function<void(const WindowTotals& own, const WindowTotals& all)> on_reduced = {};  ///< called with the sums

  int rank() const override;
  void join(AnyOptimizer& optimizer) override;
  std::shared_ptr<Shards> shards() const override { return shards_; }
  bool take_each_backward() const override { return options_.shard == Shard::gradients; }
  void backward(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in,
                const std::function<void()>& run) override;
  void end_window() override;
  void reduce(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) override;
  StepResult step(AnyOptimizer& optimizer, const std::shared_ptr<WindowGradients>& window) override;
  bool others_continue(const std::shared_ptr<WindowGradients>& window,
                       std::optional<c10::ScalarType> accumulate_in) override;
  void all_reduce(const at::Tensor& tensor) const override;
  void gather(Archive& archive) const override;
  void keep_own_values(Archive::Values& values) const override;
  std::vector<std::string> all_gather_text(const std::string& own) const override;
  void give_up(const std::string& why) override;

 private:
  struct NormsOfAll;

  void begin_exchange(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in);
  void run_and_send(const std::function<void()>& run);
  void run_round(WindowGradients& window, std::optional<c10::ScalarType> accumulate_in,
                 const std::function<void()>& run);
  WindowTotals agree(const std::shared_ptr<WindowGradients>& window, bool active);
  Connections::Pending begin_sums(at::Tensor& sums, const WindowTotals& own) const;
  WindowTotals sums_of_all(const WindowTotals& own) const;
  void measure_all(WindowGradients& window);
  StepResult step_own(AnyOptimizer& optimizer, Gradients gradients) const;
  /// Runs `work`, which others wait for, and ends their waiting if it throws.
  void or_give_up(c10::function_ref<void()> work) const;

  std::shared_ptr<Connections> connections_;  // nullptr once the replicas are destroyed
  const ReplicasOptions options_;
  std::shared_ptr<Shards> shards_;
  const torch::optim::Optimizer* divided_ = nullptr;
  Connections::Channel line_ = Connections::Channel::gradients;
  std::shared_ptr<GradientExchange> exchange_;  // of the window, from the first backward that sends
  bool counted_on_ = false;                     // others wait for the end of the window
  std::optional<WindowTotals> followed_;        // the sums for the window that is to be closed with others
  std::vector<std::size_t> used_;               // the places with a gradient on some rank, of the closed window
  std::shared_ptr<NormsOfAll> norms_;           // those of the closed window, until it is stepped
};

class Connections;

/// Combines the states of all ranks: rank 0's, and others' values that differ from it, under `rank_1.` and so on.
/// Parameters are equal on all ranks, as is an unsharded optimizer; random states and positions in the data differ.
///
/// Rank 0's archive receives the numbers and strings of the others. Tensors are not sent: another rank's archive keeps
/// only its own tensors that differ. Must be called on all ranks.
void gather_states(Connections& links, Archive& archive);
/// Reduces the values that `gather_states` combined to those of one rank.
void pick_state(Archive::Values& values, int rank);

/// Serializes values for another rank of the same program. All tensors must be undefined.
std::string pack(const Archive::Values& values);
Archive::Values unpack(const std::string& bytes);

}  // namespace gradaccum::detail
