// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: saving

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

namespace detail {
struct SaveStateRun;
}

/// Selects how a save proceeds while the previous state is still being written.
enum class WhenBusy {
  wait,  ///< waits until the previous state is written
  skip   ///< saves nothing
};

/// The states to keep, and how to copy and write them.
struct BackgroundSaverOptions {
  std::int64_t keep_last = 0;           ///< remove all but this many of the newest states; 0: remove none
  WhenBusy when_busy = WhenBusy::wait;  ///< while an earlier state is being written
  bool stage_on_device = false;         ///< copy within the device's memory first, then to the host during training
};

namespace detail {

/// A copy of a state in host memory, in the layout of its files. The next copy reuses the memory.
class StateCopy {
 public:
  /// Copies an archive's tensors. Copies from a device are asynchronous. With `staged`, the current streams copy within
  /// a device, and other streams copy from there to the host.
  void take(const Archive& archive, bool staged);
  /// Writes and syncs the files. Waits for copies from devices; any thread may call it.
  StateFiles write(const std::filesystem::path& folder) const;

  /// The memory of each file, and their sum.
  const Archive::Tensors& memory() const { return memory_; }
  std::int64_t bytes() const;

 private:
  /// Returns the first byte of a file, aligned to a block.
  char* begin(const std::string& file) const;
  void copy_file(const std::string& file, const io::Tensors& tensors, at::Tensor memory, bool staged);

  Archive::Tensors memory_;
  std::map<std::string, std::size_t> sizes_;
  std::vector<c10::Event> copied_;
};

}  // namespace detail

/// Saves like `ga::save`, but returns once the state is copied to host memory, and writes it on a thread.
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
/// As with `ga::save`, a state gets its name once all of it is on the disk: a process that is killed or calls `exit`
/// before leaves the earlier states as they were. One state is written at a time. Errors of the thread are thrown by
/// the next `save` or by `wait`, with the name of the file; the training is unaffected. After `fork` only the parent
/// writes.
///
/// Ranks. All ranks call `save`, and all call `wait`. Each rank's thread writes its own tensors and a list of its
/// files, and rank 0's thread names the state once all lists exist.
///
/// @note Takes host memory for one copy of the state, which all saves use: see `bytes`. States on a device are copied
/// to pinned memory, whose size LibTorch rounds up to powers of two, and only the current streams wait for the copy.
/// With `.stage_on_device` they wait for a temporary copy in the device's memory; `save` throws `c10::OutOfMemoryError`
/// if that does not fit. The thread has a low priority and uses one core.
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

  /// Waits until the last state is on the disk. Returns its path; empty if there is none.
  std::filesystem::path wait();

  /// Returns true while a state is being written on this rank.
  bool busy() const;
  /// Returns the bytes of the copy; 0 before the first save.
  std::int64_t bytes() const { return copy_.bytes(); }

 private:
  friend struct detail::SaveStateRun;
  struct Work;

  /// Runs on rank 0's thread with the path of a new state, to remove older ones in place of `keep_last`. Returns the
  /// path that the state has afterwards.
  using Then = std::function<std::filesystem::path(const std::filesystem::path&)>;

  bool save(const detail::AnyTraining& training, const Then& then);
  /// Throws the error of this rank's thread, if there is one so far.
  void check();
  /// Drops the pending state in a child process of `fork`, which has no thread that writes it.
  void leave_work_to_parent();
  /// Waits for the thread. Does not throw.
  void join() const;

  std::filesystem::path directory_, last_;
  BackgroundSaverOptions options_;
  detail::StateCopy copy_;
  std::shared_ptr<Work> work_;  // the pending state
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/saving/background_saver.ipp>
#endif
