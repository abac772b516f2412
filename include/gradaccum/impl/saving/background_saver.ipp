// SPDX-License-Identifier: Apache-2.0
// Copies a training's state, and writes the copy on a thread.
#pragma once

#include <gradaccum/background_saver.hpp>

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/communicator.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <unordered_map>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Copies many arrays, most of which may be small, with several threads.
class ParallelCopy {
 public:
  void add(char* to, const at::Tensor& contiguous) {
    const auto* const from = static_cast<const char*>(contiguous.const_data_ptr());
    for (std::size_t at = 0; at < contiguous.nbytes(); at += piece)
      pieces_.push_back({to + at, from + at, std::min(piece, contiguous.nbytes() - at)});
    alive_.push_back(contiguous);
  }
  void run() const {
    parallel_for(std::ssize(pieces_), [&](std::int64_t i) {
      const auto& [to, from, bytes] = pieces_[static_cast<std::size_t>(i)];
      std::memcpy(to, from, bytes);
    });
  }

 private:
  static constexpr std::size_t piece = std::size_t{4} << 20;
  struct Piece {
    char* to;
    const char* from;
    std::size_t bytes;
  };
  std::vector<Piece> pieces_;
  std::vector<at::Tensor> alive_;
};

GRADACCUM_INLINE char* StateCopy::begin(const std::string& file) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.at(file).mutable_data_ptr());
  return reinterpret_cast<char*>((address + OutputFile::block - 1) / OutputFile::block * OutputFile::block);
}

/// Copies from devices to pinned memory, ordered with the work on their current streams.
class DeviceCopies {
 public:
  explicit DeviceCopies(bool staged) : staged_(staged) {}

  void add(const at::Tensor& to, const at::Tensor& contiguous) {
    const auto numbers = contiguous.is_complex() ? at::view_as_real(contiguous) : contiguous;
    const auto bytes = numbers.flatten().view(at::kByte);
    auto& staged = staged_by_device_[bytes.device()];
    if (staged_)
      staged.emplace_back(to, bytes.clone());
    else
      to.copy_(bytes, /*non_blocking=*/true);
  }
  /// Adds an event for each device, after its last copy; until then, the memory must not be reused.
  void run(std::vector<c10::Event>& copied) const {
    for (auto& [device, staged] : staged_by_device_) {
      const c10::impl::VirtualGuardImpl streams(device.type());
      const auto current = streams.getStream(device);
      const c10::StreamGuard guard(staged_ ? streams.getStreamFromGlobalPool(device) : current);
      auto& event = copied.emplace_back(device.type());
      const auto record = c10::make_scope_exit([&] { event.record(guard.current_stream()); });
      c10::Event now(device.type());
      if (staged_) now.record(current);
      now.block(guard.current_stream());
      for (auto& [to, bytes] : staged) {
        to.copy_(bytes, /*non_blocking=*/true);
        streams.recordDataPtrOnStream(bytes.storage().data_ptr(), guard.current_stream());
      }
    }
  }

 private:
  const bool staged_;
  std::unordered_map<c10::Device, std::vector<std::pair<at::Tensor, at::Tensor>>> staged_by_device_;
};

GRADACCUM_INLINE void StateCopy::take(const Archive& archive, bool staged) {
  const at::NoGradGuard no_grad;
  for (auto& event : std::exchange(copied_, {})) event.synchronize();  // of a copy that failed
  auto before = std::exchange(memory_, {});
  sizes_.clear();
  for (auto& [name, tensors] : tensors_by_file(archive))
    copy_file(name + tensors_suffix, tensors, before[name + tensors_suffix], staged);
}

GRADACCUM_INLINE void StateCopy::copy_file(const std::string& file, const io::Tensors& tensors, at::Tensor memory,
                                           bool staged) {
  auto entries = entries_of(tensors);
  const auto head = lay_out_safetensors(entries, {{"format", "pt"}}, "safetensors");
  const auto bytes = sizes_[file] = head.size() + static_cast<std::size_t>(entries.back().second.end);
  const bool on_device = std::ranges::any_of(tensors, [](auto& one) { return !one.second.is_cpu(); });
  if (!memory.defined() || memory.nbytes() < bytes + OutputFile::block || memory.is_pinned() != on_device)
    memory = at::empty({static_cast<std::int64_t>(bytes + OutputFile::block)},
                       at::TensorOptions(at::kByte).pinned_memory(on_device));
  memory_[file] = memory;
  auto* const first = begin(file);
  std::memcpy(first, head.data(), head.size());
  ParallelCopy on_host;
  DeviceCopies on_devices(staged);
  const auto copy = [&](const at::Tensor& tensor, char* to) {
    const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    if (tensor.is_cpu() && is_plain) return on_host.add(to, tensor);
    if (tensor.is_cpu()) return void(at::from_blob(to, tensor.sizes(), tensor.scalar_type()).copy_(tensor));
    const auto plain = tensor.resolve_conj().resolve_neg().contiguous();
    if (plain.numel() == 0) return;
    const auto offset = to - static_cast<char*>(memory.mutable_data_ptr());
    on_devices.add(memory.narrow(0, offset, static_cast<std::int64_t>(plain.nbytes())), plain);
  };
  try {
    for (auto& [name, entry] : entries) copy(tensors.at(name), first + head.size() + entry.begin);
  } catch (...) {
    on_devices.run(copied_);
    throw;
  }
  on_devices.run(copied_);
  on_host.run();
}

