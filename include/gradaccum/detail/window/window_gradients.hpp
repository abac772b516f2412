// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace gradaccum::detail {

class NameOf;

/// Returns true if both lists hold the same tensors, not merely equal ones, in the same order.
inline bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return x.is_same(y); });
}

/// A record of a tensor, possibly undefined, that does not keep its memory. It holds a weak reference rather than an
/// address, since new tensors often reuse the address of a freed one.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()), defined_(tensor.defined()) {
    if (defined_) layout_ = tensor.layout(), version_ = version_of(tensor);
  }

  bool defined() const { return defined_; }
  /// Returns true for the recorded tensor, even if it was written to.
  bool same(const at::Tensor& tensor) const {
    // No other tensor has this address: a weak reference prevents its target's memory from being reused.
    return tensor.defined() == defined_ && (!defined_ || impl_._unsafe_get_target() == tensor.unsafeGetTensorImpl());
  }
  /// Returns true for the recorded tensor if its version counter shows no write since. Does not synchronize.
  bool untouched(const at::Tensor& tensor) const {
    return same(tensor) && (!defined_ || version_of(tensor) == version_);
  }
  /// Returns true if another tensor of the same layout has replaced the recorded one.
  bool replaced(const at::Tensor& tensor) const {
    return defined_ && tensor.defined() && !same(tensor) && tensor.layout() == layout_;
  }
  /// Returns true for the recorded tensor if it was written to exactly once since, as by a backward that adds to it.
  bool added_to(const at::Tensor& tensor) const {
    return defined_ && same(tensor) && version_of(tensor) == version_ + 1;
  }
  /// Returns true for the recorded tensor if it does not share its version counter, as parts of one gradient do.
  bool counts_alone(const at::Tensor& tensor) const {
    return defined_ && same(tensor) && tensor.unsafeGetTensorImpl()->unique_version();
  }

 private:
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
  bool defined_ = false;
  at::Layout layout_ = at::kStrided;
  std::uint32_t version_ = 0;
};

/// The sum of each parameter's gradients: in its `.grad`, or separately in a wider dtype.
class WindowSums {
 public:
  /// Sums by name: `grad.0.weight`, or `sum.0.weight` if stored separately; for a sparse sum its indices and values.
  using Named = std::map<std::string, at::Tensor>;
  /// Saved sums of each parameter; undefined if there is none.
  struct Loaded {
    std::vector<at::Tensor> in_grad, apart;
  };

  /// Sets the parameters, without duplicates. Parameters that were set before keep their sums.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }

  const at::Tensor& operator[](std::size_t place) const {
    return apart_[place].defined() ? apart_[place] : parameters_[place].grad();
  }
  /// Sets the sum of a parameter without one.
  void set(std::size_t place, const at::Tensor& sum) {
    const bool apart = sum.scalar_type() != parameters_[place].scalar_type();
    (apart ? apart_[place] : parameters_[place].mutable_grad()) = sum;
  }
  void forget(std::size_t place) { apart_[place].reset(), parameters_[place].mutable_grad().reset(); }
  std::vector<std::size_t> places() const {
    std::vector<std::size_t> places;
    for (std::size_t place = 0; place < size(); ++place)
      if ((*this)[place].defined()) places.push_back(place);
    return places;
  }

  /// Adds a gradient to its separate sum; if there is none, a gradient narrower than `dtype` starts one in that dtype.
  /// Frees `.grad`, so that the next backward does not add to it.
  void fold(std::size_t place, std::optional<at::ScalarType> dtype);
  /// Moves all sums out of `.grad`, where other code could clear them.
  void move_apart() {
    for (std::size_t place = 0; place < size(); ++place) {
      auto& gradient = parameters_[place].mutable_grad();
      if (!gradient.defined() || apart_[place].defined()) continue;
      apart_[place] = gradient.detach();
      gradient.reset();
    }
  }
  /// Moves separate sums to `.grad` after the factor was applied. Any code may read and change them there.
  void become_gradients() {
    for (std::size_t i = 0; i < size(); ++i) {
      if (!apart_[i].defined()) continue;
      parameters_[i].mutable_grad() = apart_[i].to(parameters_[i].scalar_type());
      apart_[i].reset();
    }
  }
  /// Returns the sums of these parameters. Moves separate sums out of this object.
  WindowSums part(const std::vector<std::size_t>& places) {
    WindowSums part;
    for (auto place : places) {
      part.parameters_.push_back(parameters_[place]);
      part.apart_.push_back(std::move(apart_[place]));
    }
    return part;
  }

