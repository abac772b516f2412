// SPDX-License-Identifier: Apache-2.0
// Exchanges gradients, parameters and states between ranks, whole or in shards.
#pragma once

#include <gradaccum/replicas.hpp>

#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/parallel/shards.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <tuple>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Returns a line for each tensor. `describe` returns what must be the same on all ranks.
GRADACCUM_INLINE std::string described(const NamedParameters& tensors, std::string (*describe)(const at::Tensor&)) {
  std::string lines;
  for (auto& tensor : tensors) lines += tensor.key() + ": " + describe(tensor.value()) + "\n";
  return lines;
}

/// Throws on all ranks if their lines are not equal, and names the first that differs.
GRADACCUM_INLINE void check_same_lines(const ProcessGroup& group, const std::string& lines, const char* what) {
  const auto all = group.all_gather(lines);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream first(all[0]), other(all[rank]);
    std::string expected, got;
    do {
      expected.clear(), got.clear();
      std::getline(first, expected), std::getline(other, got);
    } while (expected == got);
    TORCH_CHECK(false, "Replicas: ", what, " must be the same on all ranks, but rank 0 has '", expected, "', and rank ",
                rank, " has '", got, "'");
  }
}

/// Returns the dtype and shape, and whether the tensor is frozen.
GRADACCUM_INLINE std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return plain_text(tensor.scalar_type(), " ", tensor.sizes(), tensor.requires_grad() ? "" : " frozen");
}

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<detail::ReplicaCommunicator> Replicas::communicator_of(
    const ProcessGroup& group, const ReplicasOptions& options) {
  TORCH_CHECK(options.bucket_bytes >= 1, "Replicas: bucket_bytes must be >= 1, got ", options.bucket_bytes);
  if (!group.connections_) return nullptr;
  return std::make_shared<detail::ReplicaCommunicator>(group.connections_, options);
}

GRADACCUM_INLINE Replicas::~Replicas() {
  if (communicator_) communicator_->disconnect();
}

GRADACCUM_INLINE void Replicas::begin(const ReplicasOptions& options,
                                      const std::vector<at::Tensor>& of_optimizer) const {
  auto lines = detail::described(model_->named_parameters(), detail::shape_of) +
               detail::described(model_->named_buffers(), detail::shape_of);
  for (auto& parameter : of_optimizer) lines += "in the optimizer: " + detail::shape_of(parameter) + "\n";
  const auto shards = communicator_->shards();
  lines += detail::plain_text("in the optimizer, pieces: ", shards ? shards->number_of_pieces() : 0, "\n");
  detail::check_same_lines(group_, lines, "the model's parameters and buffers, and what is divided");
  broadcast(model_->parameters());
  broadcast(model_->buffers());
  communicator_->connect(model_->parameters());
  if (!options.seed_by_rank || group_.rank() == 0) return;
  for (auto& [name, generator] : detail::default_generators()) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<std::uint64_t>(group_.rank()));
  }
}

GRADACCUM_INLINE void Replicas::broadcast(const std::vector<at::Tensor>& tensors) const {
  for (auto& tensor : tensors)
    if (tensor.defined()) group_.broadcast(tensor);
}

GRADACCUM_INLINE void Replicas::broadcast_buffers() const { broadcast(model_->buffers()); }

GRADACCUM_INLINE void Replicas::check_equal() const {
  if (!communicator_) return;
  detail::check_same_lines(group_, detail::described(model_->named_parameters(), detail::fingerprint_of),
                           "the parameters (dtype, shape, checksum)");
  detail::check_same_lines(group_, communicator_->settings_of_sharded(),
                           "the settings of an optimizer that is divided");
}

}  // namespace gradaccum

namespace gradaccum::detail {

inline constexpr std::int64_t alone_from = std::int64_t{1} << 20;  // bytes at which copying costs more than a message

GRADACCUM_INLINE std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters,
                                                std::optional<c10::ScalarType> accumulate_in,
                                                std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, std::size_t> open;  // buckets with space left
  for (std::size_t index = parameters.size(); index-- > 0;) {
    const auto& parameter = parameters[index];
    if (!parameter.requires_grad()) continue;
    auto dtype = parameter.scalar_type();
    if (accumulate_in && c10::elementSize(dtype) < c10::elementSize(*accumulate_in)) dtype = *accumulate_in;
    if (dtype == c10::kHalf) dtype = c10::kFloat;
    const auto elements = parameter.numel();
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
    const auto options = at::TensorOptions(dtype).device(parameter.device());
    const Kind kind(dtype, parameter.device().type(), parameter.device().index());
    if (elements * size >= std::min(alone_from, bucket_bytes)) {
      buckets.push_back({.indices = {index}, .options = options, .elements = elements});
      continue;
    }
    const auto found = open.find(kind);
    if (found == open.end() || (buckets[found->second].elements + elements) * size > bucket_bytes) {
      open[kind] = buckets.size();
      buckets.push_back({.options = options});
    }
    auto& bucket = buckets[open[kind]];
    bucket.indices.push_back(index);
    bucket.elements += elements;
  }
  std::ranges::stable_sort(buckets, std::greater(), [](const Bucket& bucket) { return bucket.indices.back(); });
  return buckets;
}

