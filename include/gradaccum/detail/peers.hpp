// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace gradaccum::detail {

class WindowGradients;

/// The other processes that take part in each update, as windows and saved states see them. Includes nothing that
/// sends.
class Peers {
 public:
  virtual ~Peers() = default;

  virtual int rank() const = 0;

  /// Runs the backward pass that fills the window. Its weights are complete; gradients may be sent on the way.
  virtual void backward(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in,
                        const std::function<void()>& run) = 0;

  /// The window is complete: its sums and weights become those of all processes.
  virtual void reduce(const std::shared_ptr<WindowGradients>& window, std::optional<c10::ScalarType> accumulate_in) = 0;

  /// This process has no more to add than `window` as it is: true if others have, and `window` is to be closed with
  /// theirs.
  virtual bool others_continue(const std::shared_ptr<WindowGradients>& window) = 0;

  /// The window is given up, or over.
  virtual void end_window() = 0;

  /// On rank 0, the archive has afterwards what is the others' own, too.
  virtual void gather(Archive& archive) const = 0;
  /// Of values that have been gathered, this rank's.
  virtual void pick(Archive::Values& values) const = 0;
  /// What rank 0 says, on all ranks. An error there is an error on all.
  virtual std::string say(const std::function<std::string()>& on_rank_0) const = 0;
};

}  // namespace gradaccum::detail
