// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gradaccum::detail {

inline constexpr std::int64_t alone_from = std::int64_t{1} << 20;  ///< bytes at which copying costs more than a message

/// Gradients that are sent together, by their indices in the list of parameters.
struct Bucket {
  std::vector<std::size_t> places = {};
  at::TensorOptions options = {};  ///< dtype and device when sent
  std::int64_t elements = 0;
};

/// Returns a window's gradients in buckets of at most `bucket_bytes`, each of one dtype and device. A large gradient
/// gets its own bucket, and is not copied. Backward computes the last parameters first, so buckets are sorted by the
/// parameter that completes them: a bucket of small ones from many layers waits for the first of these. The result is
/// equal on all ranks, since it depends on the parameters alone, not on which of them have gradients.
///
/// Sends float16 as float32, in which the sum over ranks does not overflow.
std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters, std::optional<c10::ScalarType> accumulate_in,
                               std::int64_t bucket_bytes);

/// Sums one window's gradients over all ranks. Sends a bucket once it is complete and all earlier ones have been sent.
///
/// Gradients are sent multiplied by the window's first weight, because each rank has divided its own by it.
class GradientExchange : public GradReadyListener {
 public:
  GradientExchange(std::shared_ptr<Connections> links, Connections::Channel line,
                   std::shared_ptr<WindowGradients> window, std::optional<c10::ScalarType> accumulate_in,
                   std::int64_t bucket_bytes);

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  void grad_ready(std::size_t place) override;
  void end() override;

  /// Starts a round for another micro-batch, in which all buckets are sent again.
  void begin_round();
  /// Sends the remaining buckets.
  virtual void end_round();
  /// Sends all buckets without a backward pass, with zeros for missing gradients.
  void send_round() { begin_round(), end_round(); }
  /// True if a bucket of this window has been sent.
  bool begun() const { return begun_; }

  /// True if this rank has gradients that have not been sent. Valid between rounds only.
  bool has_unsent() const;
  /// Returns 1 for each parameter that has a gradient in this window on this rank.
  virtual std::vector<double> used() const;
  /// Waits, after the last round, until the window has the sums of the parameters that any rank uses. Returns their
  /// divisor: 1, or `weight_of_all` if there are float16 parameters, whose sums might overflow.
  virtual double finish(const std::vector<double>& used_by, double weight_of_all) = 0;

 protected:
  /// True if this rank has a gradient of this parameter. A window without weight has none, regardless of its memory.
  bool has_own(std::size_t place) const { return window_->first_weight() != 0 && window_->sums()[place].defined(); }
  /// Returns this rank's gradient in dense form; undefined if there is none.
  at::Tensor own(std::size_t place) const;
  /// Returns a bucket's only gradient as it is sent, multiplied by the weight. Works in place if possible.
  at::Tensor sent_alone(const Bucket& bucket) const;
  void times_weight(const at::Tensor& sum) const;
  double unit_of(double weight_of_all) const;
  virtual void send(const Bucket& bucket) = 0;

  const std::shared_ptr<Connections> connections_;
  const Connections::Channel line_;
  const std::shared_ptr<WindowGradients> window_;
  const std::vector<at::Tensor> parameters_;
  const std::optional<c10::ScalarType> accumulate_in_;
  const std::vector<Bucket> buckets_;

 private:
  void send_next();

  std::vector<std::optional<std::size_t>> bucket_of_;  // by parameter; none if it was frozen at the start
  std::vector<std::size_t> missing_;                   // missing gradients, by bucket
  std::vector<bool> arrived_;
  std::size_t sent_ = 0;  // buckets sent in this round
  bool begun_ = false, ended_ = false;
  std::mutex mutex_;
};

/// Reduce-scatters gradients: each rank gets the sums of its own pieces, and keeps nothing else.
///
/// A gradient is freed when it is sent. One that fills its bucket alone is sent in place; smaller ones are copied
/// together, and those larger than a bucket are copied and sent in parts. Each rank receives the others' gradients of
/// its pieces and sums them in rank order. A gradient that is not split is reduced in place to its rank.
///
/// At most a bucket, or one gradient that is not split, is in flight, and takes as much memory again where it arrives:
/// the oldest must arrive before more is sent. So the end of a backward pass overlaps the next forward pass.
class GradReduceScatter final : public GradientExchange {
 public:
  GradReduceScatter(std::shared_ptr<Connections> links, Connections::Channel line,
                    std::shared_ptr<WindowGradients> window, std::optional<c10::ScalarType> accumulate_in,
                    std::int64_t bucket_bytes, std::shared_ptr<const Shards> shards);

  void end_round() override;
  /// Returns 1 for each parameter with a gradient in this round or an earlier one.
  std::vector<double> used() const override;
  double finish(const std::vector<double>& used_by, double weight_of_all) override;

 private:
  /// The `index`-th of `count` equal parts of each piece in a bucket.
  struct Part {
    std::int64_t index = 0, count = 1;
    Shards::Piece of(const Shards::Piece& piece) const;
  };
  struct Sent {
    bool in_first_round;
    const Bucket& bucket;
    Part part;
    at::Tensor from, to = {}, own = {};  // own: this rank's part of `from`, if not sent
    Connections::Pending pending = nullptr;
    std::int64_t bytes() const { return static_cast<std::int64_t>(from.nbytes()); }
  };

  void send(const Bucket& bucket) override;
  void send_part(Sent sent);
  void begin_all_to_all(Sent& sent);
  std::vector<std::int64_t> sizes_by_rank(const Bucket& bucket, const Part& part) const;
  at::Tensor copied_by_rank(const Bucket& bucket, const Part& part, const std::vector<at::Tensor>& rows) const;
  void receive_oldest();
  void take(const Sent& sent);
  void take_whole(const Sent& sent);
  at::Tensor as_gradient(std::size_t place, at::Tensor sum) const;

  const std::shared_ptr<const Shards> shards_;
  const std::int64_t bucket_bytes_;
  std::deque<Sent> under_way_ = {};  // the oldest first
  std::int64_t bytes_under_way_ = 0;
  bool first_round_ = true;
  std::vector<double> used_;
  std::vector<at::Tensor> sums_;  // by parameter, flattened
};

/// All-reduces gradients: each rank gets the sums of all.
///
/// A gradient that fills its bucket alone is summed in place; others are copied together, and back.
class GradAllReduce final : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;

  double finish(const std::vector<double>& used_by, double weight_of_all) override;

 private:
  struct Sent {
    at::Tensor sum;
    Connections::Pending pending;
  };

  void send(const Bucket& bucket) override;
  at::Tensor sent_together(const Bucket& bucket) const;
  void put_back(const Bucket& bucket, const at::Tensor& sum, const std::vector<double>& used_by);

  std::vector<Sent> under_way_;  // by bucket
};

class Shards;

/// Sends the pieces that each rank has stepped to all others, after a sharded step of these parameters. A large piece
/// is sent in place; a rank's small pieces are copied together, with at most `bucket_bytes` of copies in flight.
void all_gather_parameters(Connections& links, Connections::Channel line, const Shards& shards,
                           const std::vector<std::size_t>& places, std::int64_t bucket_bytes);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/gradient_exchange.ipp>
#endif
