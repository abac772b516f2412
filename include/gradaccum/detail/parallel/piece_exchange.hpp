// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/links.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace gradaccum::detail {

class Shards;

/// Pieces of one rank that are sent together, as bytes.
struct Parcel {
  int rank = 0;
  std::vector<at::Tensor> pieces = {};
  std::int64_t bytes = 0;
  at::Tensor sent = {};  ///< where they lie on the way
  Links::Pending pending = nullptr;

  bool takes(const at::Tensor& piece, std::int64_t bucket_bytes) const;
  void add(const at::Tensor& piece);
  bool is_copied() const { return !sent.is_alias_of(pieces[0]); }
  /// Each with its place in `sent`, where they are copied.
  void for_each(c10::function_ref<void(const at::Tensor& piece, const at::Tensor& bytes)> body) const;
  void pack(bool is_sender);
  void unpack() const;
};

/// As shards are stepped: each rank sends the pieces that it has stepped to all others. A large piece goes from where
/// it lies; small ones of a rank are copied together, of which at most `bucket_bytes` are under way.
class PieceExchange {
 public:
  PieceExchange(Links& links, Links::Line line, const Shards& shards, std::int64_t bucket_bytes)
      : links_(links), line_(line), shards_(shards), bucket_bytes_(bucket_bytes) {}

  /// Begins to send the pieces of these parameters, which all ranks step next, in the same order.
  void send(const std::vector<std::size_t>& places);
  /// Waits: all ranks have all of what was sent.
  void finish();

 private:
  void send(Parcel parcel);
  void receive_oldest();

  Links& links_;
  const Links::Line line_;
  const Shards& shards_;
  const std::int64_t bucket_bytes_;
  std::deque<Parcel> under_way_ = {};  // the oldest first
  std::int64_t copied_ = 0;            // bytes of these
  std::vector<std::size_t> sent_ = {};
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/piece_exchange.ipp>
#endif
