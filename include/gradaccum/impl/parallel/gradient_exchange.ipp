// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gradient_exchange.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters,
                                                std::optional<c10::ScalarType> accumulate_in,
                                                std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  std::map<std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>, std::size_t>
      open;  // buckets with space left
  for (std::size_t place = parameters.size(); place-- > 0;) {
    const auto& parameter = parameters[place];
    if (!parameter.requires_grad()) continue;
    auto dtype = parameter.scalar_type();
    if (accumulate_in && c10::elementSize(dtype) < c10::elementSize(*accumulate_in)) dtype = *accumulate_in;
    if (dtype == c10::kHalf) dtype = c10::kFloat;
    const auto elements = parameter.numel();
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
    const auto options = at::TensorOptions(dtype).device(parameter.device());
    const auto kind = std::tuple(dtype, parameter.device().type(), parameter.device().index());
    if (elements * size >= std::min(alone_from, bucket_bytes)) {
      buckets.push_back({.places = {place}, .options = options, .elements = elements});
      continue;
    }
    const auto found = open.find(kind);
    if (found == open.end() || (buckets[found->second].elements + elements) * size > bucket_bytes) {
      open[kind] = buckets.size();
      buckets.push_back({.options = options});
    }
    auto& bucket = buckets[open[kind]];
    bucket.places.push_back(place);
    bucket.elements += elements;
  }
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const Bucket& a, const Bucket& b) { return a.places.back() > b.places.back(); });
  return buckets;
}

GRADACCUM_INLINE GradientExchange::GradientExchange(std::shared_ptr<Connections> links, Connections::Channel line,
                                                    std::shared_ptr<WindowGradients> window,
                                                    std::optional<c10::ScalarType> accumulate_in,
                                                    std::int64_t bucket_bytes)
    : connections_(std::move(links)),
      line_(line),
      window_(std::move(window)),
      parameters_(window_->all_parameters()),
      accumulate_in_(accumulate_in),
      buckets_(buckets_of(parameters_, accumulate_in, bucket_bytes)),
      bucket_of_(parameters_.size()) {
  for (std::size_t i = 0; i < buckets_.size(); ++i)
    for (auto place : buckets_[i].places) bucket_of_[place] = i;
  begin_round();
}

GRADACCUM_INLINE void GradientExchange::begin_round() {
  const std::lock_guard lock(mutex_);
  missing_.clear();
  for (auto& bucket : buckets_) missing_.push_back(bucket.places.size());
  arrived_.assign(parameters_.size(), false);
  sent_ = 0;
  ended_ = false;
}

GRADACCUM_INLINE void GradientExchange::grad_ready(std::size_t place) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  const at::NoGradGuard no_grad;
  TORCH_CHECK(bucket_of_[place], "Replicas: parameter ", place, " (shape ", parameters_[place].sizes(),
              ") was frozen when this window's gradients began to be sent; set requires_grad between windows");
  const auto bucket = *bucket_of_[place];
  TORCH_CHECK(!arrived_[place] || bucket >= sent_, "Replicas: the gradient of parameter ", place, " (shape ",
              parameters_[place].sizes(),
              ") arrived again after it was sent: an operation runs a backward of its own inside of backward; "
              "use {.overlap = false}");
  window_->fold_into_sum(place, accumulate_in_);
  if (arrived_[place]) return;
  arrived_[place] = true;
  --missing_[bucket];
  while (sent_ < buckets_.size() && missing_[sent_] == 0) send_next();
}

GRADACCUM_INLINE void GradientExchange::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

GRADACCUM_INLINE void GradientExchange::end_round() {
  const at::NoGradGuard no_grad;
  while (sent_ < buckets_.size()) send_next();
}

GRADACCUM_INLINE void GradientExchange::send_next() {
  connections_->begin_exchange(this);
  begun_ = true;
  send(buckets_[sent_++]);
}

GRADACCUM_INLINE at::Tensor GradientExchange::own(std::size_t place) const {
  if (!has_own(place)) return {};
  const auto& gradient = window_->sums()[place];
  return (gradient.layout() == at::kStrided ? gradient.detach() : gradient.to_dense()).resolve_conj().resolve_neg();
}

GRADACCUM_INLINE bool GradientExchange::has_unsent() const {
  for (auto& bucket : buckets_)
    for (auto place : bucket.places)
      if (has_own(place)) return true;
  return false;
}

GRADACCUM_INLINE std::vector<double> GradientExchange::used() const {
  std::vector<double> used;
  for (std::size_t place = 0; place < parameters_.size(); ++place) used.push_back(has_own(place) ? 1 : 0);
  return used;
}

