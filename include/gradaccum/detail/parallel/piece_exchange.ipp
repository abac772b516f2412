// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/piece_exchange.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>
#include <gradaccum/detail/window/shards.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <deque>
#include <utility>

namespace gradaccum::detail {

/// Pieces of one rank that are sent together, as bytes.
struct Parcel {
  int rank = 0;
  std::vector<at::Tensor> pieces = {};
  std::int64_t bytes = 0;
  at::Tensor sent = {};  ///< the memory that is sent
  Links::Pending pending = nullptr;

  bool takes(const at::Tensor& piece, std::int64_t bucket_bytes) const {
    return pieces[0].device() == piece.device() &&
           bytes + static_cast<std::int64_t>(piece.nbytes()) <= std::min(alone_from, bucket_bytes);
  }
  void add(const at::Tensor& piece) {
    pieces.push_back(piece);
    bytes += static_cast<std::int64_t>(piece.nbytes());
  }
  bool is_copied() const { return !sent.is_alias_of(pieces[0]); }
  /// Calls `body` with each piece and its part of `sent`, if pieces are copied together.
  void for_each(c10::function_ref<void(const at::Tensor& piece, const at::Tensor& bytes)> body) const;
  void pack(bool is_sender);
  void unpack() const;
};

/// Returns the parcels of each rank, by rank.
GRADACCUM_INLINE std::vector<std::vector<Parcel>> parcels_of(const Shards& shards,
                                                             const std::vector<std::size_t>& places,
                                                             std::int64_t bucket_bytes) {
  std::vector<std::vector<Parcel>> all(static_cast<std::size_t>(shards.world_size()));
  for (auto place : places)
    for (auto& piece : shards.pieces(place)) {
      if (piece.size() == 0) continue;
      auto& parcels = all[static_cast<std::size_t>(piece.rank)];
      const auto tensor = shards.part(place, piece, shards.parameters()[place]).variable_data();  // own version counter
      const auto open = std::find_if(parcels.begin(), parcels.end(),
                                     [&](const Parcel& parcel) { return parcel.takes(tensor, bucket_bytes); });
      (open == parcels.end() ? parcels.emplace_back(Parcel{.rank = piece.rank}) : *open).add(tensor);
    }
  return all;
}

GRADACCUM_INLINE void Parcel::for_each(
    c10::function_ref<void(const at::Tensor& piece, const at::Tensor& bytes)> body) const {
  std::int64_t from = 0;
  for (auto& piece : pieces) {
    const auto size = static_cast<std::int64_t>(piece.nbytes());
    body(piece, sent.narrow(0, from, size));
    from += size;
  }
}

GRADACCUM_INLINE void Parcel::pack(bool is_sender) {
  if (pieces.size() == 1) {
    sent = pieces[0].contiguous();  // the piece itself, if it is contiguous
    return;
  }
  sent = at::empty({bytes}, pieces[0].options().dtype(at::kByte));
  if (is_sender) for_each([](auto& piece, auto& part) { part.copy_(bytes_of_row(piece.contiguous())); });
}

GRADACCUM_INLINE void Parcel::unpack() const {
  if (pieces.size() == 1) {
    if (is_copied()) pieces[0].copy_(sent);
    return;
  }
  for_each([](auto& piece, auto& part) {
    const auto row = piece.is_contiguous() ? piece : at::empty(piece.sizes(), piece.options());
    bytes_of_row(row).copy_(part);
    if (!row.is_same(piece)) piece.copy_(row);
  });
}

/// The parcels in flight, the oldest first.
class ParcelsUnderWay {
 public:
  ParcelsUnderWay(Links& links, Links::Line line, const Shards& shards) : links_(links), line_(line), shards_(shards) {}

  void send(Parcel parcel) {
    parcel.pack(parcel.rank == shards_.rank());
    parcel.pending = links_.begin_broadcast(line_, parcel.sent, parcel.rank);
    copied_ += parcel.is_copied() ? parcel.bytes : 0;
    under_way_.push_back(std::move(parcel));
  }
  void receive() {
    const auto parcel = std::move(under_way_.front());
    under_way_.pop_front();
    links_.wait(parcel.pending, "the parameters of an update");
    if (parcel.rank != shards_.rank()) parcel.unpack();
    copied_ -= parcel.is_copied() ? parcel.bytes : 0;
  }
  bool empty() const { return under_way_.empty(); }
  std::int64_t copied() const { return copied_; }  ///< bytes

 private:
  Links& links_;
  Links::Line line_;
  const Shards& shards_;
  std::deque<Parcel> under_way_;
  std::int64_t copied_ = 0;
};

GRADACCUM_INLINE void exchange_pieces(Links& links, Links::Line line, const Shards& shards,
                                      const std::vector<std::size_t>& places, std::int64_t bucket_bytes) {
  const at::NoGradGuard no_grad;
  ParcelsUnderWay under_way(links, line, shards);
  auto parcels = parcels_of(shards, places, bucket_bytes);
  std::size_t most = 0;
  for (auto& of_rank : parcels) most = std::max(most, of_rank.size());
  for (std::size_t i = 0; i < most; ++i)
    for (auto& of_rank : parcels) {  // takes turns, which keeps all links busy in both directions
      if (i >= of_rank.size()) continue;
      while (!under_way.empty() && under_way.copied() + of_rank[i].bytes > bucket_bytes) under_way.receive();
      under_way.send(std::move(of_rank[i]));
    }
  while (!under_way.empty()) under_way.receive();
  for (auto place : places)
    shards.parameters()[place].unsafeGetTensorImpl()->bump_version();  // LibTorch does not count a broadcast as a write
}

}  // namespace gradaccum::detail
