// SPDX-License-Identifier: Apache-2.0
// Forms the batches of an epoch: shuffling, buckets of similar lengths, prefetching on a thread.
#pragma once

#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/prefetch.hpp>
#include <gradaccum/data/tensor_batches.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/recorded_inputs.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/format.h>

#include <algorithm>
#include <ostream>
#include <set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

using Rows = std::vector<std::int64_t>;

/// Cuts `order` into batches, the longest sequence first in each. By `batch_size`, and with a multiple of lengths, only
/// the last one is smaller: rows left over by a mega-batch go to the next. Without shuffling, all are sorted together.
/// A short list sorts a quarter of it, but at least 4 batches, so that two epochs have different batches.
GRADACCUM_INLINE std::vector<Rows> cut_by_length(const PaddedSequences& sequences, Rows order,
                                                 const data::LengthBucketsOptions& options) {
  const auto weight = [&](std::int64_t row) { return options.tokens > 0 ? sequences.padded_length(row) : 1; };
  std::int64_t all = 0;
  for (auto row : order) all += weight(row);
  const auto room = std::max(options.batch_size, options.tokens);  // capacity of a batch, in sequences or elements
  const auto together = std::min(options.mega_batch, std::max<std::int64_t>(all / room / 4, 4));
  const auto mega_room = !options.shuffle || all / room < together ? all : room * together;
  std::vector<Rows> batches;
  for (auto from = order.begin(), to = from; to != order.end();) {
    for (auto left = mega_room; to != order.end() && weight(*to) <= left; ++to) left -= weight(*to);
    std::stable_sort(from, to, [&](auto a, auto b) { return sequences.length(a) > sequences.length(b); });
    while (from != to) {
      const auto batch = from;
      if (options.pad_to_multiple_of > 1 && to != order.end() && to - from < room / weight(*from)) break;
      from += std::min<std::int64_t>(to - from, room / weight(*from));
      batches.emplace_back(batch, from);
    }
  }
  return batches;
}

/// Returns the number of batches of `size` rows; only the last one may have fewer.
GRADACCUM_INLINE std::int64_t batches_by_rows(std::int64_t rows, std::int64_t size, bool drop_last) {
  return rows / size + (!drop_last && rows % size != 0);
}

/// Returns the numbers [0, count), shuffled or not.
GRADACCUM_INLINE Rows in_order(std::int64_t count, bool shuffle, at::Generator& generator) {
  const at::TensorOptions numbers(at::kLong);
  const auto order = shuffle ? at::randperm(count, generator, numbers) : at::arange(count, numbers);
  return {order.data_ptr<std::int64_t>(), order.data_ptr<std::int64_t>() + count};
}

