// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: parallel

#ifndef __linux__
#error "gradaccum: several processes (process_group.hpp, replicas.hpp, policies/data_parallel.hpp) are for Linux only"
#endif

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace gradaccum {

namespace detail {
class Connections;
struct LaunchEnvironment;
}  // namespace detail

/// Options of a `ProcessGroup`.
struct ProcessGroupOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< limit for one exchange, and for connecting
};

/// The processes that train together on one or many machines, started by torchrun, mpirun, srun or Kubernetes.
///
///     const auto group = ga::ProcessGroup::from_environment();    // one process, where no launcher started it
///     auto count = torch::tensor(10.0 * (group.rank() + 1));
///     group.all_reduce(count);                                    // the sum over all ranks
///     if (group.rank() == 0) std::cout << group.world_size() << " processes, " << count << '\n';
///
/// Environment. `from_environment` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; in place of the first two also
/// the variables of Open MPI, MPICH, Intel MPI, MVAPICH, Cray PALS, jsrun or Flux, or all from a Slurm step. Throws if
/// some of them are missing. A local rank that is not set is derived from host names. Without a world size, or with 1,
/// there is no network, and calls do nothing.
///
/// Calls. All ranks must make the same calls in the same order, from one thread each, with dense tensors of equal shape
/// and dtype. Copies are handles of the same group. The n-th groups that the processes construct connect to each other.
///
/// Failures. If a process ends or hangs, ranks that wait for it throw an error that names it. All must be restarted
/// then.
///
/// @note Waits for the other ranks, and for the tensor's device: at most ten seconds after a process has ended, 30
/// seconds if it is suspended or unreachable, and `timeout` if it hangs.
class ProcessGroup {
 public:
  ProcessGroup() = default;  ///< a group with only this process
  static ProcessGroup from_environment(ProcessGroupOptions options = {});
  /// Constructs a group on one machine without a launcher. All ranks share LibTorch's `store`, for this group only.
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
               ProcessGroupOptions options = {});

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }  ///< rank among the processes on this machine
  /// Returns this rank's device: `cuda:local_rank`, or the CPU without CUDA.
  at::Device device() const;

  /// Sums a tensor over all ranks in place.
  void all_reduce(const at::Tensor& tensor) const;
  /// Copies one rank's tensor to all others.
  void broadcast(const at::Tensor& tensor, int from = 0) const;
  /// Returns the tensors of all ranks, by rank.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) const;
  /// Returns the strings of all ranks, by rank. They may differ in length.
  std::vector<std::string> all_gather(const std::string& text) const;
  /// Waits until all ranks have called it.
  void barrier() const;

 private:
  friend class Replicas;
  ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options);

  std::shared_ptr<detail::Connections> connections_;  // nullptr for a single process
  int rank_ = 0, world_size_ = 1, local_rank_ = 0;
};

/// The state that ranks divide rather than replicate, for `ga::DataParallel{.shard = …}`.
enum class Shard {
  none,       ///< nothing: each rank has the whole state
  optimizer,  ///< the optimizer's state: each rank keeps and steps its own part of the parameters
  gradients,  ///< the optimizer's state and, between micro-batches, the gradients
};

/// Options for sending gradients, seeding the ranks, and sharding.
struct ReplicasOptions {
  /// The maximum number of bytes of gradients that are sent together, >= 1. With `shard` it also limits the bytes in
  /// flight: a larger gradient is sent in parts if it is split, and backward waits for the first of them.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  bool overlap = true;        ///< send gradients while the backward pass that fills the window still runs
  bool seed_by_rank = true;   ///< add each rank's number to its random seeds, so that ranks draw different numbers
  Shard shard = Shard::none;  ///< state that ranks divide rather than replicate
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/process_group.ipp>
#endif
