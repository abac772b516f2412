// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: data

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/loops.hpp>
#include <gradaccum/detail/data/samples.hpp>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace gradaccum::data {

/// Options for `Prefetch`.
struct PrefetchOptions {
  std::int64_t depth = 2;  ///< maximum number of batches prepared ahead, >= 1
  /// Moves batches to this device; to CUDA from pinned memory, without synchronizing.
  std::optional<c10::Device> device = std::nullopt;
  /// Allows batches to draw from LibTorch's default generators. Their random numbers then differ between runs.
  bool allow_draws = false;
};

/// Iterates over a range, and prepares the next batches in a thread while the current one trains.
///
///     ga::data::TensorBatches batches(images, labels, {.batch_size = 4, .shuffle = true, .seed = 0});
///     ga::data::Prefetch ahead(batches, {.depth = 2});      // .device = model's device brings them there, too
///     for (int epoch = 0; epoch < 3; ++epoch)
///       for (auto& batch : ahead) {
///         auto loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
///         loss.backward();
///       }
///
/// Works with any range. Batches, states and resumed runs are bitwise the same as without it. A range that is passed as
/// an lvalue is held by reference, and must not be used during the loop. It must not reuse a tensor for several
/// batches.
///
/// Random numbers. `begin()` of the range and its first batch run in the loop's thread. Throws, naming the operation,
/// if a later batch draws from LibTorch's default generators, which training uses at the same time: give the range its
/// own generator, or set `allow_draws`.
///
/// Position. The thread calls `state(Archive&)` of a range after each batch, or instead `place()`, which returns a
/// cheap value, and `go_back(place)`. Without these members, a loop that is left early leaves the range up to `depth`
/// batches ahead, so its `begin()` must restart, as for containers and LibTorch's loaders.
///
/// @note Does not synchronize. Only one loop runs at a time. Draws by a DataLoader's workers are not detected. Prepares
/// at most `depth` batches beyond the current one. Leaving a loop, and saving a state, waits for the batch that is
/// being prepared. The thread has the modes, memory meter and streams of the loop's thread, and uses no additional
/// threads for its operations.
template <class Range>
class Prefetch {
  using Bare = std::remove_reference_t<Range>;
  using Pass = detail::RangePass<Bare>;
  using Batch = typename Pass::Batch;

  struct Leave {
    void operator()(Prefetch* owner) const { owner->leave(); }
  };
  struct Loop {
    std::unique_ptr<Prefetch, Leave> owner;

    Batch& batch() { return owner->in_hand_->batch; }
    bool next() { return owner->advance(); }
  };
  using Iterator = detail::BatchIterator<Batch, Loop>;

 public:
  explicit Prefetch(Range&& range, PrefetchOptions options = {})
      : range_(std::forward<Range>(range)), options_(options) {
    TORCH_CHECK(options_.depth >= 1, "Prefetch: depth must be >= 1, got ", options_.depth);
  }

  Iterator begin() {
    TORCH_CHECK(!looping_, "Prefetch: a second loop began inside the first; give it a range and a Prefetch of its own");
    looping_ = true;
    left_.reset();
    return Iterator({std::unique_ptr<Prefetch, Leave>(this)});  // ends the loop if the range throws
  }
  std::default_sentinel_t end() const { return {}; }

  /// Returns the size of the range at the current batch.
  std::int64_t size() const requires requires(const Bare& range) {
    { range.size() } -> std::convertible_to<std::int64_t>;
  }
  {
    const bool noted = in_hand_ && in_hand_->note;
    return noted ? in_hand_->note->size : static_cast<std::int64_t>(std::as_const(range_).size());
  }

  /// Forwards to the range, between two loops.
  std::int64_t most_batches(std::int64_t epochs_ahead) const requires requires(const Bare& range) {
    range.most_batches(epochs_ahead);
  }
  { return range_.most_batches(epochs_ahead); }

  /// Saves the range's state at the current batch, or loads one and discards the prepared batches.
  void state(Archive& archive) requires requires(Bare& range) { range.state(archive); }
  {
    ahead_.stop();
    if (archive.loading()) {
      range_.state(archive);
      return archive.when_all_fit([this] {
        ahead_.clear();
        pass_.reset();
        left_.reset();
        if (in_hand_) in_hand_->note.reset();
      });
    }
    const auto& note = in_hand_ ? in_hand_->note : left_;
    if (note)
      note->save(range_, archive);
    else
      range_.state(archive);
    if (pass_) ahead_.start();
  }

 private:
  using Note = detail::RangeNote<Bare>;
  struct Made {
    Batch batch;
    std::optional<Note> note = std::nullopt;
  };

  /// Moves to the next batch. Returns false if there is none. The range's `begin()` and first batch run in the loop's
  /// thread.
  bool advance() {
    in_hand_.reset();
    if (pass_) {
      in_hand_ = std::static_pointer_cast<Made>(ahead_.take());
    } else {
      pass_.emplace(range_);
      in_hand_ = make();
      if (in_hand_) ahead_.start();
    }
    return in_hand_ != nullptr;
  }
  std::shared_ptr<Made> make() {
    if (!pass_->next()) return nullptr;
    std::shared_ptr<Made> made(new Made{pass_->batch()});
    if (options_.device) detail::bring_to(*options_.device, made->batch);
    made->note.emplace(range_);
    return made;
  }
  std::shared_ptr<void> make_ahead() {
    if (options_.allow_draws) return make();
    std::shared_ptr<void> made;
    detail::make_without_draws([&] { made = make(); });
    return made;
  }

  /// Ends a loop. Moves the range back to its position at the current batch, or keeps its state there for `state`.
  void leave() noexcept {
    ahead_.stop();
    ahead_.clear();
    pass_.reset();
    if (in_hand_ && in_hand_->note) {
      if constexpr (detail::goes_back_to_place<Bare>)
        range_.go_back(in_hand_->note->place);
      else
        left_ = std::move(in_hand_->note);
    }
    in_hand_.reset();
    looping_ = false;
  }

  Range range_;
  PrefetchOptions options_;
  std::optional<Pass> pass_;
  std::shared_ptr<Made> in_hand_;
  std::optional<Note> left_;  // note of the last batch, after a loop was left
  bool looping_ = false;
  detail::PreparedAhead ahead_{static_cast<std::size_t>(options_.depth), [this] { return make_ahead(); }};
};

template <class Range>
Prefetch(Range&&, PrefetchOptions = {}) -> Prefetch<Range>;

}  // namespace gradaccum::data

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/data.ipp>
#endif