GRADACCUM_INLINE at::Tensor GradientExchange::sent_alone(const Bucket& bucket) const {
  const auto place = bucket.places[0];
  const auto gradient = own(place);
  if (!gradient.defined()) return at::zeros(parameters_[place].sizes(), bucket.options);
  const auto sent = gradient.to(bucket.options.dtype()).contiguous();
  times_weight(sent);
  return sent;
}

GRADACCUM_INLINE void GradientExchange::times_weight(const at::Tensor& sum) const {
  if (const auto weight = window_->first_weight(); weight != 0 && weight != 1) sum.mul_(weight);
}

GRADACCUM_INLINE double GradientExchange::unit_of(double weight_of_all) const {
  const bool has_half = std::any_of(parameters_.begin(), parameters_.end(),
                                    [](auto& parameter) { return parameter.scalar_type() == at::kHalf; });
  return has_half && weight_of_all > 0 ? weight_of_all : 1;
}

GRADACCUM_INLINE GradReduceScatter::GradReduceScatter(std::shared_ptr<Connections> links, Connections::Channel line,
                                                      std::shared_ptr<WindowGradients> window,
                                                      std::optional<c10::ScalarType> accumulate_in,
                                                      std::int64_t bucket_bytes, std::shared_ptr<const Shards> shards)
    : GradientExchange(std::move(links), line, std::move(window), accumulate_in, bucket_bytes),
      shards_(std::move(shards)),
      bucket_bytes_(bucket_bytes),
      used_(parameters_.size()),
      sums_(parameters_.size()) {
  shards_->check_parameters(parameters_);
}

GRADACCUM_INLINE Shards::Piece GradReduceScatter::Part::of(const Shards::Piece& piece) const {
  return {piece.rank, piece.begin + piece.size() * index / count, piece.begin + piece.size() * (index + 1) / count};
}

GRADACCUM_INLINE std::vector<std::int64_t> GradReduceScatter::sizes_by_rank(const Bucket& bucket,
                                                                            const Part& part) const {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(shards_->world_size()));
  for (auto place : bucket.places)
    for (auto& piece : shards_->pieces(place)) sizes[static_cast<std::size_t>(piece.rank)] += part.of(piece).size();
  return sizes;
}

