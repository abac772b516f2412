// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/links.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace gradaccum::detail {

class Shards;

/// After a step of shards: each rank sends the pieces of some parameters that it has stepped to all others. A large
/// piece goes from where it lies; small ones of a rank are copied together, of which at most `bucket_bytes` are under
/// way.
class PieceExchange {
 public:
  /// Begins to send them all. By now the others' pieces may change at any time.
  PieceExchange(std::shared_ptr<Links> links, Links::Line line, std::shared_ptr<const Shards> shards,
                const std::vector<std::size_t>& places, std::int64_t bucket_bytes);
  PieceExchange(const PieceExchange&) = delete;
  PieceExchange& operator=(const PieceExchange&) = delete;
  ~PieceExchange();

  /// The parameter in this place has all its pieces, and this rank's piece of it is sent.
  void wait_for(std::size_t place);
  /// The same of all.
  void wait();

 private:
  struct Parcel;

  std::vector<std::vector<Parcel>> parcels_of_ranks(const std::vector<std::size_t>& places) const;
  void send(Parcel parcel);
  void receive();

  std::shared_ptr<Links> links_;
  Links::Line line_;
  std::shared_ptr<const Shards> shards_;
  std::int64_t bucket_bytes_;
  std::deque<Parcel> under_way_;           // the oldest first
  std::vector<std::size_t> of_parameter_;  // how many of these have a piece of it
  std::int64_t copied_ = 0;                // bytes
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/piece_exchange.ipp>
#endif