/// Mixes all bits of both numbers (splitmix64's mixing step) into 32, since the generator uses 32 bits of its seed.
GRADACCUM_INLINE at::Generator epoch_generator(std::uint64_t seed, std::int64_t epoch) {
  auto z = seed + 0x9E3779B97F4A7C15u * (static_cast<std::uint64_t>(epoch) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return at::make_generator<at::CPUGeneratorImpl>((z ^ (z >> 31)) >> 32);
}

GRADACCUM_INLINE void ShareOfRank::check(const char* owner) const {
  TORCH_CHECK(world_size >= 1 && 0 <= rank && rank < world_size, owner, ": rank must be in [0, world_size), got ", rank,
              " of ", world_size);
}

/// Returns true if an operation draws from a default generator. A composite one, such as a dropout that may be off,
/// does not count, but its parts do.
GRADACCUM_INLINE bool draws_by_default(const at::RecordFunction& operation) {
  const auto name = operation.operator_name();
  if (!name) return false;
  const auto known = c10::Dispatcher::singleton().findSchema(*name);
  if (!known || !known->hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (known->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  return std::ranges::none_of(recorded_inputs(operation), &c10::IValue::isGenerator);
}

/// Returns the name of the first operation of this thread that drew. LibTorch carries callbacks to other threads, too.
GRADACCUM_INLINE std::string& drawn_on_this_thread() {
  static thread_local std::string operation;
  return operation;
}

/// Throws after the draw, which cannot be undone: it changes the random numbers of the training.
GRADACCUM_INLINE void make_without_draws(c10::function_ref<void()> make) {
  auto& drawn = drawn_on_this_thread();
  drawn.clear();
  const auto note = [](const at::RecordFunction& operation) -> std::unique_ptr<at::ObserverContext> {
    auto& first = drawn_on_this_thread();
    if (first.empty() && draws_by_default(operation)) first = operation.name();
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  const auto end = c10::make_scope_exit([handle] { at::removeCallback(handle); });
  make();
  TORCH_CHECK(drawn.empty(),
              "Prefetch: preparing a batch ahead must not draw from LibTorch's default generators, which training uses "
              "at the same time, but ",
              drawn,
              " did; give the range its own generator (at::make_generator), or pass {.allow_draws = true} to accept "
              "other random numbers than without Prefetch");
}

/// Limits this thread's operations to one thread. `at::set_num_threads` would also apply to all threads started later.
GRADACCUM_INLINE void work_on_this_thread_alone() {
  at::get_num_threads();                  // the first call on a thread sets its number, so both calls come first:
  at::internal::lazy_init_num_threads();  // in LibTorch, and in operations compiled into this program
  if (auto* const set = reinterpret_cast<void (*)(int)>(find_symbol(nullptr, "omp_set_num_threads"))) set(1);
  if (auto* const set = reinterpret_cast<int (*)(int)>(find_symbol(nullptr, "MKL_Set_Num_Threads_Local"))) set(1);
}

/// Detaches profilers, which belong to the other thread and may end there while this one works.
GRADACCUM_INLINE void leave_profilers() {
  at::clearThreadLocalCallbacks();
  if (!MemoryLedger::possible()) c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
}

/// Returns `work` for another thread, which runs it in the LibTorch state of this one: modes such as grad mode, the
/// memory meter, the current device, and the streams of devices in use; a query would initialise other devices. Its
/// operations use no further threads: a second OpenMP team would compete with the first for cores, both spinning.
auto in_this_context(auto work) {
  std::optional<c10::Device> device;
  std::vector<c10::Stream> streams;
  if (at::globalContext().hasCUDA()) {
    auto& cuda = at::detail::getCUDAHooks();
    const c10::impl::VirtualGuardImpl devices(at::kCUDA);
    for (c10::DeviceIndex index = 0; index < cuda.getNumGPUs(); ++index)
      if (cuda.hasPrimaryContext(index)) streams.push_back(devices.getStream({at::kCUDA, index}));
    if (!streams.empty()) device = devices.getDevice();
  }
  return [work, device, streams, modes = at::ThreadLocalState()] {
    work_on_this_thread_alone();
    const at::ThreadLocalStateGuard guard(modes);
    leave_profilers();
    if (device) {
      const c10::impl::VirtualGuardImpl devices(at::kCUDA);
      for (auto& stream : streams) devices.exchangeStream(stream);
      devices.setDevice(*device);
    }
    work();
  };
}

/// Joins an old thread while holding the lock, which a thread that has ended no longer needs.
GRADACCUM_INLINE void PreparedAhead::start() {
  const std::lock_guard lock(mutex_);
  const bool all_made = !made_.empty() && !made_.back().made;
  if (working_ || all_made) return;
  if (thread_.joinable()) thread_.join();
  thread_ = starting_thread("Prefetch", [&] { return std::thread(in_this_context([this] { work(); })); });
  working_ = true;
}

GRADACCUM_INLINE std::shared_ptr<void> PreparedAhead::take() {
  start();
  Entry next;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !made_.empty(); });
    next = std::move(made_.front());
    made_.pop_front();
  }
  changed_.notify_all();
  if (next.error) std::rethrow_exception(next.error);
  return next.made;
}

GRADACCUM_INLINE void PreparedAhead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  stopping_ = false;
}

GRADACCUM_INLINE void PreparedAhead::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || made_.size() < depth_; });
    if (stopping_) break;
    lock.unlock();
    Entry next;
    try {
      next.made = make_();
    } catch (...) {
      next.error = std::current_exception();
    }
    lock.lock();
    made_.push_back(std::move(next));
    changed_.notify_all();
    if (!made_.back().made) break;
  }
  working_ = false;
}

}  // namespace gradaccum::detail