GRADACCUM_INLINE void GradReduceScatter::send(const Bucket& bucket) {
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

GRADACCUM_INLINE void GradReduceScatter::send_part(Sent sent) {
  if (sent.from.numel() == 0) return;
  while (!under_way_.empty() && bytes_under_way_ + sent.bytes() > bucket_bytes_) receive_oldest();
  const auto place = sent.bucket.places[0];
  if (sent.bucket.places.size() == 1 && !shards_->is_cut(place)) {
    const auto& sum = sent.from;
    sent.pending = connections_->begin_reduce(line_, sum.is_complex() ? at::view_as_real(sum) : sum,
                                              shards_->pieces(place)[0].rank);
  } else {
    begin_all_to_all(sent);
  }
  bytes_under_way_ += sent.bytes();
  under_way_.push_back(std::move(sent));
}

/// Leaves the first and the last rank's own pieces in place, unsent: the pieces of all others are still contiguous.
GRADACCUM_INLINE void GradReduceScatter::begin_all_to_all(Sent& sent) {
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
  sent.pending = connections_->begin_all_to_all(line_, sent.to, from, std::move(sizes_to), std::move(sizes_from));
}

/// Returns a copy of the gradients in which each rank's pieces are contiguous.
GRADACCUM_INLINE at::Tensor GradReduceScatter::copied_by_rank(const Bucket& bucket, const Part& part,
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

GRADACCUM_INLINE void GradReduceScatter::receive_oldest() {
  auto sent = std::move(under_way_.front());
  under_way_.pop_front();
  bytes_under_way_ -= sent.bytes();
  connections_->wait(sent.pending, "the gradients of a window");
  sent.pending.reset();
  if (!sent.to.defined()) return take_whole(sent);
  sent.from.reset();
  if (sent.to.numel() > 0) take(sent);
}

GRADACCUM_INLINE void GradReduceScatter::take_whole(const Sent& sent) {
  const auto place = sent.bucket.places[0];
  if (shards_->own_piece(place).size() == 0) return;
  const auto sum = sent.from.view({-1});
  if (sent.in_first_round)
    sums_[place] = sum;
  else
    sums_[place].add_(sum);
}

GRADACCUM_INLINE void GradReduceScatter::take(const Sent& sent) {
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

GRADACCUM_INLINE void GradReduceScatter::end_round() {
  GradientExchange::end_round();
  first_round_ = false;
}

GRADACCUM_INLINE std::vector<double> GradReduceScatter::used() const {
  auto used = GradientExchange::used();
  for (std::size_t place = 0; place < used.size(); ++place) used[place] = std::max(used[place], used_[place]);
  return used;
}

/// Returns a sum as backward would have left it: in the parameter's strides, and in its dtype unless sums are wider.
GRADACCUM_INLINE at::Tensor GradReduceScatter::as_gradient(std::size_t place, at::Tensor sum) const {
  const auto& own = shards_->own(place);
  if (!accumulate_in_) sum = sum.to(own.scalar_type());
  sum = sum.view(own.sizes()).detach();  // a view could not be cleared
  return sum.strides() == own.strides() ? sum : at::empty_like(own, sum.options()).copy_(sum);
}

GRADACCUM_INLINE double GradReduceScatter::finish(const std::vector<double>& used_by, double weight_of_all) {
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
  connections_->end_exchange(this);
  return unit;
}

GRADACCUM_INLINE double GradAllReduce::finish(const std::vector<double>& used_by, double weight_of_all) {
  const at::NoGradGuard no_grad;
  const auto unit = unit_of(weight_of_all);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    connections_->wait(under_way_[i].pending, "the gradients of a window");
    if (unit != 1) under_way_[i].sum.div_(unit);
    put_back(buckets_[i], under_way_[i].sum, used_by);
  }
  connections_->end_exchange(this);
  return unit;
}

GRADACCUM_INLINE void GradAllReduce::send(const Bucket& bucket) {
  auto sum = bucket.places.size() == 1 ? sent_alone(bucket) : sent_together(bucket);
  auto pending = connections_->begin_all_reduce(line_, sum.is_complex() ? at::view_as_real(sum) : sum);
  under_way_.push_back({std::move(sum), std::move(pending)});
}

GRADACCUM_INLINE at::Tensor GradAllReduce::sent_together(const Bucket& bucket) const {
  const auto all = at::empty({bucket.elements}, bucket.options);
  std::int64_t from = 0;
  for (auto place : bucket.places) {
    const auto& parameter = parameters_[place];
    const auto part = all.narrow(0, from, parameter.numel()).view(parameter.sizes());
    if (const auto gradient = own(place); gradient.defined())
      part.copy_(gradient);
    else
      part.zero_();
    from += parameter.numel();
  }
  times_weight(all);
  return all;
}

GRADACCUM_INLINE void GradAllReduce::put_back(const Bucket& bucket, const at::Tensor& sum,
                                              const std::vector<double>& used_by) {
  std::int64_t from = 0;
  for (auto place : bucket.places) {
    const auto& parameter = parameters_[place];
    const auto part = bucket.places.size() == 1 ? sum : sum.narrow(0, from, parameter.numel()).view(parameter.sizes());
    from += parameter.numel();
    if (used_by[place] == 0) continue;
    const auto& gradient = window_->sums()[place];
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      if (!gradient.is_alias_of(part)) gradient.detach().copy_(part);
      continue;
    }
    const auto dtype = accumulate_in_ ? part.scalar_type() : parameter.scalar_type();
    window_->sums().set(place, part.to(dtype, /*non_blocking=*/false, /*copy=*/bucket.places.size() > 1));
  }
}

/// Pieces of one rank that are sent together, as bytes.
struct Parcel {
  int rank = 0;
  std::vector<at::Tensor> pieces = {};
  std::int64_t bytes = 0;
  at::Tensor sent = {};  ///< the memory that is sent
  Connections::Pending pending = nullptr;

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
  ParcelsUnderWay(Connections& links, Connections::Channel line, const Shards& shards)
      : connections_(links), line_(line), shards_(shards) {}

  void send(Parcel parcel) {
    parcel.pack(parcel.rank == shards_.rank());
    parcel.pending = connections_.begin_broadcast(line_, parcel.sent, parcel.rank);
    copied_ += parcel.is_copied() ? parcel.bytes : 0;
    under_way_.push_back(std::move(parcel));
  }
  void receive() {
    const auto parcel = std::move(under_way_.front());
    under_way_.pop_front();
    connections_.wait(parcel.pending, "the parameters of an update");
    if (parcel.rank != shards_.rank()) parcel.unpack();
    copied_ -= parcel.is_copied() ? parcel.bytes : 0;
  }
  bool empty() const { return under_way_.empty(); }
  std::int64_t copied() const { return copied_; }  ///< bytes

 private:
  Connections& connections_;
  Connections::Channel line_;
  const Shards& shards_;
  std::deque<Parcel> under_way_;
  std::int64_t copied_ = 0;
};

GRADACCUM_INLINE void all_gather_parameters(Connections& links, Connections::Channel line, const Shards& shards,
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

#undef GRADACCUM_INLINE