/// Sums one window's gradients over all ranks. Sends a bucket once it is complete and all earlier ones have been sent,
/// multiplied by the window's first weight, because each rank has divided its gradients by it.
class GradientExchange : public GradReadyListener {
 public:
  GradientExchange(std::shared_ptr<Connections> connections, Connections::Channel channel,
                   std::shared_ptr<WindowGradients> window, std::int64_t bucket_bytes)
      : GradReadyListener(window->all_parameters()),
        connections_(std::move(connections)),
        channel_(channel),
        window_(std::move(window)),
        buckets_(buckets_of(parameters_, window_->accumulate_in, bucket_bytes)),
        bucket_of_(parameters_.size()),
        used_(parameters_.size()) {
    for (std::size_t i = 0; i < buckets_.size(); ++i)
      for (auto index : buckets_[i].indices) bucket_of_[index] = i;
    begin_round();
  }

  void grad_ready(std::size_t index) override {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    const at::NoGradGuard no_grad;
    TORCH_CHECK(bucket_of_[index], "Replicas: parameter ", index, " (shape ", parameters_[index].sizes(),
                ") was frozen when this window began to send gradients; change requires_grad only between windows");
    const auto bucket = *bucket_of_[index];
    TORCH_CHECK(!ready_[index] || bucket >= sent_, "Replicas: the gradient of parameter ", index, " (shape ",
                parameters_[index].sizes(),
                ") arrived again after it was sent: an operation runs its own backward inside backward; use {.overlap "
                "= false}");
    window_->fold_into_sum(index);
    if (ready_[index]) return;
    ready_[index] = true;
    --missing_[bucket];
    while (sent_ < buckets_.size() && missing_[sent_] == 0) send_next();
  }

  /// Starts a round for another micro-batch, in which all buckets are sent again.
  void begin_round() {
    const std::lock_guard lock(mutex_);
    missing_.clear();
    for (auto& bucket : buckets_) missing_.push_back(bucket.indices.size());
    ready_.assign(parameters_.size(), false);
    sent_ = 0;
    ended_ = false;
  }
  /// Sends the remaining buckets, with zeros for missing gradients.
  void end_round() {
    const at::NoGradGuard no_grad;
    while (sent_ < buckets_.size()) send_next();
    first_round_ = false;
  }
  /// Sends all buckets without a backward pass.
  void send_round() { begin_round(), end_round(); }
  /// True if a bucket of this window has been sent.
  bool begun() const { return begun_; }

  /// True if this rank has gradients that have not been sent. Valid between rounds only.
  bool has_unsent() const {
    for (std::size_t index = 0; index < parameters_.size(); ++index)
      if (bucket_of_[index] && has_own(index)) return true;
    return false;
  }
  /// Returns 1 for each parameter that had requires_grad = false when the exchange began.
  std::vector<double> frozen() const {
    std::vector<double> frozen;
    for (auto& bucket : bucket_of_) frozen.push_back(!bucket);
    return frozen;
  }
  /// Returns 1 for each parameter that has had a gradient in this window on this rank.
  std::vector<double> used() const {
    auto used = used_;
    for (std::size_t index = 0; index < used.size(); ++index)
      if (has_own(index)) used[index] = 1;
    return used;
  }
  /// Waits, after the last round, until the window has the sums of the parameters that any rank uses. Returns their
  /// divisor: 1, or `weight_of_all` if there are float16 parameters, whose sums might overflow.
  double finish(const std::vector<double>& used_by, double weight_of_all) {
    const at::NoGradGuard no_grad;
    const bool has_half =
        std::ranges::any_of(parameters_, [](auto& parameter) { return parameter.scalar_type() == at::kHalf; });
    const double divisor = has_half && weight_of_all > 0 ? weight_of_all : 1;
    receive_all(used_by, divisor);
    connections_->end_exchange(this);
    return divisor;
  }

 protected:
  virtual void send(const Bucket& bucket) = 0;
  virtual void receive_all(const std::vector<double>& used_by, double divisor) = 0;

  /// True if this rank has a gradient of this parameter. A window without weight has none, regardless of its memory.
  bool has_own(std::size_t index) const { return window_->first_weight() != 0 && window_->sums()[index].defined(); }
  /// Returns this rank's gradient in dense form; undefined if there is none.
  at::Tensor own(std::size_t index) const {
    if (!has_own(index)) return {};
    const auto& gradient = window_->sums()[index];
    return (gradient.layout() == at::kStrided ? gradient.detach() : gradient.to_dense()).resolve_conj().resolve_neg();
  }
  /// Returns a bucket's only gradient as it is sent, multiplied by the weight. Works in place if possible.
  at::Tensor sent_alone(const Bucket& bucket) const {
    const auto index = bucket.indices[0];
    const auto gradient = own(index);
    if (!gradient.defined()) return at::zeros(parameters_[index].sizes(), bucket.options);
    const auto sent = gradient.to(bucket.options.dtype()).contiguous();
    times_weight(sent);
    return sent;
  }
  void times_weight(const at::Tensor& sum) const {
    if (const auto weight = window_->first_weight(); weight != 0 && weight != 1) sum.mul_(weight);
  }

  const std::shared_ptr<Connections> connections_;
  const Connections::Channel channel_;
  const std::shared_ptr<WindowGradients> window_;
  const std::vector<Bucket> buckets_;
  bool first_round_ = true;

