// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/window/communicator.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

class GradientExchange;

/// Gradients that are sent together, by their indices in the list of parameters.
struct Bucket {
  std::vector<std::size_t> indices = {};
  at::TensorOptions options = {};  ///< dtype and device when sent
  std::int64_t elements = 0;
};

/// Returns a window's gradients in buckets of at most `bucket_bytes`, each of one dtype and device: float32 for
/// float16, whose sum over ranks might overflow. A large gradient gets its own bucket, and is not copied. Backward
/// computes the last parameters first, so buckets are sorted by the parameter that completes them. The result depends
/// on the parameters only, not on which of them have gradients, so it is equal on all ranks.
std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters, std::optional<c10::ScalarType> accumulate_in,
                               std::int64_t bucket_bytes);

/// The exchange with the other replicas of a model, which sums windows over all of them.
///
/// A rank that has closed its window sends its weight, and all ranks receive the sums. A rank without data reports that
/// instead, and joins as long as another rank has closed a window: ranks may differ in micro-batches per window, and in
/// the number of windows.
///
/// With sharded gradients a rank announces each backward that sends them: ranks that have closed their window, or have
/// no data, then send their remaining gradients, or zeros, and sum again, until no rank runs a backward.
class ReplicaCommunicator final : public Communicator {
 public:
  ReplicaCommunicator(std::shared_ptr<Connections> connections, const ReplicasOptions& options)
      : connections_(std::move(connections)), options_(options) {}

  /// Connects devices directly, if each rank has these parameters on a separate device.
  void connect(const std::vector<at::Tensor>& parameters);
  /// Drops the connections, as ~Replicas does. The next exchange then throws.
  void disconnect();

  /// Returns a line per group of a sharded optimizer with the settings that must be equal on all ranks: parameters
  /// alone do not show that their parts are stepped differently.
  std::string settings_of_sharded() const;

  std::function<WindowTotals()> report = {};  ///< returns additional numbers of this rank
  std::function<void(const WindowTotals& own, const WindowTotals& all)> on_reduced = {};  ///< called with the sums

  int rank() const override { return connections_ ? connections_->rank() : 0; }
  int world_size() const override { return connections_ ? connections_->world_size() : 1; }
  GRADACCUM_INLINE void join(AnyOptimizer& optimizer) override;
  std::shared_ptr<Shards> shards() const override { return shards_; }
  bool take_each_backward() const override { return options_.shard == Shard::gradients; }
  GRADACCUM_INLINE void backward(const std::shared_ptr<WindowGradients>& window,
                                 const std::function<void()>& run) override;
  GRADACCUM_INLINE void end_window() override;
  GRADACCUM_INLINE void reduce(const std::shared_ptr<WindowGradients>& window) override;
  GRADACCUM_INLINE StepResult step(AnyOptimizer& optimizer, const std::shared_ptr<WindowGradients>& window) override;
  GRADACCUM_INLINE bool others_continue(const std::shared_ptr<WindowGradients>& window) override;
  void all_reduce(const at::Tensor& tensor) const override {
    if (connections_) connections_->all_reduce(tensor);
  }
  GRADACCUM_INLINE void gather(Archive& archive) const override;
  GRADACCUM_INLINE void keep_own_values(Archive::Values& values) const override;
  std::vector<std::string> all_gather_text(const std::string& own) const override {
    return connections_ ? connections_->all_gather(own) : std::vector{own};
  }
  void give_up(const std::string& why) override {
    if (connections_) connections_->give_up(why);
  }

 private:
  struct GatheredNorms;

  void begin_exchange(const std::shared_ptr<WindowGradients>& window);
  void run_round(WindowGradients& window, const std::function<void()>& run);
  WindowTotals agree(const std::shared_ptr<WindowGradients>& window, bool active);
  Connections::Pending begin_sums(at::Tensor& sums, const WindowTotals& own) const;
  WindowTotals sums_of_all(const WindowTotals& own) const;
  void gather_norms(WindowGradients& window);

  std::shared_ptr<Connections> connections_;  // nullptr once the replicas are destroyed
  const ReplicasOptions options_;
  std::shared_ptr<Shards> shards_;
  Connections::Channel channel_ = Connections::Channel::gradients;
  std::shared_ptr<GradientExchange> exchange_;  // the window's exchange, from the first backward that sends
  bool announced_ = false;                      // true if other ranks wait for the end of the window
  std::int64_t rejected_ = 0;                   // windows that were rejected
  std::optional<WindowTotals> joined_;          // the sums for a window that other ranks close, too
  std::vector<std::size_t> used_;               // parameters of the closed window with a gradient on some rank
  std::shared_ptr<GatheredNorms> norms_;        // norms of the closed window, until it is stepped
};

/// Serializes values for another rank of the same program. All tensors must be undefined.
std::string pack(const Archive::Values& values);
Archive::Values unpack(const std::string& bytes);

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
