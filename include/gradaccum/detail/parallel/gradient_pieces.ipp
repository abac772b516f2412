// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gradient_pieces.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE GradientPieces::GradientPieces(std::shared_ptr<Links> links, Links::Line line,
                                                std::shared_ptr<WindowGradients> window,
                                                std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes,
                                                std::shared_ptr<const Shards> shards)
    : GradientExchange(std::move(links), line, std::move(window), accumulate_in, bucket_bytes),
      shards_(std::move(shards)),
      bucket_bytes_(bucket_bytes),
      used_(parameters_.size()),
      sums_(parameters_.size()) {
  shards_->check_parameters(parameters_);
}

GRADACCUM_INLINE Shards::Piece GradientPieces::Part::of(const Shards::Piece& piece) const {
  return {piece.rank, piece.begin + piece.size() * index / count, piece.begin + piece.size() * (index + 1) / count};
}

GRADACCUM_INLINE std::vector<std::int64_t> GradientPieces::sizes_by_rank(const Bucket& bucket, const Part& part) const {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(shards_->world_size()));
  for (auto place : bucket.places)
    for (auto& piece : shards_->pieces(place)) sizes[static_cast<std::size_t>(piece.rank)] += part.of(piece).size();
  return sizes;
}

GRADACCUM_INLINE void GradientPieces::send(const Bucket& bucket) {
  for (auto place : bucket.places)
    if (has_own(place)) used_[place] = 1;
  const auto bytes = bucket.elements * static_cast<std::int64_t>(bucket.options.dtype().itemsize());
  const bool alone = bucket.places.size() == 1;
  if (alone && (bytes <= bucket_bytes_ || !shards_->is_cut(bucket.places[0]))) {
    Sent sent{first_round_, bucket, {}, sent_alone(bucket)};
    window_->sums().forget(bucket.places[0]);
    return send_part(std::move(sent));
  }
  const auto parts = std::max<std::int64_t>((bytes + bucket_bytes_ - 1) / bucket_bytes_, 1);
  std::vector<at::Tensor> rows;  // flattened gradients; undefined if missing
  for (auto place : bucket.places) {
    const auto gradient = own(place);
    rows.push_back(gradient.defined() ? gradient.reshape({-1}) : gradient);
  }
  for (std::int64_t i = 0; i < parts; ++i)
    send_part({first_round_, bucket, {i, parts}, copied_by_rank(bucket, {i, parts}, rows)});
  for (auto place : bucket.places) window_->sums().forget(place);
}

GRADACCUM_INLINE void GradientPieces::send_part(Sent sent) {
  if (sent.from.numel() == 0) return;
  while (!under_way_.empty() && bytes_under_way_ + sent.bytes() > bucket_bytes_) receive_oldest();
  const auto place = sent.bucket.places[0];
  if (sent.bucket.places.size() == 1 && !shards_->is_cut(place)) {
    const auto& sum = sent.from;
    sent.pending =
        links_->begin_sum_on(line_, sum.is_complex() ? at::view_as_real(sum) : sum, shards_->pieces(place)[0].rank);
  } else {
    begin_all_to_all(sent);
  }
  bytes_under_way_ += sent.bytes();
  under_way_.push_back(std::move(sent));
}

/// Leaves the first and the last rank's own pieces in place, unsent: the pieces of all others are still contiguous.
GRADACCUM_INLINE void GradientPieces::begin_all_to_all(Sent& sent) {
  const auto rank = static_cast<std::size_t>(shards_->rank());
  auto from = sent.from.view({-1});
  auto sizes_from = sizes_by_rank(sent.bucket, sent.part);
  const auto own = sizes_from[rank], of_others = from.numel() - own;
  std::vector<std::int64_t> sizes_to(sizes_from.size(), own);
  auto rows = shards_->world_size();
  if (const bool first = rank == 0; first || rank + 1 == sizes_from.size()) {
    sent.own = from.narrow(0, first ? 0 : of_others, own);
    from = from.narrow(0, first ? own : 0, of_others);
    sizes_from[rank] = sizes_to[rank] = 0;
    --rows;
  }
  sent.to = at::empty({rows, own}, sent.bucket.options);
  sent.pending = links_->begin_all_to_all(line_, sent.to, from, std::move(sizes_to), std::move(sizes_from));
}