 private:
  void send_next() {
    connections_->begin_exchange(this);
    begun_ = true;
    const auto& bucket = buckets_[sent_++];
    for (auto index : bucket.indices)
      if (has_own(index)) used_[index] = 1;
    send(bucket);
  }

  std::vector<std::optional<std::size_t>> bucket_of_;  // by parameter; none if it was frozen at the start
  std::vector<double> used_;                           // by parameter: 1 if its gradient has been sent
  std::vector<std::size_t> missing_;                   // missing gradients, by bucket
  std::vector<bool> ready_;
  std::size_t sent_ = 0;  // buckets sent in this round
  bool begun_ = false;
};

/// Reduce-scatters gradients: each rank keeps only the sums for its pieces.
///
/// A gradient is freed when it is sent. One that fills its bucket alone is sent in place; smaller ones are copied
/// together, larger ones in parts. Each rank receives the other ranks' gradients of its pieces, and sums them in rank
/// order. A gradient that is not split is reduced in place to its rank. At most a bucket, or one gradient that is not
/// split, is in flight, and needs as much memory again on arrival: the oldest must arrive before more is sent.
class GradReduceScatter final : public GradientExchange {
 public:
  GradReduceScatter(std::shared_ptr<Connections> connections, Connections::Channel channel,
                    std::shared_ptr<WindowGradients> window, std::int64_t bucket_bytes,
                    std::shared_ptr<const Shards> shards)
      : GradientExchange(std::move(connections), channel, std::move(window), bucket_bytes),
        shards_(std::move(shards)),
        bucket_bytes_(bucket_bytes),
        sums_(parameters_.size()) {
    shards_->check_parameters(parameters_);
  }

 private:
  /// Selects the `index`-th of `count` equal parts of each piece in a bucket.
  struct Part {
    std::int64_t index = 0, count = 1;
    Shards::Piece of(const Shards::Piece& piece) const {
      return {piece.rank, piece.begin + piece.size() * index / count, piece.begin + piece.size() * (index + 1) / count};
    }
  };
  struct Sent {
    bool in_first_round;
    const Bucket& bucket;
    Part part;
    at::Tensor from, to = {}, own = {};  // own: this rank's part of `from`, if not sent
    Connections::Pending pending = nullptr;
    std::int64_t bytes() const { return static_cast<std::int64_t>(from.nbytes()); }
  };

  void send(const Bucket& bucket) override {
    const auto bytes = bucket.elements * static_cast<std::int64_t>(bucket.options.dtype().itemsize());
    const bool alone = bucket.indices.size() == 1;
    if (alone && (bytes <= bucket_bytes_ || !shards_->is_cut(bucket.indices[0]))) {
      Sent sent{first_round_, bucket, {}, sent_alone(bucket)};
      window_->sums().forget(bucket.indices[0]);
      return send_part(std::move(sent));
    }
    const auto parts = std::max<std::int64_t>((bytes + bucket_bytes_ - 1) / bucket_bytes_, 1);
    std::vector<at::Tensor> rows;  // flattened gradients; undefined if missing
    for (auto index : bucket.indices) {
      const auto gradient = own(index);
      rows.push_back(gradient.defined() ? gradient.reshape({-1}) : gradient);
    }
    for (std::int64_t i = 0; i < parts; ++i)
      send_part({first_round_, bucket, {i, parts}, copied_by_rank(bucket, {i, parts}, rows)});
    for (auto index : bucket.indices) window_->sums().forget(index);
  }

  void send_part(Sent sent) {
    if (sent.from.numel() == 0) return;
    while (!in_flight_.empty() && bytes_in_flight_ + sent.bytes() > bucket_bytes_) receive_oldest();
    const auto index = sent.bucket.indices[0];
    if (sent.bucket.indices.size() == 1 && !shards_->is_cut(index)) {
      const auto& sum = sent.from;
      sent.pending = connections_->begin_reduce(channel_, sum.is_complex() ? at::view_as_real(sum) : sum,
                                                shards_->pieces(index)[0].rank);
    } else {
      begin_all_to_all(sent);
    }
    bytes_in_flight_ += sent.bytes();
    in_flight_.push_back(std::move(sent));
  }

  /// Leaves the first and the last rank's own pieces in place, unsent: the pieces of the other ranks are still
  /// contiguous.
  void begin_all_to_all(Sent& sent) {
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
    sent.pending = connections_->begin_all_to_all(channel_, sent.to, from, std::move(sizes_to), std::move(sizes_from));
  }

