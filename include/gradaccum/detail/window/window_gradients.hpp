// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/grad_ready_hooks.hpp>
#include <gradaccum/detail/window/multiplier.hpp>
#include <gradaccum/detail/window/seen_tensor.hpp>
#include <gradaccum/detail/window/window.hpp>
#include <gradaccum/detail/window/window_sums.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

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
    closed     // stepped, skipped, rejected or discarded
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
  void set_weights(const Window& counted) { set_weights(counted.first_weight(), counted.total_weight()); }
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
  void divide(const std::vector<at::Tensor>& own_pieces, const std::vector<at::Tensor>& sums);
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
  at::Tensor found_inf();
  bool may_be_judged_on_device() const { return may_stay_on_device(factor_) && !rejected_; }
  /// Synchronizes; no other function does. A closed window returns the result from its step. `beside`: a 0-dim float64
  /// tensor that is replaced by a host copy, read in the same wait if it is on the same device.
  bool overflowed(at::Tensor* beside = nullptr);
  at::Tensor judge_on_device() { return judged_on_device_ = found_inf(); }
  bool judged() const { return overflowed_ || judged_on_device_.defined(); }
  bool judged_on_device() const { return !overflowed_ && judged_on_device_.defined(); }
  void reject(std::string why);
  const std::optional<std::string>& rejected() const { return rejected_; }
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
  std::optional<std::string> rejected_;  // the reason
  at::Tensor judged_on_device_;
};

/// Multiplies `factor` by the coefficient that clips gradients of this norm to `max_norm`.
void clip_by(Factor& factor, const at::Tensor& norm, double max_norm);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/window_gradients.ipp>
#endif
