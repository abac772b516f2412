// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace gradaccum {

namespace detail {
class Links;
struct LaunchEnvironment;
}  // namespace detail

/// How long processes wait for each other.
struct ProcessGroupOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< that one exchange, and the meeting, may take
};

/// The processes that train together, on one machine or on many: as torchrun, srun, mpirun or Kubeflow started them.
///
///     const auto group = ga::ProcessGroup::from_environment();    // one process, where no launcher started it
///     auto count = torch::tensor(10.0 * (group.rank() + 1));
///     group.all_reduce(count);                                    // the sum over all ranks
///     if (group.rank() == 0) std::cout << group.world_size() << " processes, " << count << '\n';
///
/// From the environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; or what srun sets in a step of
/// Slurm's; or Open MPI's variables with MASTER_ADDR and MASTER_PORT. With a world of 1, or none, there is no network,
/// and all calls do nothing. A handle: copies are the same group. The first group that one process makes meets the
/// first of all others, the second the second.
///
/// All ranks make the same calls in the same order, one thread each. Tensors are dense, of one shape and dtype on all.
///
/// When a process has ended, or hangs, all others that wait for it end their wait with an error that names it: within
/// ten seconds of its end; after 30 seconds of silence where it is suspended, or the link to it is lost; after
/// `timeout` where it is there and hangs. Then all processes have to be started again.
///
/// @note Waits for the others, and for the device of the tensor.
class ProcessGroup {
 public:
  ProcessGroup() = default;  ///< this process alone
  static ProcessGroup from_environment(ProcessGroupOptions options = {});
  /// Where a launcher says it by other means, on one machine. `store`: one of LibTorch's that all ranks share, for this
  /// group alone.
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
               ProcessGroupOptions options = {});

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }  ///< on this machine
  /// Of its own where machines have several: `cuda:local_rank`, or the CPU.
  at::Device device() const;

  /// The sum over all ranks, in place.
  void all_reduce(const at::Tensor& tensor) const;
  /// The tensor of one rank, on all of them.
  void broadcast(const at::Tensor& tensor, int from = 0) const;
  /// The tensors of all ranks, by rank.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) const;
  /// The texts of all ranks, of any length each.
  std::vector<std::string> all_gather(const std::string& text) const;
  /// Waits until all are here.
  void barrier() const;

  /// For those who send on their own: none where the process is alone.
  const std::shared_ptr<detail::Links>& links() const { return links_; }

 private:
  ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options);

  std::shared_ptr<detail::Links> links_;
  int rank_ = 0, world_size_ = 1, local_rank_ = 0;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/process_group.ipp>
#endif