  std::vector<std::int64_t> sizes_by_rank(const Bucket& bucket, const Part& part) const {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(shards_->world_size()));
    for (auto index : bucket.indices)
      for (auto& piece : shards_->pieces(index)) sizes[static_cast<std::size_t>(piece.rank)] += part.of(piece).size();
    return sizes;
  }

  /// Returns a copy of the gradients in which each rank's pieces are contiguous.
  at::Tensor copied_by_rank(const Bucket& bucket, const Part& part, const std::vector<at::Tensor>& rows) const {
    const auto sizes = sizes_by_rank(bucket, part);
    const auto all = at::empty({std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})}, bucket.options);
    std::int64_t from = 0;
    for (int rank = 0; rank < shards_->world_size(); ++rank)
      for (std::size_t i = 0; i < rows.size(); ++i)
        for (auto& whole : shards_->pieces(bucket.indices[i])) {
          if (whole.rank != rank) continue;
          const auto piece = part.of(whole);
          const auto copy = all.narrow(0, std::exchange(from, from + piece.size()), piece.size());
          rows[i].defined() ? copy.copy_(rows[i].narrow(0, piece.begin, piece.size())) : copy.zero_();
        }
    times_weight(all);
    return all;
  }

  void receive_oldest() {
    auto sent = std::move(in_flight_.front());
    in_flight_.pop_front();
    bytes_in_flight_ -= sent.bytes();
    connections_->wait(sent.pending, "the gradients of a window");
    sent.pending.reset();
    if (!sent.to.defined()) return add_reduced(sent);
    sent.from.reset();
    if (sent.to.numel() > 0) add_pieces(sent);
  }

  void add_reduced(const Sent& sent) {
    const auto index = sent.bucket.indices[0];
    if (shards_->own_piece(index).size() == 0) return;
    const auto sum = sent.from.view({-1});
    if (sent.in_first_round)
      sums_[index] = sum;
    else
      sums_[index].add_(sum);
  }

  void add_pieces(const Sent& sent) {
    auto of_ranks = sent.to.unbind();
    if (sent.own.defined()) of_ranks.insert(of_ranks.begin() + shards_->rank(), sent.own);
    std::int64_t from = 0;
    for (auto index : sent.bucket.indices) {
      const auto own = shards_->own_piece(index), piece = sent.part.of(own);
      if (piece.size() == 0) continue;
      auto& sums = sums_[index];
      if (sent.in_first_round && sent.to.size(0) == 1 && sent.to.numel() == own.size()) {
        sums = sent.to.view({-1}).add_(sent.own);  // in the memory in which it arrived
        continue;
      }
      if (!sums.defined()) sums = at::empty({own.size()}, sent.bucket.options);
      auto sum = sums.narrow(0, piece.begin - own.begin, piece.size());
      const auto here = [&](const at::Tensor& of_rank) { return of_rank.narrow(0, from, piece.size()); };
      if (sent.in_first_round) at::add_out(sum, here(of_ranks[0]), here(of_ranks[1]));
      for (std::size_t rank = sent.in_first_round ? 2 : 0; rank < of_ranks.size(); ++rank)
        sum.add_(here(of_ranks[rank]));
      from += piece.size();
    }
  }

  void receive_all(const std::vector<double>& used_by, double divisor) override {
    while (!in_flight_.empty()) receive_oldest();
    for (std::size_t index = 0; index < sums_.size(); ++index) {
      auto& sum = sums_[index];
      if (used_by[index] == 0) sum.reset();
      if (!sum.defined()) continue;
      if (divisor != 1) sum.div_(divisor);
      sum = as_gradient(index, std::move(sum));
    }
    window_->divide(shards_->own(), sums_);
    sums_.clear();
  }

  /// Returns a sum as after backward: in the parameter's strides, and in its dtype unless sums are wider.
  at::Tensor as_gradient(std::size_t index, at::Tensor sum) const {
    const auto& own = shards_->own(index);
    if (!window_->accumulate_in) sum = sum.to(own.scalar_type());
    sum = sum.view(own.sizes()).detach();  // autograd cannot clear a view
    return sum.strides() == own.strides() ? sum : at::empty_like(own, sum.options()).copy_(sum);
  }

  const std::shared_ptr<const Shards> shards_;
  const std::int64_t bucket_bytes_;
  std::deque<Sent> in_flight_;  // the oldest first
  std::int64_t bytes_in_flight_ = 0;
  std::vector<at::Tensor> sums_;  // by parameter, flattened
};

/// All-reduces gradients, one that fills its bucket alone in place; others are copied together, and back.
class GradAllReduce final : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;

 private:
  struct Sent {
    at::Tensor sum;
    Connections::Pending pending;
  };

  void send(const Bucket& bucket) override {
    auto sum = bucket.indices.size() == 1 ? sent_alone(bucket) : sent_together(bucket);
    auto pending = connections_->begin_all_reduce(channel_, sum.is_complex() ? at::view_as_real(sum) : sum);
    in_flight_.push_back({std::move(sum), std::move(pending)});
  }

  at::Tensor sent_together(const Bucket& bucket) const {
    const auto all = at::empty({bucket.elements}, bucket.options);
    std::int64_t from = 0;
    for (auto index : bucket.indices) {
      const auto& parameter = parameters_[index];
      const auto part = all.narrow(0, from, parameter.numel()).view(parameter.sizes());
      const auto gradient = own(index);
      gradient.defined() ? part.copy_(gradient) : part.zero_();
      from += parameter.numel();
    }
    times_weight(all);
    return all;
  }

  void receive_all(const std::vector<double>& used_by, double divisor) override {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      connections_->wait(in_flight_[i].pending, "the gradients of a window");
      if (divisor != 1) in_flight_[i].sum.div_(divisor);
      copy_to_window(buckets_[i], in_flight_[i].sum, used_by);
    }
  }

  void copy_to_window(const Bucket& bucket, const at::Tensor& sum, const std::vector<double>& used_by) {
    const bool alone = bucket.indices.size() == 1;
    std::int64_t from = 0;
    for (auto index : bucket.indices) {
      const auto& parameter = parameters_[index];
      const auto part = alone ? sum : sum.narrow(0, from, parameter.numel()).view(parameter.sizes());
      from += parameter.numel();
      if (used_by[index] == 0) continue;
      const auto& gradient = window_->sums()[index];
      if (gradient.defined() && gradient.layout() == at::kStrided) {
        if (!gradient.is_alias_of(part)) gradient.detach().copy_(part);
        continue;
      }
      const auto dtype = window_->accumulate_in ? part.scalar_type() : parameter.scalar_type();
      window_->sums().set(index, part.to(dtype, /*non_blocking=*/false, /*copy=*/!alone));
    }
  }

  std::vector<Sent> in_flight_;  // by bucket
};