  Named named(const NameOf& name_of) const;
  /// Checks a result of `named`. `lenient`: leaves out sums that do not fit.
  Loaded load(Named named, const NameOf& name_of, bool lenient) const;
  void set(const Loaded& sums) {
    for (std::size_t i = 0; i < size(); ++i) parameters_[i].mutable_grad() = sums.in_grad[i];
    apart_ = sums.apart;
  }
  Loaded copies() const;

 private:
  std::vector<at::Tensor> parameters_, apart_;  // apart_: separate sums; if undefined, `.grad` is the sum
};

/// The division of an optimizer's parameters among ranks. Each rank steps, and keeps moments of, its own pieces only.
///
/// A parameter is cut along its memory into a piece per rank, in multiples of `unit` except at its end. A parameter
/// that is too small for that, or not contiguous, goes to one rank as a whole; so do all parameters of an optimizer
/// whose step needs whole parameters. The largest are divided first, and remainders go to the rank with the fewest
/// bytes. The division depends on the parameters only, so it is equal on all ranks.
class Shards {
 public:
  /// A range of a parameter's elements in memory, and its rank.
  struct Piece {
    int rank = 0;
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
  };
  static constexpr std::int64_t unit = 4096;  ///< elements: whole blocks of 8-bit moments, whole pages of memory

  Shards(std::vector<at::Tensor> parameters, bool may_be_cut, int rank, int world_size);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  std::size_t number_of_pieces() const {
    std::size_t number = 0;
    for (auto& pieces : pieces_) number += pieces.size();
    return number;
  }
  /// Returns the pieces of a parameter in memory order, which is the order of ranks if it is cut.
  const std::vector<Piece>& pieces(std::size_t place) const { return pieces_[place]; }
  bool is_cut(std::size_t place) const { return pieces_[place].size() > 1; }
  bool any_is_cut() const { return number_of_pieces() > size(); }
  /// Returns this rank's piece, without elements if it has none.
  Piece own_piece(std::size_t place) const {
    const auto& own = pieces(place)[is_cut(place) ? static_cast<std::size_t>(rank_) : 0];
    return own.rank == rank_ ? own : Piece{rank_, 0, 0};
  }
  /// Returns this rank's piece as a tensor that shares the parameter's memory; the parameter itself if it is not cut.
  /// It is always the same tensor, so that an optimizer can keep state for it.
  const at::Tensor& own(std::size_t place) const { return own_[place]; }
  const std::vector<at::Tensor>& own() const { return own_; }
  /// Clears the gradients of pieces: they are views that no other code can clear.
  void clear_gradients() {
    for (std::size_t place = 0; place < size(); ++place)
      if (!own_[place].is_same(parameters_[place])) own_[place].mutable_grad().reset();
  }
  /// Returns a piece of a tensor of the parameter's size: the tensor itself if the parameter is not cut, a view if it
  /// is contiguous.
  at::Tensor part(std::size_t place, const Piece& piece, const at::Tensor& of) const {
    return is_cut(place) ? of.detach().reshape({-1}).narrow(0, piece.begin, piece.size()) : of;
  }

  void check_parameters(const std::vector<at::Tensor>& parameters) const;
  /// Throws if the optimizer's parameters or their memory have changed, or if it has state of whole parameters.
  void check(const torch::optim::Optimizer& optimizer) const;

  /// Runs `work`, after `check`, while the optimizer's groups hold `own` in place of the parameters.
  void with_own(torch::optim::Optimizer& optimizer, c10::function_ref<void()> work);

 private:
  static std::vector<Piece> cut(std::int64_t elements, const std::vector<std::size_t>& ranks);
  void divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank);
  void swap_groups(torch::optim::Optimizer& optimizer) noexcept;

  std::vector<at::Tensor> parameters_, own_;
  std::vector<std::vector<Piece>> pieces_;
  int rank_, world_size_;
};

/// The factor of gradients: a part that the host knows, and a part that only a device knows.
struct Multiplier {
  double numerator = 1.0, denominator = 1.0;
  at::Tensor device_numerator = {}, device_denominator = {};  ///< 0-dim float64, or undefined
  /// Tensors of a step that the device may skip, else undefined. `found_inf`: 0-dim float32, 1 if it skips the step;
  /// `skipped_steps`: the number of skipped steps that the host does not know yet.
  at::Tensor found_inf = {}, skipped_steps = {};

  bool on_host() const { return !device_numerator.defined() && !device_denominator.defined(); }
  double host() const { return numerator / denominator; }
  bool is_one() const { return on_host() && host() == 1; }

  /// Returns the whole product as a 0-dim float64 tensor on `device`.
  at::Tensor on(at::Device device) const;

  Multiplier moved_to(at::Device device) const;
  /// Returns pointers for kernels of the device that holds all tensors. They are valid as long as this object.
  DeviceMultiplier pointers() const;
};

