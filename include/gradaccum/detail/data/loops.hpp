// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/samples.hpp>

#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>

#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

namespace gradaccum::detail {

/// This rank's share of an epoch's batches: every `world_size`-th, from the `rank`-th on.
struct ShareOfRank {
  std::int64_t rank = 0, world_size = 1;

  void check(const char* owner) const;
  std::int64_t of(std::int64_t batches) const { return (batches - rank + world_size - 1) / world_size; }
  std::int64_t nth(std::int64_t own) const { return own * world_size + rank; }
};

/// An input iterator. A `Loop` has `bool next()` and the current `Batch& batch()`; it is destroyed after the last one.
template <class Batch, class Loop>
class BatchIterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_category = std::input_iterator_tag;
  using pointer = Batch*;
  using reference = Batch&;

  explicit BatchIterator(Loop loop) : loop_(std::move(loop)) { ++*this; }
  Batch& operator*() const { return loop_->batch(); }
  Batch* operator->() const { return &**this; }
  BatchIterator& operator++() {
    if (!loop_->next()) loop_.reset();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return !loop_; }

 private:
  mutable std::optional<Loop> loop_;  // operator* is const, and returns a Batch&
};

template <class Range>
concept saves_its_place = requires(Range& range, Archive& archive) {
  range.state(archive);
};
/// Requires a cheap `place()` that does not read a batch.
template <class Range>
concept goes_back_to_place = requires(Range& range) {
  range.go_back(range.place());
};

template <class Range>
auto noted_place(Range& range) {
  if constexpr (goes_back_to_place<Range>) {
    return range.place();
  } else if constexpr (saves_its_place<Range>) {
    Archive saved;
    range.state(saved);
    return saved;
  } else {
    return std::monostate();
  }
}

/// The position and size of a range at one of its batches.
template <class Range>
struct RangeNote {
  decltype(noted_place(std::declval<Range&>())) place;
  std::int64_t size;

  explicit RangeNote(Range& range) : place(noted_place(range)), size(batches_of(range).value_or(0)) {}

  /// Saves the range's state at that position. The range itself stays at its own position.
  void save(Range& range, Archive& archive) const requires saves_its_place<Range> {
    if constexpr (goes_back_to_place<Range>) {
      const auto back = c10::make_scope_exit([&range, from = range.place()] { range.go_back(from); });
      range.go_back(place);
      range.state(archive);
    } else {
      for (auto& [name, value] : place.values())
        std::visit([&archive, &entry = name](auto held) { archive(entry, held); }, value);
    }
  }
};

template <class Range>
auto begin_of(Range& range) {
  using std::begin;
  return begin(range);
}
template <class Range>
auto end_of(Range& range) {
  using std::end;
  return end(range);
}

/// One pass over a range by the steps of a range-based for, since LibTorch's iterators do not satisfy std::ranges.
template <class Range>
class RangePass {
  using Current = decltype(begin_of(std::declval<Range&>()));

 public:
  using Batch = std::remove_cvref_t<decltype(*std::declval<Current&>())>;

  explicit RangePass(Range& range) : current_(begin_of(range)), end_(end_of(range)) {}

  /// Moves to the first or the next batch. Returns false if there is none.
  bool next() {
    if (std::exchange(began_, true)) ++current_;
    return current_ != end_;
  }
  /// Returns the current batch as an object that outlives the next step.
  Batch batch() {
    using Given = decltype(*current_);
    if constexpr (std::is_lvalue_reference_v<Given> && !std::copy_constructible<Batch>) {
      static_assert(!std::forward_iterator<Current>,
                    "Prefetch: a range that holds its batches must let them be copied");
      return std::move(*current_);
    } else {
      return *current_;
    }
  }

 private:
  Current current_;
  decltype(end_of(std::declval<Range&>())) end_;
  bool began_ = false;
};

/// Runs `make`, and throws if it drew from LibTorch's default generators, which all threads share.
void make_without_draws(c10::function_ref<void()> make);

/// A queue of at most `depth` objects that a thread prepares in order, for one consumer. The thread starts with `start`
/// or `take`, also after a `stop`, and ends after the last object, or when `make` throws.
class PreparedAhead {
 public:
  /// Returns the next object; null after the last.
  using Make = std::function<std::shared_ptr<void>()>;

  PreparedAhead(std::size_t depth, Make make) : depth_(depth), make_(std::move(make)) {}
  ~PreparedAhead() { stop(); }

  void start();
  /// Returns the next object; null after the last. Rethrows an exception of `make` in its place.
  std::shared_ptr<void> take();
  /// Stops the thread after its current object. Objects that are ready remain.
  void stop();
  /// Discards the objects that are ready. The thread must be stopped.
  void clear() { made_.clear(); }

 private:
  struct Entry {
    std::shared_ptr<void> made = nullptr;
    std::exception_ptr error = nullptr;
  };

  void work();

  std::size_t depth_;
  Make make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> made_;  // an entry without `made` is the last
  bool working_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace gradaccum::detail