/// Pieces of one rank that are sent together, as bytes.
struct Parcel {
  int rank = 0;
  std::vector<at::Tensor> pieces = {};
  std::int64_t bytes = 0;
  at::Tensor sent = {};  ///< the memory that is sent
  Connections::Pending pending = nullptr;

  bool has_room_for(const at::Tensor& piece, std::int64_t bucket_bytes) const {
    return pieces[0].device() == piece.device() &&
           bytes + static_cast<std::int64_t>(piece.nbytes()) <= std::min(alone_from, bucket_bytes);
  }
  void add(const at::Tensor& piece) {
    pieces.push_back(piece);
    bytes += static_cast<std::int64_t>(piece.nbytes());
  }
  std::int64_t copied_bytes() const { return sent.is_alias_of(pieces[0]) ? 0 : bytes; }

  void pack(bool is_sender) {
    if (pieces.size() == 1) {
      sent = pieces[0].contiguous();  // the piece itself, if it is contiguous
      return;
    }
    sent = at::empty({bytes}, pieces[0].options().dtype(at::kByte));
    if (is_sender) for_each([](auto& piece, auto& part) { part.copy_(bytes_of_row(piece.contiguous())); });
  }
  void unpack() const {
    if (pieces.size() == 1) {
      if (copied_bytes() > 0) pieces[0].copy_(sent);
      return;
    }
    for_each([](auto& piece, auto& part) {
      const auto row = piece.is_contiguous() ? piece : at::empty(piece.sizes(), piece.options());
      bytes_of_row(row).copy_(part);
      if (!row.is_same(piece)) piece.copy_(row);
    });
  }

 private:
  /// Calls `body` with each piece and its part of `sent`, if pieces are copied together.
  void for_each(c10::function_ref<void(const at::Tensor& piece, const at::Tensor& bytes)> body) const {
    std::int64_t from = 0;
    for (auto& piece : pieces) {
      const auto size = static_cast<std::int64_t>(piece.nbytes());
      body(piece, sent.narrow(0, from, size));
      from += size;
    }
  }
};

/// Returns the parcels of each rank, by rank.
GRADACCUM_INLINE std::vector<std::vector<Parcel>> parcels_of(const Shards& shards,
                                                             const std::vector<std::size_t>& indices,
                                                             std::int64_t bucket_bytes) {
  std::vector<std::vector<Parcel>> all(static_cast<std::size_t>(shards.world_size()));
  for (auto index : indices)
    for (auto& piece : shards.pieces(index)) {
      if (piece.size() == 0) continue;
      auto& parcels = all[static_cast<std::size_t>(piece.rank)];
      const auto tensor = shards.part(index, piece, shards.parameters()[index]).variable_data();  // own version counter
      const auto open =
          std::ranges::find_if(parcels, [&](auto& parcel) { return parcel.has_room_for(tensor, bucket_bytes); });
      (open == parcels.end() ? parcels.emplace_back(Parcel{.rank = piece.rank}) : *open).add(tensor);
    }
  return all;
}

/// Sends the pieces that each rank has stepped to all other ranks, after a sharded step of these parameters. A large
/// piece is sent in place; a rank's small pieces are copied together, with at most `bucket_bytes` of copies in flight.
GRADACCUM_INLINE void all_gather_parameters(Connections& connections, Connections::Channel channel,
                                            const Shards& shards, const std::vector<std::size_t>& indices,
                                            std::int64_t bucket_bytes) {
  const at::NoGradGuard no_grad;
  std::deque<Parcel> in_flight;  // the oldest first
  std::int64_t copied = 0;       // bytes
  const auto receive = [&] {
    const auto parcel = std::move(in_flight.front());
    in_flight.pop_front();
    connections.wait(parcel.pending, "the parameters of an update");
    if (parcel.rank != shards.rank()) parcel.unpack();
    copied -= parcel.copied_bytes();
  };
  auto parcels = parcels_of(shards, indices, bucket_bytes);
  const auto most = std::ranges::max_element(parcels, {}, [](auto& of_rank) { return of_rank.size(); })->size();
  for (std::size_t i = 0; i < most; ++i)
    for (auto& of_rank : parcels) {  // in turn, which keeps all links busy in both directions
      if (i >= of_rank.size()) continue;
      auto& parcel = of_rank[i];
      while (!in_flight.empty() && copied + parcel.bytes > bucket_bytes) receive();
      parcel.pack(parcel.rank == shards.rank());
      parcel.pending = connections.begin_broadcast(channel, parcel.sent, parcel.rank);
      copied += parcel.copied_bytes();
      in_flight.push_back(std::move(parcel));
    }
  while (!in_flight.empty()) receive();
  for (auto index : indices)
    shards.parameters()[index].unsafeGetTensorImpl()->bump_version();  // LibTorch does not count a broadcast as a write
}