/// The object behind a `Gradients` handle: one window's gradients, their deferred factor, and their norms. It holds
/// only separate sums, not `.grad`, so gradients that the user clears are freed immediately.
class WindowGradients : public std::enable_shared_from_this<WindowGradients> {
 public:
  enum class State {
    open,      // more micro-batches are to come
    sending,   // other ranks may be adding to its sums
    complete,  // has all micro-batches, including other ranks'
    applied,   // the factor was applied to the gradients
    spoiled,   // an exception left the gradients incomplete
    closed     // stepped, skipped or discarded
  };

  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { sums_.set_parameters(parameters); }

  Gradients handle() { return Gradients(shared_from_this()); }

  // Functions for the accumulator that owns the window, and for the exchange of its sums with other ranks.
  WindowSums& sums() { return sums_; }
  const std::vector<at::Tensor>& all_parameters() const { return sums_.parameters(); }
  std::optional<at::ScalarType> accumulate_in = {};  ///< dtype of separate sums, for narrower gradients
  void fold_into_sum(std::size_t place) {
    if (!applied()) sums_.fold(place, accumulate_in);
  }
  void fold_into_sums() {
    for (std::size_t place = 0; place < sums_.size(); ++place) fold_into_sum(place);
  }
  double first_weight() const { return first_weight_; }
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_sending() { state_ = State::sending; }
  void set_complete(bool complete) {
    if (!complete && !sending() && !applied()) state_ = State::open;
    if (complete && !applied()) state_ = State::complete;
  }
  void spoil() { was_applied_ = applied(), state_ = State::spoiled; }
  bool sending() const { return state_ == State::sending; }
  bool complete() const { return state_ == State::complete || state_ == State::applied; }
  bool applied() const { return state_ == State::applied || was_applied_; }
  bool spoiled() const { return state_ == State::spoiled; }
  /// Marks the sums so far as sent to other ranks: they cannot be read until the window is complete.
  void set_elsewhere() { place_ = Place::elsewhere; }
  bool elsewhere() const { return place_ == Place::elsewhere; }
  /// Replaces the window by this rank's pieces, with their sums by parameter; undefined if there is none.
  void divide(const Shards& shards, const std::vector<at::Tensor>& sums);
  /// The norm of the gradients before the factor, and whether all are finite: for this rank's pieces, or for all.
  struct Measure {
    double norm = 0;
    bool finite = true;
  };
  Measure measure();
  /// Sets a function that waits for the other ranks' measures. It runs when the result is needed.
  void set_measure_of_all(std::function<Measure()> of_all) { measure_of_all_ = std::move(of_all); }
  void wait_for_measure();

  // Functions for stepping in backward.
  /// Returns a complete window of some of the parameters, with the same factor and mean, after checking it.
  std::shared_ptr<WindowGradients> part(const std::vector<std::size_t>& places);
  /// Returns the gradients that are not stepped yet: earlier micro-batches' sums that this backward did not reach.
  std::shared_ptr<WindowGradients> rest() { return part(sums_.places()); }
  /// Sets a function that checks each part before its step.
  void set_look_at_part(std::function<void(WindowGradients& part)> look) { look_at_part_ = std::move(look); }
  bool stepped() const { return stepped_; }
  void set_stepped() { stepped_ = true; }
  void close() { state_ = State::closed, sums_ = {}; }
  /// Takes the settings of a closed window, and the memory of its norms.
  void follow(WindowGradients& from) {
    accumulate_in = from.accumulate_in;
    if (from.measure_of_all_) return;
    from.norms_.reset();
    norm_memory_ = std::move(from.norm_memory_);
  }

