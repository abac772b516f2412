// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/samples_of.hpp>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>
#include <variant>

namespace gradaccum::detail {

template <class Range>
concept saves_its_place = requires(Range& range, Archive& archive) {
  range.state(archive);
};
/// Requires a cheap `place()` that does not read a batch.
template <class Range>
concept goes_back_to_place = requires(Range& range) {
  range.go_back(range.place());
};

/// The position of a range, if it has one.
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
      const Away away(range, place);
      range.state(archive);
    } else {
      for (auto& [name, value] : place.values())
        std::visit([&archive, &name = name](auto held) { archive(name, held); }, value);
    }
  }
  void go_back(Range& range) const {
    if constexpr (goes_back_to_place<Range>) range.go_back(place);
  }

 private:
  struct Away {
    Away(Range& range, const decltype(place)& to) : range_(range), from_(range.place()) { range.go_back(to); }
    Away(const Away&) = delete;
    Away& operator=(const Away&) = delete;
    ~Away() { range_.go_back(from_); }

    Range& range_;
    decltype(place) from_;
  };
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

}  // namespace gradaccum::detail