/// The exchange of a window's norms between all ranks, in flight or complete.
struct ReplicaCommunicator::GatheredNorms {
  std::weak_ptr<Connections> connections;  // expire with the replicas, even if the window lives on
  Connections::Pending pending;
  at::Tensor sums;  // each rank's norm (others add 0), then the number of overflows
  bool received = false;

  WindowGradients::Measure wait() {
    if (!received) {
      const auto open = connections.lock();
      TORCH_CHECK(open && pending, "Replicas: must outlive every request for a gradient norm, but were destroyed");
      open->wait(pending, "the norms of all parts");
      received = true;
      pending.reset();
    }
    const auto ranks = sums.numel() - 1;
    return {l2_norm_of(sums.narrow(0, 0, ranks)).item<double>(), sums.const_data_ptr<double>()[ranks] == 0};
  }
};

GRADACCUM_INLINE void ReplicaCommunicator::connect(const std::vector<at::Tensor>& parameters) {
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  channel_ = connections_->connect_devices(connections_->all_gather(device_name(parameters)), device);
}

GRADACCUM_INLINE void ReplicaCommunicator::disconnect() {
  if (norms_) norms_->pending.reset();
  norms_.reset();
  end_window();
  connections_.reset();
}

GRADACCUM_INLINE void ReplicaCommunicator::join(AnyOptimizer& optimizer) {
  if (options_.shard == Shard::none) return;
  TORCH_CHECK(!optimizer.members.empty(),
              "Shard: the optimizer must be a torch::optim::Optimizer, whose groups can take shards; got ",
              optimizer.name());
  std::vector<torch::optim::Optimizer*> members;
  for (auto& [name, member] : optimizer.members) {
    TORCH_CHECK(
        member.state().empty(), "Shard: ", type_name(member),
        " must not have any state yet, as torch::optim::Adagrad has from construction and others after a step; "
        "load a state after the Replicas are constructed, by ga::load or ga::OptimizerState of the accumulator");
    members.push_back(&member);
  }
  shards_ = std::make_shared<Shards>(std::move(members), rank(), connections_->world_size());
}

GRADACCUM_INLINE std::string ReplicaCommunicator::settings_of_sharded() const {
  std::string lines;
  if (!shards_) return lines;
  int i = 0;
  for (auto* const optimizer : shards_->optimizers())
    for (auto& group : optimizer->param_groups())
      lines += plain_text("learning rate of group ", i++, ": ", group.options().get_lr(), "\n");
  return lines;
}

GRADACCUM_INLINE void ReplicaCommunicator::begin_exchange(const std::shared_ptr<WindowGradients>& window) {
  if (exchange_) return;
  TORCH_CHECK(connections_, "Replicas: must outlive training with the accumulator, but were destroyed");
  const auto bytes = options_.bucket_bytes;
  if (shards_)
    exchange_ = std::make_shared<GradReduceScatter>(connections_, channel_, window, bytes, shards_);
  else
    exchange_ = std::make_shared<GradAllReduce>(connections_, channel_, window, bytes);
}

GRADACCUM_INLINE void ReplicaCommunicator::backward(const std::shared_ptr<WindowGradients>& window,
                                                    const std::function<void()>& run) {
  if (!options_.overlap && !take_each_backward()) return run();
  try {
    begin_exchange(window);
    if (shards_) return run_round(*window, run);
    const GradReadyScope scope(exchange_);
    run();
  } catch (...) {
    end_window();
    throw;
  }
}

/// Announces that this rank runs a backward. It does not know which other ranks do, so all of them send.
GRADACCUM_INLINE void ReplicaCommunicator::run_round(WindowGradients& window, const std::function<void()>& run) {
  connections_->begin_exchange(exchange_.get());
  at::Tensor sums;
  const std::vector<double> none(exchange_->parameters().size());
  const auto pending = begin_sums(sums, {.running = 1, .used = none, .frozen = exchange_->frozen()});
  announced_ = true;
  window.set_elsewhere();
  exchange_->begin_round();
  {
    std::optional<GradReadyScope> scope;
    if (options_.overlap) scope.emplace(exchange_);
    run();
  }
  window.fold_into_sums();  // gradients that were not sent
  exchange_->end_round();
  connections_->wait(pending, "the others to send gradients");
}

GRADACCUM_INLINE void ReplicaCommunicator::end_window() {
  const auto exchange = std::exchange(exchange_, {});
  const bool joined = std::exchange(joined_, {}).has_value(), announced = std::exchange(announced_, false);
  if (shards_) shards_->clear_gradients();
  if (connections_) connections_->end_exchange(exchange.get());
  if (connections_ && (announced || joined || (exchange && exchange->begun())))
    connections_->give_up("a window was discarded, or met an exception, when others counted on its gradients");
}

