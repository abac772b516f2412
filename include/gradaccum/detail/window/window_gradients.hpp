// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Returns true if both lists hold the same tensors, not merely equal ones, in the same order.
bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// A record of a tensor, possibly undefined, that does not keep its memory.
///
/// It holds a weak reference, not an address, since a new tensor is often made where the old one lay.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor);

  bool defined() const { return defined_; }
  /// Returns true for the recorded tensor if nothing has written to it (by its version counter, without a device).
  bool untouched(const at::Tensor& tensor) const;
  /// Returns true if another tensor of the same layout has taken the place of the recorded one.
  bool replaced(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor, even if it was written to.
  bool same(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor if it was written to once since, as by a backward that adds to it.
  bool added_to(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor if it has a version counter of its own: parts of one gradient share one.
  bool counts_alone(const at::Tensor& tensor) const;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
  bool defined_ = false;
  at::Layout layout_ = at::kStrided;
  std::uint32_t version_ = 0;
};

inline constexpr const char* not_cleared =
    "GradAccumulator: the gradients of the last window are still there (or were cleared by .data(), which nobody can "
    "see), and backward adds to them; call optimizer.zero_grad() after every step(), which leaves an open window alone";

/// Detects gradients that were cleared, replaced or written to since it looked last.
class GradientWatch {
 public:
  /// Records the gradients as they are.
  void look(const std::vector<at::Tensor>& parameters);
  /// Follows a change of the list of parameters. A new one counts as seen without a gradient.
  void refresh_parameters(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
  /// Returns true if another backward, or anything else, has written to a gradient.
  bool touched(const std::vector<at::Tensor>& parameters) const;

  void check_kept(const std::vector<at::Tensor>& parameters) const;
  void check_cleared(const std::vector<at::Tensor>& parameters) const;
  void check_only_ours(const std::vector<at::Tensor>& parameters, bool window_is_empty) const;

 private:
  bool touched(std::size_t i, const at::Tensor& gradient) const {
    return gradient.defined() && !seen_[i].untouched(gradient);
  }

  std::vector<SeenTensor> seen_;  // the gradient of each parameter
};

class NameOf;

/// The sum that backward has made for each parameter: in its `.grad`, or apart from it in a wider dtype.
class WindowSums {
 public:
  /// Sums by name: `grad.0.weight`, or `sum.0.weight` if it is kept apart; for a sparse one its indices and values.
  using Named = std::map<std::string, at::Tensor>;
  /// Saved sums of each parameter; undefined if there is none.
  struct Loaded {
    std::vector<at::Tensor> in_grad, apart;
  };

  /// Sets the parameters, each once however often it is listed. Parameters that stay keep their sums.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }

  const at::Tensor& operator[](std::size_t place) const {
    return apart_[place].defined() ? apart_[place] : parameters_[place].grad();
  }
  /// Sets the sum of a parameter without one.
  void set(std::size_t place, const at::Tensor& sum);
  /// Drops the sum of a parameter.
  void forget(std::size_t place);
  /// The places of parameters with a sum.
  std::vector<std::size_t> places() const;

  /// Adds a gradient to its sum that is kept apart; if there is none, a gradient narrower than `dtype` begins one in
  /// that dtype. Frees `.grad`, so that the next backward need not add to it.
  void fold(std::size_t place, std::optional<at::ScalarType> dtype);
  /// Moves all sums out of `.grad`, where other code could clear them.
  void move_apart();
  /// Moves sums that are kept apart to `.grad` once they have their true size: any code may read and change them there.
  void become_gradients();
  /// Returns the sums of these parameters, and moves those that are kept apart.
  WindowSums part(const std::vector<std::size_t>& places);

  Named named(const NameOf& name_of) const;
  /// Checks what `named` returned; `lenient`: leaves out what does not fit.
  Loaded take(Named named, const NameOf& name_of, bool lenient) const;
  void set(const Loaded& sums);
  Loaded copies() const;

 private:
  std::vector<at::Tensor> parameters_, apart_;  // apart: if undefined, `.grad` is the sum
};

class Shards;

/// Multiplies `factor` by the coefficient that clips gradients of this norm to `max_norm`.
void clip_by(Factor& factor, const at::Tensor& norm, double max_norm);

/// The object behind a `Gradients` handle: one window's gradients, their deferred factor, and their measured norms.
///
/// It holds gradients only if they are sums of its own, so gradients that the user clears are freed at once.
class WindowGradients {
 public:
  /// The stages of a window: open, sending, complete, applied, spoiled, closed.
  enum class State {
    open,      // more micro-batches are to come
    sending,   // other processes may be adding to its sums
    complete,  // has all micro-batches, including those of other processes
    applied,   // the gradients have their true size
    spoiled,   // an exception left the gradients incomplete
    closed     // stepped, skipped or discarded
  };

  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { sums_.set_parameters(parameters); }

  // Functions for the accumulator that owns the window, and for the exchange of its sums with other processes.
  WindowSums& sums() { return sums_; }
  const std::vector<at::Tensor>& all_parameters() const { return sums_.parameters(); }
  void fold_into_sum(std::size_t place, std::optional<at::ScalarType> dtype);
  void fold_into_sums(std::optional<at::ScalarType> dtype);
  double first_weight() const { return first_weight_; }
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_sending() { state_ = State::sending; }
  void set_complete(bool complete);
  void spoil() { was_applied_ = applied(), state_ = State::spoiled; }
  bool sending() const { return state_ == State::sending; }
  bool complete() const { return state_ == State::complete || state_ == State::applied; }
  bool applied() const { return state_ == State::applied || was_applied_; }
  bool spoiled() const { return state_ == State::spoiled; }
  /// Marks the sums so far as sent elsewhere: they cannot be read until the window is complete.
  void set_elsewhere() { place_ = Place::elsewhere; }
  bool elsewhere() const { return place_ == Place::elsewhere; }
  /// Replaces the window by this process's pieces, with their sums by parameter; undefined if there is none.
  void divide(const Shards& shards, const std::vector<at::Tensor>& sums);
  /// The norm of the gradients as they lie in memory, and whether all are finite: of this process's pieces, or of all
  /// processes'. Valid as long as they do not change.
  struct Measure {
    double norm = 0;
    bool finite = true;
  };
  Measure measure();
  /// Sets a function that waits for the other processes' measure; it runs when the measure is needed.
  void set_measure_of_all(std::function<Measure()> of_all) { measure_of_all_ = std::move(of_all); }
  void wait_for_measure();

  // Functions for stepping in backward.
  /// Makes a complete window of some of the parameters, with the same factor and mean.
  std::shared_ptr<WindowGradients> part(const std::vector<std::size_t>& places);
  /// The gradients that are not stepped yet: earlier micro-batches' sums that this backward did not reach.
  std::shared_ptr<WindowGradients> rest() { return part(sums_.places()); }
  bool stepped() const { return stepped_; }
  void set_stepped() { stepped_ = true; }
  void free();
  void close();
  /// Takes over the memory of a closed window's norms.
  void take_norm_memory(WindowGradients& from);

  // Functions for `Gradients`, which documents them.
  bool closed() const { return state_ == State::closed; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> raw() const;
  /// The number that `raw()` is still to be multiplied by: the factor and the mean over the window.
  Multiplier multiplier() const;
  at::Tensor norm();
  at::Tensor clip(double max_norm);
  const at::Tensor& norm_before_clipping() const { return norm_before_clipping_; }
  void set_norm_before_clipping(at::Tensor norm) { norm_before_clipping_ = std::move(norm); }
  at::Tensor found_inf();
  bool may_be_judged_on_device() const { return may_stay_on_device(factor_); }
  /// Waits for the device, the only function that does. A closed window keeps the answer it had at its step.
  bool overflowed();
  at::Tensor judge_on_device();
  bool judged() const { return overflowed_ || judged_on_device_.defined(); }
  bool judged_on_device() const { return !overflowed_ && judged_on_device_.defined(); }
  /// Applies the factor, and moves sums that are kept apart to `.grad`: any code may read and change them there.
  void apply();

 private:
  /// The place of its sums: here; elsewhere, sent to other processes; or divided, a piece in each process.
  enum class Place { here, elsewhere, divided };

  void check_open() const;
  void check_here() const;
  /// Returns the gradients, and measures their norms if one has changed.
  std::vector<at::Tensor> measured();
  bool is_measured(const std::vector<at::Tensor>& gradients) const;
  /// True if the measure is of all processes' pieces.
  bool measured_of_all() const { return place_ == Place::divided && norms_.defined(); }
  void scale(const at::Tensor& norm, const Multiplier& by) const;
  bool measured_by_kernel() const;
  /// Computes a WindowNorm, and `found_inf_` with it unless squares may overflow.
  at::Tensor window_norm(const std::vector<at::Tensor>& gradients, double max_norm);

  WindowSums sums_;
  Factor factor_;
  double first_weight_ = 1.0, total_weight_ = 1.0;
  State state_ = State::complete;
  bool was_applied_ = false;  // before it was spoiled
  Place place_ = Place::here;
  bool stepped_ = false;                     // some parameters, whose gradients are gone
  std::vector<SeenTensor> measured_;         // the gradients that the next two are of
  at::Tensor norms_, found_inf_;             // of the gradients as they lie in memory
  StreamMemory norm_memory_;                 // may hold the norms
  std::function<Measure()> measure_of_all_;  // while set, the norms are of this process's pieces
  at::Tensor norm_, verdict_;                // the last norm; the finding for a scaler, even if the user mends .grad
  at::Tensor norm_before_clipping_;
  std::optional<bool> overflowed_;
  at::Tensor judged_on_device_;
};

struct Multiplier;
class StreamMemory;

/// Passes over lists of gradients of any device, dtype and layout, none of which waits for a device.

/// Returns the `p`-norm of each non-empty gradient as one float64 tensor, on a device if any gradient is.
///
/// They are summed in float64, where squares of finite 16- and 32-bit numbers stay finite. On a device they may lie in
/// `memory`: see `l2_norms_on_device`.
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory& memory);
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p);

/// Returns the L2 norm of a few norms.
at::Tensor l2_norm_of(const at::Tensor& norms);

/// Returns true if squares of finite gradients may overflow, as in float64.
bool squares_may_overflow(const std::vector<at::Tensor>& gradients);

/// Returns 1 if an element is not finite, else 0: 0-dim float32. `l2_norms` is `norms(gradients, 2)`.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms);

/// Multiplies in place. The factor has float32 precision for 16-bit gradients, too.
void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by);

/// The number that gradients are multiplied by: a host part, and a part that is known on a device only.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined
  /// Tensors of a step that the device may skip, else undefined. `found_inf`: 0-dim float32, 1 if it skips the step;
  /// `skipped_steps`: the number of skipped steps that the host does not know of.
  at::Tensor found_inf = {}, skipped_steps = {};

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// Returns the whole product as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const;

  /// Returns a copy with all tensors on this device.
  Multiplier moved_to(at::Device device) const;
  /// Returns pointers for kernels of the device that holds all tensors. They are valid as long as this object.
  DeviceMultiplier pointers() const;
};

/// Hashes a few bytes of a tensor's memory, which most likely shows a write to the tensor, even one that bypasses
/// LibTorch's version counters. 0 if the host cannot read the memory without waiting.
std::uint64_t sample_of(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/gradients.ipp>
#endif