namespace gradaccum::data {

GRADACCUM_INLINE LengthBuckets::LengthBuckets(std::vector<at::Tensor> sequences, at::Tensor targets,
                                              LengthBucketsOptions options)
    : sequences_("sequences", "padding", std::move(sequences), options.padding, options.pad_to_multiple_of),
      targets_(std::move(targets)),
      options_(options) {
  TORCH_CHECK(targets_.defined() && targets_.dim() > 0,
              "LengthBuckets: targets must have a first dimension, their rows");
  check(targets_.size(0));
}

GRADACCUM_INLINE LengthBuckets::LengthBuckets(std::vector<at::Tensor> sequences, std::vector<at::Tensor> targets,
                                              LengthBucketsOptions options)
    : sequences_("sequences", "padding", std::move(sequences), options.padding, options.pad_to_multiple_of),
      token_targets_(std::in_place, "targets", "target_padding", std::move(targets), options.target_padding,
                     options.pad_to_multiple_of),
      options_(options) {
  check(token_targets_->size());
}

GRADACCUM_INLINE void LengthBuckets::check(std::int64_t targets) const {
  TORCH_CHECK(rows() == targets, "LengthBuckets: there must be as many targets as sequences, ", rows(), ", got ",
              targets);
  const auto [least, most] = std::minmax(options_.batch_size, options_.tokens);
  TORCH_CHECK(least == 0 && most >= 1,
              "LengthBuckets: exactly one of batch_size and tokens must be given and >= 1, got ", options_.batch_size,
              " and ", options_.tokens);
  TORCH_CHECK(!options_.drop_last || options_.batch_size > 0,
              "LengthBuckets: drop_last must come with batch_size; with tokens, batches have no fixed size");
  share().check("LengthBuckets");
  TORCH_CHECK(options_.mega_batch >= 1, "LengthBuckets: mega_batch must be >= 1, got ", options_.mega_batch);
  for (std::int64_t row = 0; row < rows(); ++row) {
    TORCH_CHECK(sequences_.length(row) > 0, "LengthBuckets: every sequence must have an element, but number ", row,
                " has none; remove it");
    TORCH_CHECK(options_.tokens == 0 || sequences_.padded_length(row) <= options_.tokens,
                "LengthBuckets: every sequence must fit into tokens = ", options_.tokens, ", but number ", row,
                " has length ", sequences_.padded_length(row), "; truncate it, remove it, or raise tokens");
  }
}

GRADACCUM_INLINE std::int64_t LengthBuckets::all_of(std::int64_t epoch) const {
  if (options_.batch_size > 0) return detail::batches_by_rows(rows(), options_.batch_size, options_.drop_last);
  const auto known = sizes_.find(epoch);
  if (known != sizes_.end()) return known->second;
  return sizes_[epoch] = std::ssize(batches_of(epoch));
}

GRADACCUM_INLINE const std::vector<LengthBuckets::Rows>& LengthBuckets::batches_of(std::int64_t epoch) const {
  if (!options_.shuffle) epoch = 0;  // all epochs are the same
  if (cut_epoch_ == epoch) return batches_;
  auto generator = detail::epoch_generator(options_.seed, epoch);
  auto batches = detail::cut_by_length(sequences_, detail::in_order(rows(), options_.shuffle, generator), options_);
  if (options_.drop_last && rows() % options_.batch_size != 0) batches.pop_back();
  std::vector<Rows> ordered;
  for (auto i : detail::in_order(static_cast<std::int64_t>(batches.size()), options_.shuffle, generator))
    ordered.push_back(std::move(batches[static_cast<std::size_t>(i)]));
  batches_ = std::move(ordered);
  cut_epoch_ = epoch;
  return batches_;
}

GRADACCUM_INLINE SequenceBatch LengthBuckets::batch_at(std::int64_t epoch, std::int64_t number) const {
  const auto& rows = batches_of(epoch)[static_cast<std::size_t>(number)];
  SequenceBatch batch;
  batch.data = sequences_.padded(rows);
  batch.lengths = sequences_.lengths(rows);
  batch.indices = at::tensor(rows);
  batch.tokens = batch.lengths.sum().item<std::int64_t>();
  batch.multiple = options_.pad_to_multiple_of;
  batch.target = token_targets_ ? token_targets_->padded(rows)
                                : targets_.index_select(0, detail::copied_to(targets_.device(), batch.indices));
  if (token_targets_) batch.target_lengths = token_targets_->lengths(rows);
  return batch;
}

GRADACCUM_INLINE LengthBucketsSummary LengthBuckets::summary() const {
  const auto count = size();
  const auto& batches = batches_of(state().epoch);
  std::set<Rows> shapes;
  double padding = 0, elements = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& rows = batches[static_cast<std::size_t>(share().nth(i))];
    Rows shape{std::ssize(rows), sequences_.padded_length(rows.front()), 0};
    elements += static_cast<double>(shape[0] * shape[1]);
    for (const auto row : rows) {
      padding += static_cast<double>(shape[1] - sequences_.length(row));
      if (token_targets_) shape[2] = std::max(shape[2], token_targets_->padded_length(row));
    }
    shapes.insert(shape);
  }
  return {count, std::ssize(shapes), elements > 0 ? padding / elements : 0};
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const LengthBucketsSummary& of) {
  return out << fmt::format("{} batches in {} shapes, {:.1f} % padding", of.batches, of.shapes, 100 * of.padding);
}