  // Functions for `Gradients`, which documents them.
  bool closed() const { return state_ == State::closed; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  std::vector<at::Tensor> parameters() const {
    check_here();
    std::vector<at::Tensor> with_gradient;
    for (auto place : sums_.places()) with_gradient.push_back(all_parameters()[place]);
    return with_gradient;
  }
  std::vector<at::Tensor> raw() const {
    check_here();
    std::vector<at::Tensor> gradients;
    for (auto place : sums_.places()) gradients.push_back(sums_[place]);
    return gradients;
  }
  /// Returns the number by which `raw()` must be multiplied: the factor and the mean over the window.
  Multiplier multiplier() const;
  at::Tensor norm();
  at::Tensor clip(double max_norm);
  const at::Tensor& norm_before_clipping() const { return norm_before_clipping_; }
  void set_norm_before_clipping(at::Tensor norm) { norm_before_clipping_ = std::move(norm); }
  at::Tensor found_inf();
  bool may_be_judged_on_device() const { return may_stay_on_device(factor_); }
  /// Synchronizes; no other function does. A closed window returns the result from its step. `beside`: a 0-dim float64
  /// tensor that is replaced by a host copy, read in the same wait if it is on the same device.
  bool overflowed(at::Tensor* beside = nullptr);
  at::Tensor judge_on_device() { return judged_on_device_ = found_inf(); }
  bool judged() const { return overflowed_ || judged_on_device_.defined(); }
  bool judged_on_device() const { return !overflowed_ && judged_on_device_.defined(); }
  /// Applies the factor, and moves separate sums to `.grad`. Any code may read and change them there.
  void apply();

 private:
  /// The location of the sums: here; elsewhere, sent to other ranks; or divided, with a piece on each rank.
  enum class Place { here, elsewhere, divided };

  void check_open() const;
  void check_here() const;
  /// Returns the gradients, and measures their norms if one has changed.
  std::vector<at::Tensor> measured();
  bool is_measured(const std::vector<at::Tensor>& gradients) const {
    return std::equal(measured_.begin(), measured_.end(), gradients.begin(), gradients.end(),
                      [](const SeenTensor& seen, const at::Tensor& gradient) { return seen.untouched(gradient); });
  }
  /// Returns true if the measure is of all ranks' pieces.
  bool measured_of_all() const { return place_ == Place::divided && norms_.defined(); }
  void scale(const at::Tensor& norm, const Multiplier& by) const;
  bool measured_by_kernel() const { return device_kernels() && norms_.is_cuda(); }
  /// Computes a WindowNorm, and `found_inf_` with it unless squares may overflow.
  at::Tensor window_norm(const std::vector<at::Tensor>& gradients, double max_norm);

  WindowSums sums_;
  Factor factor_;
  double first_weight_ = 1.0, total_weight_ = 1.0;
  State state_ = State::complete;
  bool was_applied_ = false;  // the state before `spoiled` was `applied`
  Place place_ = Place::here;
  bool stepped_ = false;                     // some parameters were stepped, and their gradients freed
  std::vector<SeenTensor> measured_;         // the gradients of the next two members
  at::Tensor norms_, found_inf_;             // of the gradients before the factor
  StreamMemory norm_memory_;                 // may hold the norms
  std::function<Measure()> measure_of_all_;  // while set, the norms are of this rank's pieces
  std::function<void(WindowGradients& part)> look_at_part_;
  at::Tensor norm_, verdict_;  // the last norm; the result for a scaler, even if the user repairs .grad
  at::Tensor norm_before_clipping_;
  std::optional<bool> overflowed_;
  at::Tensor judged_on_device_;
};

// Passes over lists of gradients of any device, dtype and layout, none of which synchronizes with a device.

/// Returns the `p`-norm of each non-empty gradient as one float64 tensor, on a device if any gradient is. It may be
/// stored in `memory`: see `l2_norms_on_device`. In float64 squares of finite 16- and 32-bit numbers are finite.
at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory* memory = nullptr);

at::Tensor l2_norm_of(const at::Tensor& norms);

/// Returns 1 if an element is not finite, else 0: 0-dim float32. `l2_norms` is `norms(gradients, 2)`.
at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms);

/// Multiplies in place. The factor has float32 precision for 16-bit gradients, too.
void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by);

/// A listener to the gradients that a backward pass computes, on a thread per device.
class GradReadyListener {
 public:
  explicit GradReadyListener(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}
  virtual ~GradReadyListener() = default;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Called when backward has added to a parameter's gradient, before hooks that were registered earlier.
  virtual void added(std::size_t /*place*/) {}
  virtual void grad_ready(std::size_t place) = 0;
  /// Returns true if a gradient must not arrive in parts that are added in place.
  virtual bool waits_for_whole() const { return true; }
  /// Ignores all later gradients. (After an exception other threads may still compute some.)
  void end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }

 protected:
  const std::vector<at::Tensor> parameters_;
  std::mutex mutex_;  // guards ended_, and the members of derived classes
  bool ended_ = false;
};

/// A scope for backward passes in which a listener is called for each gradient, after all other hooks.
class GradReadyScope {
 public:
  explicit GradReadyScope(std::shared_ptr<GradReadyListener> listener);
  GradReadyScope& operator=(GradReadyScope&&) = delete;
  ~GradReadyScope();

 private:
  std::shared_ptr<GradReadyListener> listener_;
  std::vector<const at::Tensor*> listening_;
};

/// Returns true if a listener, or another hook, needs whole gradients of this parameter.
bool is_waited_for(const at::Tensor& parameter);
/// Calls the listeners after a part has been added to this parameter's gradient.
void say_added(const at::Tensor& parameter);

/// Returns a hash of a few bytes of a tensor's memory, which very likely shows a write to the tensor, even one that
/// bypasses LibTorch's version counters. Returns 0 if the host cannot read the memory without waiting.
std::uint64_t sample_of(const at::Tensor& tensor);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/gradients.ipp>
#endif
