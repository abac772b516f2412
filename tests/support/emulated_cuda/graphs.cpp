// SPDX-License-Identifier: Apache-2.0
#include "graphs.hpp"

#include "address_range.hpp"
#include "allocators.hpp"
#include "counts.hpp"
#include "device_memory.hpp"
#include "emulated_cuda.hpp"
#include "generator.hpp"
#include "streams.hpp"

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace emulated_cuda {
namespace {

std::array<std::atomic<Graph*>, number_of_devices> under_way = {};
std::atomic<std::uint64_t> next_pool = 1, next_capture = 1;

std::atomic<Graph*>& capture_on(c10::DeviceIndex device) { return under_way.at(static_cast<std::size_t>(device)); }

char* bytes_of(const c10::Storage& storage) {
  auto* const data = const_cast<char*>(static_cast<const char*>(storage.data()));
  return storage.device().is_cuda() ? AddressRange::get().host(data) : data;
}

at::Generator generator_of(c10::DeviceIndex device) { return DeviceGenerator::of(device); }

}  // namespace

Graph* Graph::capturing(c10::DeviceIndex device) { return capturing(device, current_stream(device)); }

Graph* Graph::capturing(const c10::Stream& stream) { return capturing(stream.device_index(), stream.id()); }

Graph* Graph::capturing(c10::DeviceIndex device, c10::StreamId stream) {
  auto* const graph = capture_on(device).load();
  if (!graph) return nullptr;
  const std::lock_guard lock(graph->mutex_);
  const auto& streams = graph->streams_;
  return std::find(streams.begin(), streams.end(), stream) != streams.end() ? graph : nullptr;
}

void Graph::join(std::uint64_t capture, c10::DeviceIndex device, const c10::Stream& stream) {
  auto* const graph = capture_on(device).load();
  if (capture == 0 || !graph || graph->capture_ != capture || capturing(stream) == graph) return;
  const bool other_device = stream.device_index() != device;
  if (stream.id() == 0 || other_device) graph->invalid_ = true;
  TORCH_CHECK(!other_device, "emulated CUDA: streams of two devices cannot be captured together");
  TORCH_CHECK(stream.id() != 0, "CUDA error: operation would make the legacy stream depend on a capturing blocking ",
              "stream");
  const std::lock_guard lock(graph->mutex_);
  graph->streams_.push_back(stream.id());
}

void Graph::refuse_in_captures() {
  bool refused = false;
  for (c10::DeviceIndex device = 0; device < number_of_devices; ++device)
    if (auto* const graph = capturing(device)) refused = graph->invalid_ = true;
  TORCH_CHECK(!refused, "CUDA error: operation not permitted when stream is capturing");
}

void Graph::begin(gradaccum::detail::GraphPool pool) {
  TORCH_CHECK(!memory_, "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new ",
              "instance.");
  device_ = current_device();
  streams_ = {current_stream(device_)};
  TORCH_CHECK(streams_[0] != 0, "CUDA graphs must be captured on a non-default stream.");
  capture_ = next_capture++;
  numbers_ = generator_of(device_).get_state();
  pool_ = pool == gradaccum::detail::GraphPool{0, 0} ? gradaccum::detail::GraphPool{next_pool++, 0} : pool;
  memory_ = DeviceMemory::of(device_).pool(pool_);
  Graph* none = nullptr;
  if (capture_on(device_).compare_exchange_strong(none, this)) return;
  memory_.reset();
  TORCH_CHECK(false,
              "CUDA error: operation not permitted: another capture is under way on cuda:", static_cast<int>(device_));
}

void Graph::capture_end() {
  TORCH_CHECK(capture_on(device_) == this && streams_[0] == current_stream(device_),
              "CUDA error: operation not permitted: this graph does not capture the current stream");
  undo();
  captured_ = !invalid_;
  if (captured_) return;
  forget();
  TORCH_CHECK(false, "CUDA error: operation failed due to a previous error during capture");
}

/// Restores in reverse order, because storages may share memory.
void Graph::undo() {
  capture_on(device_) = nullptr;
  for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
    if (saved->storage.nbytes() == 0) continue;
    std::memset(bytes_of(saved->storage), saved->fill, saved->storage.nbytes());
    std::memcpy(bytes_of(saved->storage), saved->bytes.data(), std::min(saved->bytes.size(), saved->storage.nbytes()));
  }
  fixed_.clear();
  saved_.clear();
  blocks_.clear();
  generator_of(device_).set_state(numbers_);
}

void Graph::forget() {
  if (capture_on(device_) == this) undo();
  work_.clear();
  memory_.reset();
  captured_ = invalid_ = false;
}

void Graph::replay() {
  check_captured();
  refuse_in_captures();
  const DeviceScope scope(device_);
  for (auto& work : work_) work();
  ++counts().launches;
}

gradaccum::detail::GraphPool Graph::pool() const {
  check_captured();
  return pool_;
}

void Graph::check_captured() const {
  TORCH_CHECK(captured_, "Called a function of CUDAGraph without a preceding successful capture.");
}

void Graph::check_valid() const {
  TORCH_CHECK(!invalid_, "CUDA error: operation failed due to a previous error during capture");
}

void Graph::add_block(const void* block) {
  const std::lock_guard lock(mutex_);
  blocks_.insert(block);
}

/// Fills integers with zeros: a later capture may index with them, which runs on the host here.
void Graph::save(const at::Tensor& tensor) {
  check_valid();
  const auto& storage = tensor.storage();
  const std::lock_guard lock(mutex_);
  for (auto& known : saved_)
    if (known.storage.is_alias_of(storage)) return;
  saved_.push_back({storage, {}, tensor.is_floating_point() || tensor.is_complex() ? 0xFF : 0});
  if (storage.nbytes() > 0 && !blocks_.contains(storage.data()))
    saved_.back().bytes.assign(bytes_of(storage), storage.nbytes());
}

c10::Storage Graph::fixed(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  auto& same = fixed_[{storage.unsafeGetStorageImpl(), storage.data()}];
  if (!same)
    same = c10::Storage(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(const_cast<void*>(storage.data()), nullptr, &c10::detail::deleteNothing, storage.device()),
        &device_allocator());
  return same;
}

void Graph::record(std::function<void()> work) {
  check_valid();
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
}

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace {
using at::GraphImplRegistry;
using at::RegistererGraphImplRegistry;
REGISTER_GRAPH_IMPL(CUDA, Graph)
}  // namespace
#endif

}  // namespace emulated_cuda

gradaccum::detail::GraphImplInterface* emulated_cuda_new_graph() { return new emulated_cuda::Graph; }