GRADACCUM_INLINE std::vector<at::Tensor> batch_tensors(const SequenceBatch& batch) {
  return {batch.data, batch.target, batch.lengths, batch.target_lengths, batch.indices};
}

GRADACCUM_INLINE SequenceBatch slice(const SequenceBatch& batch, std::int64_t from, std::int64_t to) {
  return batch.narrow(from, to - from);
}

GRADACCUM_INLINE SequenceBatch SequenceBatch::narrow(std::int64_t from, std::int64_t count) const {
  SequenceBatch part = *this;
  part.lengths = lengths.narrow(0, from, count);
  part.indices = indices.narrow(0, from, count);
  part.tokens = part.lengths.sum().item<std::int64_t>();
  const auto longest = [this](const at::Tensor& of) {
    return of.numel() > 0 ? (of.max().item<std::int64_t>() + multiple - 1) / multiple * multiple : 0;
  };
  part.data = data.narrow(0, from, count).narrow(1, 0, longest(part.lengths));
  part.target = target.narrow(0, from, count);
  if (!target_lengths.defined()) return part;
  part.target_lengths = target_lengths.narrow(0, from, count);
  part.target = part.target.narrow(1, 0, longest(part.target_lengths));
  return part;
}

GRADACCUM_INLINE SequenceBatch SequenceBatch::to(at::Device device) const {
  SequenceBatch there = *this;
  there.data = detail::brought_to(device, data);
  there.target = detail::brought_to(device, target);
  return there;
}

GRADACCUM_INLINE TensorBatches::TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options)
    : inputs_(std::move(inputs)), targets_(std::move(targets)), order_("TensorBatches", {inputs_, targets_}, options) {}

GRADACCUM_INLINE NamedTensorBatches::NamedTensorBatches(Tensors tensors, const TensorBatchesOptions& options)
    : tensors_(std::move(tensors)), order_("NamedTensorBatches", detail::tensors_of(tensors_), options) {}

}  // namespace gradaccum::data

namespace gradaccum::detail {

GRADACCUM_INLINE RowOrder::RowOrder(const char* owner, const std::vector<at::Tensor>& tensors,
                                    const data::TensorBatchesOptions& options)
    : options_(options) {
  TORCH_CHECK(!tensors.empty(), owner, ": at least one tensor must be given, got none");
  for (auto& tensor : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.dim() > 0, owner, ": tensors must have a first dimension, their rows");
    TORCH_CHECK(tensor.size(0) == tensors.front().size(0), owner, ": tensors must have the same number of rows, got ",
                tensors.front().size(0), " and ", tensor.size(0));
  }
  rows_ = tensors.front().size(0);
  device_ = tensors.front().device();
  TORCH_CHECK(options_.batch_size >= 1, owner, ": batch_size must be >= 1, got ", options_.batch_size);
  share().check(owner);
}

GRADACCUM_INLINE std::int64_t RowOrder::batches() const {
  return batches_by_rows(rows_, options_.batch_size, options_.drop_last);
}

GRADACCUM_INLINE at::Tensor RowOrder::of(const at::Tensor& tensor, std::int64_t epoch, std::int64_t batch) const {
  const auto from = batch * options_.batch_size;
  const auto count = std::min(options_.batch_size, rows_ - from);
  if (!options_.shuffle) return tensor.narrow(0, from, count);
  if (!order_.defined() || epoch_ != epoch) {
    auto generator = epoch_generator(options_.seed, epoch);
    order_ = copied_to(device_, at::randperm(rows_, generator, at::TensorOptions(at::kLong)));
    epoch_ = epoch;
  }
  return tensor.index_select(0, order_.narrow(0, from, count).to(tensor.device()));
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