GRADACCUM_INLINE StateFiles StateCopy::write(const std::filesystem::path& folder) const {
  for (auto& event : copied_) {
    c10::impl::VirtualGuardImpl(event.device_type())
        .setDevice(event.device());  // otherwise a thread uses the first device
    event.synchronize();
  }
  StateFiles files;
  for (auto& [name, bytes] : sizes_) {
    OutputFile file(folder / name, OutputFile::Cache::passed_by);
    file.write(begin(name), bytes);
    file.close();
    files[name] = {file.bytes(), file.crc32()};
  }
  return files;
}

GRADACCUM_INLINE std::int64_t StateCopy::bytes() const {
  std::int64_t sum = 0;
  for (auto& [name, memory] : memory_) sum += static_cast<std::int64_t>(memory.nbytes());
  return sum;
}

}  // namespace gradaccum::detail

namespace gradaccum {

/// A state that is being written.
struct BackgroundSaver::Work {
  using Clock = std::chrono::steady_clock;

  Work(const std::filesystem::path& directory, const detail::AnyTraining& training, const detail::StateCopy& copy)
      : peers(training.peers),
        writer(directory, training),
        write_part([this, &copy] { writer.write([&copy](const auto& folder) { return copy.write(folder); }); }) {}

  ~Work() { dropped = true; }  // before `saved` waits for the thread

  /// Runs on the thread. Returns the path of the state on rank 0, or an empty path on other ranks.
  std::filesystem::path run(const Then& then) {
    try {
      detail::lower_priority_of_thread();
      const auto begun = Clock::now();
      write_part();
      written.get();
      const auto patience = std::chrono::seconds(10) + (Clock::now() - begun);  // for ranks with slower disks
      std::optional<Clock::time_point> deadline;
      auto path = writer.finish([&] {
        if (dropped && !deadline) deadline = Clock::now() + patience;
        return !deadline || Clock::now() < *deadline;
      });
      return path.empty() ? path : then(path);
    } catch (...) {
      failed = true;
      throw;
    }
  }

  int process = detail::process_id();
  std::shared_ptr<const detail::Communicator> peers;
  detail::StateWriter writer;
  std::packaged_task<void()> write_part;
  std::shared_future<void> written = write_part.get_future();
  std::atomic<bool> failed = false, dropped = false;
  std::future<std::filesystem::path> saved = {};  // the last member: its destructor waits for the thread
};

GRADACCUM_INLINE BackgroundSaver::BackgroundSaver(std::filesystem::path directory, BackgroundSaverOptions options)
    : directory_(std::move(directory)), options_(options) {
  TORCH_CHECK(options_.keep_last >= 0, "BackgroundSaver: keep_last must be >= 0, got ", options_.keep_last);
}

GRADACCUM_INLINE BackgroundSaver::~BackgroundSaver() {
  leave_work_to_parent();
  join();
  try {
    if (work_) static_cast<void>(work_->saved.get());
  } catch (const std::exception& error) {
    TORCH_WARN("BackgroundSaver: the last state was not saved: ", error.what());
  }
}

/// Leaks the work in a forked process, because its destructor would wait for a thread that only the parent has.
GRADACCUM_INLINE void BackgroundSaver::leave_work_to_parent() {
  if (work_ && work_->process != detail::process_id()) new std::shared_ptr<Work>(std::exchange(work_, {}));
}

GRADACCUM_INLINE bool BackgroundSaver::busy() const {
  return work_ && work_->process == detail::process_id() &&
         work_->saved.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

GRADACCUM_INLINE void BackgroundSaver::check() {
  if (work_ && work_->failed) static_cast<void>(std::exchange(work_, {})->saved.get());
}

GRADACCUM_INLINE void BackgroundSaver::join() const {
  if (!work_) return;
  work_->written.wait();
  work_->dropped = true;  // limits the wait for a rank that has died
  work_->saved.wait();
}

GRADACCUM_INLINE std::filesystem::path BackgroundSaver::wait() {
  leave_work_to_parent();
  const auto work = std::exchange(work_, {});
  if (!work) return last_;
  const auto* const peers = work->peers.get();
  const auto give_up = c10::make_scope_exit([&] { work->dropped = true; });
  detail::run_on_all(peers, [&] { work->written.get(); });
  return last_ = detail::path_of_first(peers, detail::on_all(peers, [&] { return work->saved.get(); }));
}

/// Returns true on all ranks if any of them is busy.
GRADACCUM_INLINE bool any_is(bool busy, const detail::Communicator* peers) {
  if (!peers) return busy;
  const auto all = peers->all_gather_text(busy ? "busy" : "");
  return std::ranges::any_of(all, [](auto& text) { return !text.empty(); });
}

GRADACCUM_INLINE bool BackgroundSaver::save(const detail::AnyTraining& training, const Then& then) {
  const auto* const peers = training.peers.get();
  if (options_.when_busy == WhenBusy::skip && any_is(busy(), peers)) return false;
  wait();
  const auto work = std::make_shared<Work>(directory_, training, copy_);
  const auto keep_last = [this](const std::filesystem::path& path) {
    if (options_.keep_last > 0) detail::StateDirectory(directory_).keep_last(options_.keep_last);
    return path;
  };
  detail::run_on_all(peers, [&] {
    copy_.take(work->writer.take_values(), options_.stage_on_device);
    work->saved = detail::starting_thread("BackgroundSaver", [&] {
      return std::async(std::launch::async,
                        [work = work.get(), then = then ? then : keep_last] { return work->run(then); });
    });
  });
  work_ = work;
  return true;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
