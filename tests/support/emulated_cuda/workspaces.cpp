// SPDX-License-Identifier: Apache-2.0
#include "workspaces.hpp"

#include "device_memory.hpp"
#include "emulated_cuda.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

namespace emulated_cuda {
namespace {

using Place = std::pair<std::thread::id, c10::DeviceIndex>;

std::atomic<std::int64_t> workspace_bytes = 0;
std::mutex mutex;
std::map<Place, char*>& workspaces() {
  static auto& all = *new std::map<Place, char*>;
  return all;
}

bool is_matrix_product(std::string_view name) {
  constexpr std::array<std::string_view, 6> names = {
      "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

void make_workspace(const c10::OperatorHandle& operation, c10::DeviceIndex device) {
  if (workspace_bytes == 0 || !is_matrix_product(operation.schema().name())) return;
  const std::lock_guard lock(mutex);
  const Place place(std::this_thread::get_id(), device);
  if (!workspaces().contains(place))
    workspaces().emplace(place, DeviceMemory::of(device).allocate(static_cast<std::size_t>(workspace_bytes)));
}

}  // namespace emulated_cuda

void emulated_cuda_use_workspaces(std::int64_t bytes) {
  const std::lock_guard lock(emulated_cuda::mutex);
  for (auto& [place, block] : std::exchange(emulated_cuda::workspaces(), {}))
    emulated_cuda::DeviceMemory::of(place.second).free(block);
  emulated_cuda::workspace_bytes = bytes;
}