/// Returns a copy of the gradients in which each rank's pieces are contiguous.
GRADACCUM_INLINE at::Tensor GradientPieces::copied_by_rank(const Bucket& bucket, const Part& part,
                                                           const std::vector<at::Tensor>& rows) const {
  const auto sizes = sizes_by_rank(bucket, part);
  const auto all = at::empty({std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})}, bucket.options);
  std::int64_t from = 0;
  for (int rank = 0; rank < shards_->world_size(); ++rank)
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (auto& whole : shards_->pieces(bucket.places[i])) {
        if (whole.rank != rank) continue;
        const auto piece = part.of(whole);
        const auto copy = all.narrow(0, std::exchange(from, from + piece.size()), piece.size());
        rows[i].defined() ? copy.copy_(rows[i].narrow(0, piece.begin, piece.size())) : copy.zero_();
      }
  times_weight(all);
  return all;
}

GRADACCUM_INLINE void GradientPieces::receive_oldest() {
  auto sent = std::move(under_way_.front());
  under_way_.pop_front();
  bytes_under_way_ -= sent.bytes();
  links_->wait(sent.pending, "the gradients of a window");
  sent.pending.reset();
  if (!sent.to.defined()) return take_whole(sent);
  sent.from.reset();
  if (sent.to.numel() > 0) take(sent);
}

GRADACCUM_INLINE void GradientPieces::take_whole(const Sent& sent) {
  const auto place = sent.bucket.places[0];
  if (shards_->own_piece(place).size() == 0) return;
  const auto sum = sent.from.view({-1});
  if (sent.in_first_round)
    sums_[place] = sum;
  else
    sums_[place].add_(sum);
}

GRADACCUM_INLINE void GradientPieces::take(const Sent& sent) {
  auto of_ranks = sent.to.unbind();
  if (sent.own.defined()) of_ranks.insert(of_ranks.begin() + shards_->rank(), sent.own);
  std::int64_t from = 0;
  for (auto place : sent.bucket.places) {
    const auto own = shards_->own_piece(place), piece = sent.part.of(own);
    if (piece.size() == 0) continue;
    auto& sums = sums_[place];
    if (sent.in_first_round && sent.to.size(0) == 1 && sent.to.numel() == own.size()) {
      sums = sent.to.view({-1}).add_(sent.own);  // in the memory in which it arrived
      continue;
    }
    if (!sums.defined()) sums = at::empty({own.size()}, sent.bucket.options);
    auto sum = sums.narrow(0, piece.begin - own.begin, piece.size());
    const auto here = [&](const at::Tensor& of_rank) { return of_rank.narrow(0, from, piece.size()); };
    if (sent.in_first_round) at::add_out(sum, here(of_ranks[0]), here(of_ranks[1]));
    for (std::size_t rank = sent.in_first_round ? 2 : 0; rank < of_ranks.size(); ++rank) sum.add_(here(of_ranks[rank]));
    from += piece.size();
  }
}

GRADACCUM_INLINE void GradientPieces::end_round() {
  GradientExchange::end_round();
  first_round_ = false;
}

GRADACCUM_INLINE std::vector<double> GradientPieces::used() const {
  auto used = GradientExchange::used();
  for (std::size_t place = 0; place < used.size(); ++place) used[place] = std::max(used[place], used_[place]);
  return used;
}

/// Returns a sum as backward would have left it: in the parameter's strides, and in its dtype unless sums are wider.
GRADACCUM_INLINE at::Tensor GradientPieces::as_gradient(std::size_t place, at::Tensor sum) const {
  const auto& own = shards_->own(place);
  if (!accumulate_in_) sum = sum.to(own.scalar_type());
  sum = sum.view(own.sizes()).detach();  // a view could not be cleared
  return sum.strides() == own.strides() ? sum : at::empty_like(own, sum.options()).copy_(sum);
}

GRADACCUM_INLINE double GradientPieces::finish(const std::vector<double>& used_by, double weight_of_all) {
  const at::NoGradGuard no_grad;
  while (!under_way_.empty()) receive_oldest();
  const auto unit = unit_of(weight_of_all);
  for (std::size_t place = 0; place < sums_.size(); ++place) {
    auto& sum = sums_[place];
    if (used_by[place] == 0) sum.reset();
    if (!sum.defined()) continue;
    if (unit != 1) sum.div_(unit);
    sum = as_gradient(place, std::move(sum));
  }
  window_->divide(*shards_, sums_);
  sums_.clear();
  links_->end_exchange(this);
  return unit;
}

}  // namespace gradaccum::detail