GRADACCUM_INLINE void ReplicaCommunicator::reduce(const std::shared_ptr<WindowGradients>& window) {
  or_give_up(connections_, [&] {
    begin_exchange(window);
    const auto all = joined_ ? *joined_ : agree(window, /*active=*/true);
    if (!shards_)
      exchange_->end_round();
    else if (all.unsent > 0)
      exchange_->send_round();
    const auto divisor = exchange_->finish(all.used, all.weight);
    window->set_weights(divisor, all.weight);
    if (shards_) gather_norms(*window);
    used_.clear();
    for (std::size_t index = 0; index < all.used.size(); ++index)
      if (all.used[index] > 0) used_.push_back(index);
  });
  exchange_.reset(), joined_.reset();
  announced_ = false;
}

/// Begins the exchange on all ranks now, so that a rank that reads the norm later does not wait for ranks that never
/// read it.
GRADACCUM_INLINE void ReplicaCommunicator::gather_norms(WindowGradients& window) {
  if (norms_) norms_->wait();  // of a window that was not stepped: each rank waits for it once
  const auto own = window.measure();
  const auto sums = at::zeros({connections_->world_size() + 1}, at::kDouble);
  sums.mutable_data_ptr<double>()[rank()] = own.norm;
  sums.mutable_data_ptr<double>()[connections_->world_size()] = own.finite ? 0 : 1;
  norms_ = std::make_shared<GatheredNorms>(
      GatheredNorms{connections_, connections_->begin_all_reduce(Connections::Channel::agreement, sums), sums});
  window.set_measure_of_all([norms = norms_] { return norms->wait(); });
}

/// Returns the result of the whole step, even if this rank has no piece. A rank that rejects the window gathers the
/// parameters, too: if another does not, both reach the check of `agree`.
GRADACCUM_INLINE StepResult ReplicaCommunicator::step(AnyOptimizer& optimizer,
                                                      const std::shared_ptr<WindowGradients>& window) {
  rejected_ += window->rejected().has_value();
  if (!shards_) return step_optimizer(optimizer, window->handle());
  TORCH_CHECK(connections_, "Replicas: must outlive training with the accumulator, but were destroyed");
  connections_->check_usable();  // otherwise this rank would step before it notices a failure
  StepResult result = StepResult::empty;
  or_give_up(connections_, [&] {
    if (!used_.empty()) {
      shards_->check();
      shards_->check_can_be_stepped();
      auto gradients = window->handle();
      const bool overflowed = gradients.overflowed();  // on all ranks: the host knows the findings on all pieces
      result = overflowed ? StepResult::skipped : gradients.rejected() ? StepResult::rejected : StepResult::stepped;
      if (result && !gradients.raw().empty()) shards_->with_own([&] { step_optimizer(optimizer, gradients); });
    }
    if (result || result == StepResult::rejected)
      all_gather_parameters(*connections_, channel_, *shards_, used_, options_.bucket_bytes);
    window->wait_for_measure();
    norms_.reset();
  });
  return result;
}

GRADACCUM_INLINE bool ReplicaCommunicator::others_continue(const std::shared_ptr<WindowGradients>& window) {
  TORCH_CHECK(!joined_, "Replicas: others_continue() was called twice; call step() with the other ranks first");
  or_give_up(connections_, [&] {
    begin_exchange(window);
    joined_ = agree(window, /*active=*/false);
  });
  if (joined_->active > 0) return true;
  joined_.reset();
  if (!exchange_->begun()) exchange_.reset();  // otherwise it has sums of a window that continues
  return false;
}

/// Begins to sum numbers over all ranks. `sums` has them when the result has been waited for.
GRADACCUM_INLINE Connections::Pending ReplicaCommunicator::begin_sums(at::Tensor& sums, const WindowTotals& own) const {
  std::vector<double> numbers;
  for_each_number(own, [&](double number) { numbers.push_back(number); });
  sums = at::tensor(numbers, at::kDouble);
  return connections_->begin_all_reduce(Connections::Channel::agreement, sums);
}

GRADACCUM_INLINE WindowTotals ReplicaCommunicator::sums_of_all(const WindowTotals& own) const {
  at::Tensor sums;
  connections_->wait(begin_sums(sums, own), "the others to close their window");
  auto all = own;
  for_each_number(all, [next = sums.const_data_ptr<double>()](double& number) mutable { number = *next++; });
  return all;
}

/// Sums the ranks' numbers, and repeats while any rank is inside a window's backward.
GRADACCUM_INLINE WindowTotals ReplicaCommunicator::agree(const std::shared_ptr<WindowGradients>& window, bool active) {
  auto own = report ? report() : WindowTotals();
  own.weight = window->items();
  own.active = active ? 1 : 0;
  own.rejected = static_cast<double>(rejected_);
  own.used = exchange_->used(), own.frozen = exchange_->frozen();
  own.unsent = exchange_->has_unsent() ? 1 : 0;
  auto all = sums_of_all(own);
  // A rank without a batch has not sent a bucket yet, whose size would differ.
  for (std::size_t i = 0; i < own.frozen.size(); ++i)
    TORCH_CHECK(all.frozen[i] == own.frozen[i] * world_size(),
                "Replicas: all ranks must train the same parameters in a window, but parameter ", i, " (shape ",
                exchange_->parameters()[i].sizes(), ") is frozen on ", all.frozen[i], " of ", world_size(),
                " ranks: change requires_grad before the same window on all ranks, also in the loop over "
                "others_continue()");
  while (all.running > 0) {
    window->set_elsewhere();
    exchange_->send_round();
    own.unsent = 0;
    all = sums_of_all(own);
  }
  TORCH_CHECK(all.rejected == own.rejected * world_size(),
              "Replicas: all ranks must reject the same windows, but this one has rejected ", rejected_, " and all ",
              world_size(), " together ", all.rejected, "; decide by the window's norm(), which is equal on all ranks");
  if (on_reduced) on_reduced(own, all);
  return all;
}

