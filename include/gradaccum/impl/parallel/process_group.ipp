// SPDX-License-Identifier: Apache-2.0
// A group of processes: connects them, and exchanges tensors.
#pragma once

#include <gradaccum/process_group.hpp>

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/parallel/rendezvous.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdlib>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE void check_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided, "ProcessGroup: a tensor must be defined and dense");
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE ProcessGroup ProcessGroup::from_environment(ProcessGroupOptions options) {
  const auto lookup = [](const std::string& variable) -> std::optional<std::string> {
    if (const char* const value = std::getenv(variable.c_str())) return value;
    return std::nullopt;
  };
  return ProcessGroup(detail::launch_environment(lookup), options);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options)
    : rank_(environment.rank), world_size_(environment.world_size), local_rank_(environment.local_rank) {
  if (world_size_ == 1) return;
  const detail::NoWriteSignals no_signals;  // for sockets that other ranks have closed, in Gloo's threads, too
  const auto store_name = c10::str(environment.launcher_has_store ? "the launcher" : "rank 0", " (its store at ",
                                   environment.address, ":", environment.port, ")");
  auto store = detail::open_store(environment, store_name, options.timeout);
  static std::atomic<int> groups = 0;
  const auto prefix = detail::plain_text("gradaccum/", environment.attempt, "/", groups++);
  store = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  store->set(detail::host_key(rank_), detail::machine_name());
  // Connecting comes last: after it, rank 0 may end, and its store with it.
  if (local_rank_ < 0) local_rank_ = detail::local_rank_by_host(*store, rank_, detail::machine_name());
  connections_ = std::make_shared<detail::Connections>(store, environment.address, store_name, rank_, world_size_,
                                                       options.timeout);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            ProcessGroupOptions options)
    : rank_(rank), world_size_(world_size), local_rank_(rank) {
  TORCH_CHECK(1 <= world_size && world_size <= detail::most_ranks, "ProcessGroup: world_size must be from 1 to ",
              detail::most_ranks, ", got ", world_size);
  TORCH_CHECK(0 <= rank && rank < world_size, "ProcessGroup: rank must be in [0, ", world_size, "), got ", rank);
  if (world_size == 1) return;
  const detail::NoWriteSignals no_signals;  // for sockets that other ranks have closed, in Gloo's threads, too
  connections_ =
      std::make_shared<detail::Connections>(store, "127.0.0.1", "its place", rank, world_size, options.timeout);
}

GRADACCUM_INLINE at::Device ProcessGroup::device() const {
  if (!at::globalContext().hasCUDA()) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, detail::device_index(local_rank_, at::detail::getCUDAHooks().getNumGPUs()));
}

GRADACCUM_INLINE void ProcessGroup::all_reduce(const at::Tensor& tensor) const {
  detail::check_dense(tensor);
  if (connections_) connections_->all_reduce(tensor);
}

GRADACCUM_INLINE void ProcessGroup::broadcast(const at::Tensor& tensor, int from) const {
  detail::check_dense(tensor);
  if (connections_) connections_->broadcast(tensor, from);
}

GRADACCUM_INLINE std::vector<at::Tensor> ProcessGroup::all_gather(const at::Tensor& tensor) const {
  detail::check_dense(tensor);
  return connections_ ? connections_->all_gather(tensor) : std::vector{tensor.detach().contiguous().clone()};
}

GRADACCUM_INLINE std::vector<std::string> ProcessGroup::all_gather(const std::string& text) const {
  return connections_ ? connections_->all_gather(text) : std::vector{text};
}

GRADACCUM_INLINE void ProcessGroup::barrier() const { all_reduce(at::zeros({1})); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
