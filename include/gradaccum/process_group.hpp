// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/links.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum {

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
/// ten seconds of its end; after `timeout` where it hangs. Then all processes have to be started again.
///
/// @note Waits for the others, and for the device of the tensor.
class ProcessGroup {
 public:
  ProcessGroup() = default;  ///< this process alone
  static ProcessGroup from_environment(ProcessGroupOptions options = {}) {
    return ProcessGroup(detail::LaunchEnvironmentReader().read(), options);
  }
  /// Where a launcher says it by other means, on one machine. `store`: one of LibTorch's that all ranks share, for this
  /// group alone.
  ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
               ProcessGroupOptions options = {});

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }  ///< on this machine
  /// Of its own where machines have several: `cuda:local_rank`, or the CPU.
  at::Device device() const {
    return at::globalContext().hasCUDA() ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank_))
                                         : at::Device(at::kCPU);
  }

  /// The sum over all ranks, in place.
  void all_reduce(const at::Tensor& tensor) const {
    in_place(tensor, [&](auto& dense) {
      links_->wait(links_->begin_sum(detail::Links::Line::agreement, dense), "a sum over all ranks");
    });
  }
  /// The tensor of one rank, on all of them.
  void broadcast(const at::Tensor& tensor, int from = 0) const {
    in_place(tensor, [&](auto& dense) {
      links_->wait(links_->begin_broadcast(dense, from), "a tensor of rank " + std::to_string(from));
    });
  }
  /// The tensors of all ranks, by rank.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) const;
  /// The texts of all ranks, of any length each.
  std::vector<std::string> all_gather(const std::string& text) const;
  /// Waits until all are here.
  void barrier() const { all_reduce(at::zeros({1})); }

  /// For those who send on their own: none where the process is alone.
  const std::shared_ptr<detail::Links>& links() const { return links_; }

 private:
  ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options)
      : rank_(environment.rank), world_size_(environment.world_size), local_rank_(environment.local_rank) {
    if (world_size_ > 1) links_ = detail::Links::connect(environment, options.timeout);
  }

  static void check_dense(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided, "ProcessGroup: a tensor must be dense");
  }
  template <class Exchange>
  void in_place(const at::Tensor& tensor, const Exchange& exchange) const {
    check_dense(tensor);
    if (!links_ || tensor.numel() == 0) return;
    const at::NoGradGuard no_grad;
    const auto dense = tensor.detach().contiguous();
    exchange(dense);
    if (!dense.is_alias_of(tensor)) tensor.detach().copy_(dense);
  }

  std::shared_ptr<detail::Links> links_;
  int rank_ = 0, world_size_ = 1, local_rank_ = 0;
};

inline ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                  ProcessGroupOptions options)
    : rank_(rank), world_size_(world_size), local_rank_(rank) {
  TORCH_CHECK(world_size >= 1 && 0 <= rank && rank < world_size, "ProcessGroup: rank must be in [0, ", world_size,
              "), got ", rank);
  if (world_size == 1) return;
  links_ = std::make_shared<detail::Links>(store, "127.0.0.1", "its place", rank, world_size, options.timeout);
}

inline std::vector<at::Tensor> ProcessGroup::all_gather(const at::Tensor& tensor) const {
  check_dense(tensor);
  const auto own = tensor.detach().contiguous();
  if (!links_) return {own.clone()};
  std::vector<at::Tensor> all;
  for (int i = 0; i < world_size_; ++i) all.push_back(at::empty_like(own));
  if (own.numel() > 0) links_->wait(links_->begin_gather(all, own), "tensors of all ranks");
  return all;
}

inline std::vector<std::string> ProcessGroup::all_gather(const std::string& text) const {
  const auto lengths = all_gather(at::tensor(static_cast<std::int64_t>(text.size())));
  std::int64_t longest = 0;
  for (auto& length : lengths) longest = std::max(longest, length.item<std::int64_t>());
  const auto own = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), own.data_ptr<std::uint8_t>());
  const auto all = all_gather(own);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto* const bytes = all[i].const_data_ptr<std::uint8_t>();
    texts.emplace_back(bytes, bytes + lengths[i].item<std::int64_t>());
  }
  return texts;
}

}  // namespace gradaccum
