// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#endif

#include <functional>
#include <memory>
#include <utility>

namespace gradaccum::detail {

/// The type that LibTorch names c10::MempoolId_t from 2.9 on.
using GraphPool = std::pair<unsigned long long, unsigned long long>;

#if __has_include(<ATen/core/GraphImplInterface.h>)
using at::GraphImplInterface;
#else
/// A graph of a device: the functions of at::GraphImplInterface, which LibTorch has from 2.12 on, that are used here.
struct GraphImplInterface {
  virtual ~GraphImplInterface() = default;
  virtual void capture_begin(GraphPool pool) = 0;
  virtual void capture_end() = 0;
  virtual void replay() = 0;
  virtual GraphPool pool() const = 0;
};
/// Returns the function that constructs a graph, which tests may replace.
std::function<std::unique_ptr<GraphImplInterface>()>& device_graph_maker();
#endif

/// Returns true if work on a device can be captured as a graph.
bool has_graphs(c10::Device device);

/// Work that was captured on a device, to be replayed. Capturing runs nothing: memory and random numbers do not change.
/// Its allocations belong to the graph's pool, and each replay writes to them.
class DeviceGraph {
 public:
  /// Captures the operations that `work` issues on `stream`, which must not be the default stream. Graphs that share a
  /// pool must be replayed in the order of their captures, unless the results of each are no longer needed when another
  /// is replayed. Throws an error that names the operation that could not be captured, and leaves the stream usable.
  DeviceGraph(c10::Stream stream, GraphPool pool, c10::function_ref<void()> work);

  /// Replays on the current stream.
  void replay() const { impl_->replay(); }
  GraphPool pool() const { return impl_->pool(); }

 private:
  std::shared_ptr<GraphImplInterface> impl_;
};

}  // namespace gradaccum::detail
