// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/training_state.hpp>

#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace gradaccum {

struct SaveState;

/// Tells a save what to do while the one before it is still being written.
enum class WhenBusy {
  wait,  ///< waits until that one is written
  skip   ///< saves nothing
};

/// The states to keep, and what to do when they come too fast.
struct BackgroundSaverOptions {
  std::int64_t keep_last = 0;           ///< remove all but this many of the newest states; 0: remove none
  WhenBusy when_busy = WhenBusy::wait;  ///< while an earlier state is being written
  bool stage_on_device = false;         ///< copy within the device's memory first, and from there beside the training
};

namespace detail {

/// A copy of a state in host memory, as the files that it will be. The next copy uses the memory again.
class StateCopy {
 public:
  /// Copies an archive's tensors. Those from a device are complete when the device has got there. `staged`: the current
  /// streams copy within a device, and others from there to the host.
  void take(const Archive& archive, bool staged);
  /// Writes and syncs the files. Waits for copies from devices; any thread may call it.
  StateFiles write(const std::filesystem::path& folder) const;

  /// The memory of each file, and their sum.
  const Archive::Tensors& memory() const { return memory_; }
  std::int64_t bytes() const;

 private:
  /// Returns the first byte of a file, at a multiple of a block.
  char* begin(const std::string& file) const;
  void copy_file(const std::string& file, const io::Tensors& tensors, at::Tensor memory, bool staged);

  Archive::Tensors memory_;
  std::map<std::string, std::size_t> sizes_;
  std::vector<c10::Event> copied_;
};

}  // namespace detail

/// Saves like `ga::save`, but returns when the state is copied to host memory: a thread writes it.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     ga::BackgroundSaver saver("runs/3", {.keep_last = 2});
///     for (auto& batch : batches) {
///       trainer.step(batch);
///       saver.save(trainer);                               // returns when the state is copied
///     }
///     std::cout << saver.wait();                           // "runs/3/step-000040", say: it is on the disk
///
/// A state is as safe as one of `ga::save`: it appears under its name when all of it is on the disk, and a process that
/// is killed before leaves the states that were there, and so does one that calls `exit` while the saver lives. In a
/// child of `fork` the state that is being written is the parent's. One state is written at a time. What goes wrong
/// while it is written is thrown by the next `save` or by `wait`, with the name of the file; the training is unharmed.
///
/// With several processes all ranks call `save`, and all call `wait`. Each rank's thread writes its own tensors, and
/// the state gets its name when all have: rank 0's thread sees it by the lists of files that they leave in its folder.
///
/// @note Takes host memory for one copy of the state, which is used for each save: see `bytes`. From a device it goes
/// to pinned memory, which LibTorch rounds up to powers of two, and only the current streams wait for the copy; with
/// `.stage_on_device` they wait for a copy in the device's memory, which is freed soon: `save` throws
/// `c10::OutOfMemoryError` where there is no room. The thread has a low priority and uses one core.
class BackgroundSaver {
 public:
  explicit BackgroundSaver(std::filesystem::path directory, BackgroundSaverOptions options = {});
  BackgroundSaver& operator=(BackgroundSaver&&) = delete;
  /// Waits for the thread, and prints a warning if the state could not be written. Drops the state if other ranks take
  /// ten seconds longer than this one.
  ~BackgroundSaver();

  /// Begins to save. Returns false if nothing was saved, because an earlier state is still being written.
  template <saveable Training>
  bool save(Training& training) {
    return save(detail::AnyTraining(training), nullptr);
  }

  /// Waits until the last state is on the disk, and returns its path; empty if there is none.
  std::filesystem::path wait();

  /// Returns true while a state is being written on this rank.
  bool busy() const;
  /// Returns the bytes of the copy, 0 before the first save.
  std::int64_t bytes() const { return copy_.bytes(); }

 private:
  friend struct SaveState;
  struct Work;

  /// Runs on rank 0's thread with the path of a new state, and returns the path that it has afterwards. Removes older
  /// states, as `keep_last` does where there is none.
  using Then = std::function<std::filesystem::path(const std::filesystem::path&)>;

  bool save(const detail::AnyTraining& training, const Then& then);
  /// Throws what went wrong on this rank alone, if that is known already.
  void check();
  /// Forgets a state that another process writes: a child of `fork` has no thread that it could wait for.
  void leave_work_to_parent();
  /// Waits for the thread, and throws nothing.
  void join() const;

  std::filesystem::path directory_, last_;
  BackgroundSaverOptions options_;
  detail::StateCopy copy_;
  std::shared_ptr<Work> work_;  // under way
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/background_saver.ipp>
#endif
