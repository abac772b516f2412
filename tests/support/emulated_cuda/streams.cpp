// SPDX-License-Identifier: Apache-2.0
#include "streams.hpp"

#include "address_range.hpp"
#include "counts.hpp"
#include "graphs.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace emulated_cuda {
namespace {

thread_local c10::DeviceIndex device_of_this_thread = 0;
thread_local std::array<c10::StreamId, number_of_devices> stream_of_this_thread = {};  // 0 is the default stream

constexpr c10::StreamId pool_size = 32;  // for each priority, as in CUDA
std::atomic<c10::StreamId> next_of_pool = 0, next_of_high_priority = 0, next_new = 2 * pool_size + 1;

struct Event {
  c10::DeviceIndex device;
  std::chrono::steady_clock::time_point recorded;
  std::uint64_t capture;  // the capture that recorded it; 0: none
};

c10::Stream stream(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(c10::kCUDA, device_of_this_thread);
}

c10::StreamId& stream_on(c10::DeviceIndex device) { return stream_of_this_thread.at(static_cast<std::size_t>(device)); }

/// Devices, streams and events. Work runs when it is issued, so all streams are always in order.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return number_of_devices; }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_this_thread = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return stream(device, stream_on(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(with_index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    const auto id =
        high_priority ? pool_size + 1 + next_of_high_priority++ % pool_size : 1 + next_of_pool++ % pool_size;
    return stream(with_index(device), id);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream(with_index(device), next_new++);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    stream_on(next.device_index()) = next.id();
    return before;
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  void* getStreamNativeHandle(const c10::Stream /*stream*/) const override { return nullptr; }
#endif
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override { wait(); }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { wait(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", static_cast<int>(device),
                " does not match recording stream's device index ", static_cast<int>(stream.device_index()), ".");
    if (!*event) *event = new Event{stream.device_index(), {}, 0};
    const auto* const graph = Graph::capturing(stream);
    static_cast<Event*>(*event)->capture = graph ? graph->number_of_capture() : 0;
    static_cast<Event*>(*event)->recorded = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Graph::join(static_cast<Event*>(event)->capture, static_cast<Event*>(event)->device, stream);
  }
  bool queryEvent(void* /*event*/) const override {
    Graph::refuse_in_captures();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const auto time = static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

c10::DeviceIndex current_device() { return device_of_this_thread; }

c10::StreamId current_stream(c10::DeviceIndex device) { return stream_on(device); }

void set_current_device(c10::DeviceIndex device) {
  if (device < 0) return;
  TORCH_CHECK(device < number_of_devices, "CUDA error: invalid device ordinal ", static_cast<int>(device));
  device_of_this_thread = device;
}

}  // namespace emulated_cuda