GRADACCUM_INLINE std::string pack(const Archive::Values& values) {
  std::vector<c10::IValue> all;
  for (auto& [name, value] : values) {
    const auto* const tensor = std::get_if<at::Tensor>(&value);
    TORCH_INTERNAL_ASSERT(!tensor || !tensor->defined());
    all.emplace_back(name);
    all.push_back(tensor ? c10::IValue() : std::visit([](auto& held) { return c10::IValue(held); }, value));
  }
  const auto bytes = torch::jit::pickle(c10::ivalue::Tuple::create(std::move(all)));
  return {bytes.begin(), bytes.end()};
}

GRADACCUM_INLINE Archive::Values unpack(const std::string& bytes) {
  const auto pickled = torch::jit::unpickle(bytes.data(), bytes.size());
  const auto& all = pickled.toTupleRef().elements();
  Archive::Values values;
  for (std::size_t i = 0; i + 1 < all.size(); i += 2) {
    auto& value = values[all[i].toStringRef()];
    const auto& held = all[i + 1];
    if (held.isBool())
      value = held.toBool();
    else if (held.isInt())
      value = held.toInt();
    else if (held.isDouble())
      value = held.toDouble();
    else if (held.isString())
      value = held.toStringRef();
    else
      value = at::Tensor();
  }
  return values;
}

inline constexpr auto names_missing = "has not";  // names that rank 0 has and this rank lacks, one per line

GRADACCUM_INLINE std::string prefix_of_rank(int rank) { return "rank_" + std::to_string(rank) + "."; }

GRADACCUM_INLINE Archive::Values fingerprints_of(const Archive::Values& values) {
  auto prints = values;
  for (auto& [name, value] : prints)
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) value = fingerprint_of(*tensor);
  return prints;
}

/// Returns the values that differ from rank 0's, `first`, where fingerprints replace tensors.
GRADACCUM_INLINE Archive::Values different_values(const Archive::Values& values, const Archive::Values& first) {
  const auto to_the_bit = [](auto& value) { return pack({{"", value}}); };  // NaN equals NaN
  Archive::Values own;
  const auto prints = fingerprints_of(values);
  for (auto& [name, value] : values)
    if (const auto known = first.find(name);
        known == first.end() || to_the_bit(known->second) != to_the_bit(prints.at(name)))
      own[name] = value;
  std::string missing;
  for (auto& [name, value] : first)
    if (!values.contains(name)) missing += name + "\n";
  if (!missing.empty()) own[names_missing] = missing;
  return own;
}

/// Combines the states of all ranks: rank 0's, and different values of other ranks, such as random states and positions
/// in the data, under `rank_1.` and so on. Rank 0's archive receives the numbers and strings of other ranks. Tensors
/// are not sent: another rank's archive keeps only its own tensors that differ.
GRADACCUM_INLINE void ReplicaCommunicator::gather(Archive& archive) const {
  TORCH_CHECK(connections_ || !shards_, "Replicas: must outlive saving what they have sharded, but were destroyed");
  if (!connections_) return;
  or_give_up(connections_, [&] {
    const bool is_first = rank() == 0;
    const auto first = unpack(connections_->all_gather(is_first ? pack(fingerprints_of(archive.values())) : "")[0]);
    auto own = is_first ? Archive::Values() : different_values(archive.values(), first);
    if (!is_first) archive = Archive::of_references();
    for (auto value = own.begin(); value != own.end();) {
      auto* const tensor = std::get_if<at::Tensor>(&value->second);
      const bool is_kept = tensor != nullptr && tensor->defined();
      if (is_kept) archive(prefix_of_rank(rank()) + value->first, *tensor);
      value = is_kept ? own.erase(value) : std::next(value);
    }
    const auto all = connections_->all_gather(pack(own));
    for (std::size_t other = 1; is_first && other < all.size(); ++other)
      for (auto& [name, value] : unpack(all[other]))
        std::visit([&, &key = name](auto& held) { archive(prefix_of_rank(static_cast<int>(other)) + key, held); },
                   value);
  });
}

GRADACCUM_INLINE void ReplicaCommunicator::keep_own_values(Archive::Values& values) const {
  Archive::Values own;
  const auto prefix = prefix_of_rank(rank());
  std::erase_if(values, [&](auto& value) {
    if (value.first.starts_with(prefix)) own[value.first.substr(prefix.size())] = value.second;
    return without_rank(value.first) != value.first;  // another part's name may also begin with "rank_"
  });
  if (const auto missing = own.extract(names_missing)) {
    std::istringstream lines(std::get<std::string>(missing.mapped()));
    for (std::string name; std::getline(lines, name);) values.erase(name);
  }
  for (auto& [name, value] : own) values[name] = value;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
