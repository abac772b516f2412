// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/process_group.hpp>

#include <gradaccum/detail/parallel/connections.hpp>

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

GRADACCUM_INLINE void check_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided, "ProcessGroup: a tensor must be dense");
}

}  // namespace detail

GRADACCUM_INLINE ProcessGroup ProcessGroup::from_environment(ProcessGroupOptions options) {
  return ProcessGroup(detail::LaunchEnvironmentReader().read(), options);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options)
    : rank_(environment.rank), world_size_(environment.world_size), local_rank_(environment.local_rank) {
  if (world_size_ > 1) connections_ = detail::Connections::connect(environment, options.timeout);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            ProcessGroupOptions options)
    : rank_(rank), world_size_(world_size), local_rank_(rank) {
  TORCH_CHECK(world_size >= 1 && 0 <= rank && rank < world_size, "ProcessGroup: rank must be in [0, ", world_size,
              "), got ", rank);
  if (world_size == 1) return;
  connections_ =
      std::make_shared<detail::Connections>(store, "127.0.0.1", "its place", rank, world_size, options.timeout);
}

GRADACCUM_INLINE at::Device ProcessGroup::device() const {
  return at::globalContext().hasCUDA() ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank_))
                                       : at::Device(at::kCPU);
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
