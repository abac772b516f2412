// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device_norms.hpp>
#include <gradaccum/detail/window/gradient_watch.hpp>
#include <gradaccum/detail/window/window_sums.hpp>
#include <gradaccum/factor.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class Shards;

/// Multiplies by what makes gradients with this norm ones with `max_norm` at most.
void clip_by(Factor& factor, const at::Tensor& norm, double max_norm);

/// What `Gradients` is a handle of: one window's gradients, their deferred factor, and what has been measured of them.
///
/// It holds parameters, and gradients only where they are sums of its own: those that the user clears are free at once.
class WindowGradients {
 public:
  /// How far a window has come.
  enum class State {
    open,      // micro-batches are to come
    sending,   // other processes may be at its sums
    complete,  // all micro-batches are in it, those of other processes, too
    applied,   // its gradients have their true size
    spoiled,   // an exception left them incomplete
    closed     // stepped, skipped or discarded
  };

  explicit WindowGradients(const std::vector<at::Tensor>& parameters) { sums_.set_parameters(parameters); }

  // For the accumulator that owns the window, and what exchanges its sums with other processes.
  WindowSums& sums() { return sums_; }
  const std::vector<at::Tensor>& all_parameters() const { return sums_.parameters(); }
  void fold_into_sum(std::size_t place, std::optional<at::ScalarType> dtype);
  void fold_into_sums(std::optional<at::ScalarType> dtype);
  double first_weight() const { return first_weight_; }
  void set_weights(double first, double total) { first_weight_ = first, total_weight_ = total; }
  void set_sending() { state_ = State::sending; }
  void set_complete(bool complete);
  void spoil() { state_ = State::spoiled; }
  bool sending() const { return state_ == State::sending; }
  bool complete() const { return state_ == State::complete || applied(); }
  bool applied() const { return state_ == State::applied; }
  bool spoiled() const { return state_ == State::spoiled; }
  /// The sums of micro-batches so far are elsewhere: until the window is complete there is nothing to see.
  void set_elsewhere() { place_ = Place::elsewhere; }
  bool elsewhere() const { return place_ == Place::elsewhere; }
  /// The window is of this process's pieces from now on, with their sums, by parameter; undefined where there is none.
  void divide(const Shards& shards, const std::vector<at::Tensor>& sums);
  /// Its norm as it lies in memory, and whether all is finite: of these pieces, then of those of all processes, which
  /// hold while these do not change.
  struct Measure {
    double norm = 0;
    bool finite = true;
  };
  Measure measure();
  /// `of_all` waits for the other processes: when it is asked for, or now.
  void set_measure_of_all(std::function<Measure()> of_all) { measure_of_all_ = std::move(of_all); }
  void wait_for_measure();

  // For stepping in backward.
  /// Some of the parameters as a window of their own, complete, with the same factor and mean.
  std::shared_ptr<WindowGradients> part(const std::vector<std::size_t>& places);
  /// What has not been stepped: for those without a gradient in that backward, of earlier micro-batches.
  std::shared_ptr<WindowGradients> rest() { return part(sums_.places()); }
  bool stepped() const { return stepped_; }
  void set_stepped() { stepped_ = true; }
  void free();
  void close();
  /// Takes over the memory of a closed window's norms.
  void take_norm_memory(WindowGradients& from);

  // For `Gradients`, whose documentation these share.
  bool closed() const { return state_ == State::closed; }
  double items() const { return total_weight_; }
  Factor& factor() { return check_open(), factor_; }
  bool must_be_finite() const { return finite_required(factor_); }
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> raw() const;
  /// What `raw()` is yet to be multiplied by: the factor, and the mean over the window.
  Multiplier multiplier() const;
  at::Tensor norm();
  at::Tensor clip(double max_norm);
  const at::Tensor& norm_before_clipping() const { return norm_before_clipping_; }
  void set_norm_before_clipping(at::Tensor norm) { norm_before_clipping_ = std::move(norm); }
  at::Tensor found_inf();
  bool may_be_judged_on_device() const { return may_stay_on_device(factor_); }
  /// The one place where the host waits for the device. A closed window answers what it said when it was stepped.
  bool overflowed();
  at::Tensor judge_on_device();
  bool judged() const { return overflowed_ || judged_on_device_.defined(); }
  bool judged_on_device() const { return !overflowed_ && judged_on_device_.defined(); }
  /// Sums that were kept apart become `.grad` once they have their true size: any code may read and change them there.
  void apply();

 private:
  /// Where its sums are: in this process, given away to others, or in all of them, of which it has its pieces.
  enum class Place { here, elsewhere, divided };

  void check_open() const;
  void check_here() const;
  /// The gradients, with their norms measured; anew only where one has changed.
  std::vector<at::Tensor> measured();
  bool is_measured(const std::vector<at::Tensor>& gradients) const;
  /// What has been measured is of all processes' pieces.
  bool measured_of_all() const { return place_ == Place::divided && norms_.defined(); }
  void scale(const at::Tensor& norm, const Multiplier& by) const;
  bool measured_by_kernel() const;
  /// A WindowNorm; whether all is finite is known then, too, unless squares may overflow.
  at::Tensor window_norm(const std::vector<at::Tensor>& gradients, double max_norm);

  WindowSums sums_;
  Factor factor_;
  double first_weight_ = 1.0, total_weight_ = 1.0;
  State state_ = State::complete;
  Place place_ = Place::here;
  bool stepped_ = false;                     // some of the parameters, and their gradients are gone
  std::vector<SeenTensor> measured_;         // the gradients of which these are:
  at::Tensor norms_, found_inf_;             // as they lie in memory
  StreamMemory norm_memory_;                 // in which norms may lie
  std::function<Measure()> measure_of_all_;  // not asked yet: these are of this process's pieces
  at::Tensor norm_, verdict_;                // the last answer; what a scaler must hear, even if the user mends .grad
  at::Tensor norm_before_clipping_;
  std::optional<bool> overflowed_;
  at::Tensor judged_on_device_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/window_gradients.ipp>
#endif
