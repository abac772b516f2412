// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/window/shards.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

/// Reduce-scatters gradients: each rank gets the sums of its own pieces, and keeps nothing else.
///
/// A gradient is freed when it is sent. One that fills its bucket alone is sent in place; smaller ones are copied
/// together, and those larger than a bucket are copied and sent in parts. Each rank receives the others' gradients of
/// its pieces and sums them in rank order. A gradient that is not split is reduced in place to its rank.
///
/// At most a bucket, or one gradient that is not split, is in flight, and takes as much memory again where it arrives:
/// the oldest must arrive before more is sent. So the end of a backward pass overlaps the next forward pass.
class GradientPieces final : public GradientExchange {
 public:
  GradientPieces(std::shared_ptr<Links> links, Links::Line line, std::shared_ptr<WindowGradients> window,
                 std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes,
                 std::shared_ptr<const Shards> shards);

  GRADACCUM_INLINE void end_round() override;
  /// Returns 1 for each parameter with a gradient in this round or an earlier one.
  GRADACCUM_INLINE std::vector<double> used() const override;
  GRADACCUM_INLINE double finish(const std::vector<double>& used_by, double weight_of_all) override;

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
    Links::Pending pending = nullptr;
    std::int64_t bytes() const { return static_cast<std::int64_t>(from.nbytes()); }
  };

  GRADACCUM_INLINE void send(const Bucket& bucket) override;
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/gradient_pieces.ipp>
#endif
