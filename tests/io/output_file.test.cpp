// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include "support/failing_files.hpp"
#include "support/file_size_limit.hpp"
#include "support/files.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/wait.h>

namespace inner = gradaccum::detail;
using namespace testing;
using How = FailingFiles::How;

namespace {

std::string long_text(std::size_t size) {
  std::string text(size, ' ');
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  return text;
}

void write(inner::OutputFile& file, const std::string& text) { file.write(text.data(), text.size()); }

void replace(const std::filesystem::path& path, const std::string& text) {
  inner::replace_file(path, [&](inner::OutputFile& file) { write(file, text); });
}

/// Returns the directory's other files.
std::vector<std::string> others(const std::filesystem::path& path) {
  auto names = inner::names_in(path.parent_path());
  std::erase(names, path.filename().string());
  return names;
}

}  // namespace

TEST_CASE("OutputFile: its bytes, size and checksum") {
  const Directory directory;
  const auto path = directory / "file";
  const auto text = long_text((5 << 20) + 3);  // more than one chunk
  inner::OutputFile file(path);
  CHECK(file.bytes() == 0);
  CHECK(file.crc32() == 0);
  write(file, "");
  write(file, "123456789");
  CHECK(file.crc32() == 0xcbf43926);
  write(file, text);
  file.close();
  CHECK(text_of(path) == "123456789" + text);
  CHECK(file.bytes() == text.size() + 9);
  CHECK(file.crc32() == inner::crc32(("123456789" + text).data(), text.size() + 9));
}

TEST_CASE("OutputFile: never overwrites a file, and writes nothing after close") {
  const Directory directory;
  const auto path = directory / "file";
  write_text(path, "before");
  REQUIRE_ERROR(path.string() + ": must be a new file that can be created, got File exists", inner::OutputFile(path));
  std::filesystem::create_symlink("elsewhere", directory / "link");
  REQUIRE_ERROR("File exists", inner::OutputFile(directory / "link"));
  CHECK(text_of(path) == "before");
  REQUIRE_ERROR("none/file: must be a new file that can be created, got No such file or directory",
                inner::OutputFile(directory / "none/file"));
  inner::OutputFile file(directory / "other");
  file.close();
  REQUIRE_ERROR("other: must be written to, got Bad file descriptor", write(file, "a"));
  REQUIRE_ERROR("other: must be synced to the disk, got Bad file descriptor", file.close());
}

TEST_CASE("OutputFile: is synced before it is closed, and closed by the destructor") {
  const Directory directory;
  const FailingFiles files;
  {
    inner::OutputFile file(directory / "a");
    write(file, "text");
    file.close();
    inner::OutputFile unfinished(directory / "b");
  }
  CHECK(files.calls() == std::vector<std::string>{"open a", "write a", "fsync a", "close a", "open b", "close b"});
}

TEST_CASE("OutputFile: each failing call is an error, and later calls fail") {
  const Directory directory;
  const auto path = directory / "file";
  const auto run = [&](inner::OutputFile& file) {
    write(file, "text");
    write(file, "text");
    file.close();
  };
  const std::vector<std::string> errors{"a new file that can be created", "written to", "written to",
                                        "synced to the disk", "closed"};
  for (long at = 0; at < 5; ++at) {
    std::filesystem::remove(path);
    std::optional<inner::OutputFile> file;
    {
      const FailingFiles files(at, How::fail, ENOSPC);
      REQUIRE_ERROR(path.string() + ": must be " + errors.at(static_cast<std::size_t>(at)) +
                        ", got No space left on device: free some room",
                    (file.emplace(path), run(*file)));
      CHECK(files.has_failed());
    }
    if (!file) continue;
    // A second fsync would succeed, though the first has lost data.
    REQUIRE_ERROR("Bad file descriptor", file->close());
    REQUIRE_ERROR("Bad file descriptor", write(*file, "text"));
  }
}

TEST_CASE("OutputFile: interrupted calls and short writes are continued") {
  const Directory directory;
  const auto text = long_text((2 << 20) + 5);
  for (const auto how : {How::interrupt, How::shorten})
    for (long at = 0;; ++at) {
      const auto path = directory / (std::to_string(static_cast<int>(how)) + "." + std::to_string(at));
      FailingFiles files(at, how);
      inner::OutputFile file(path);
      write(file, text);
      file.close();
      if (!files.has_failed()) break;
      REQUIRE(at < 20);
      CHECK(file.crc32() == inner::crc32(text.data(), text.size()));
      CHECK(file.bytes() == text.size());
      const FailingFiles none;
      CHECK(text_of(path) == text);
    }
}

TEST_CASE("OutputFile: bypasses the system's cache, with any size and any error") {
  const Directory directory;
  using inner::OutputFile;
  const auto text = long_text((5 << 20) + 5);
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(OutputFile::block, 6 << 20), &std::free);
  std::memcpy(memory.get(), text.data(), text.size());
  int number = 0;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, OutputFile::block, 3 * OutputFile::block + 1, text.size()})
    for (const auto how : {How::interrupt, How::shorten, How::fail})
      for (long at = 0;; ++at) {
        if (how == How::fail && (at > 0 || size < OutputFile::block)) break;  // in other calls it is an error
        const auto path = directory / std::to_string(number++);
        OutputFile file(path, OutputFile::Cache::passed_by);
        {
          FailingFiles files(at, how, EINVAL);  // the error of a disk with larger blocks
          file.write(memory.get(), size);
          if (!files.has_failed()) break;
        }
        REQUIRE(at < 20);
        file.close();
        CHECK(file.bytes() == size);
        CHECK(file.crc32() == inner::crc32(text.data(), size));
        CHECK(text_of(path) == text.substr(0, size));
      }
  CHECK(number > 15);
}

TEST_CASE("OutputFile: a write that returns 0 is an error, not a loop") {
  const Directory directory;
  inner::OutputFile file(directory / "file");
  const FailingFiles files(0, How::write_none);
  REQUIRE_ERROR("file: must be written to, got Input/output error", write(file, "text"));
}

TEST_CASE("OutputFile: a limit of the size of files is an error, and the program's own handler is not called") {
  const Directory directory;
  static int signals = 0;
  const auto before = std::signal(SIGXFSZ, [](int) { ++signals; });
  std::string error;
  {
    const FileSizeLimit limit(1000);
    error = error_of([&] { replace(directory / "file", long_text(2000)); });
  }
  CHECK(contains(error, "must be written to, got File too large: raise the limit (ulimit -f)"));
  CHECK(signals == 0);
  std::raise(SIGXFSZ);  // raised by the program
  CHECK(signals == 1);
  std::signal(SIGXFSZ, before);
  CHECK(inner::names_in((directory / "file").parent_path()).empty());
}

TEST_CASE("replace_file: its system calls in order") {
  const Directory directory;
  const auto path = directory / "file";
  std::vector<std::string> calls;
  {
    const FailingFiles files;
    replace(path, "first");
    calls = files.calls();
  }
  CHECK(text_of(path) == "first");
  REQUIRE(calls.size() == 9);
  const auto temporary = calls[0].substr(5);
  CHECK(temporary.starts_with("file.tmp-" + std::to_string(::getpid()) + "-"));
  const auto parent = path.parent_path().filename().string();
  CHECK(calls == std::vector<std::string>{"open " + temporary, "flock " + temporary, "write " + temporary,
                                          "fsync " + temporary, "close " + temporary, "rename " + temporary,
                                          "open " + parent, "fsync " + parent, "close " + parent});
  replace(path, "second");
  CHECK(text_of(path) == "second");
  CHECK(others(path).empty());
}

TEST_CASE("replace_file: each failing call leaves the old file or the new one, and nothing else") {
  const Directory directory;
  const auto path = directory / "file";
  int uncertain = 0;
  for (long at = 0; at < 8; ++at) {
    replace(path, "before");
    std::string error;
    {
      const FailingFiles files(at, How::fail, EDQUOT);
      error = error_of([&] { replace(path, "after"); });
      REQUIRE(files.has_failed());
      if (files.failed().starts_with("flock ")) {  // some file systems have no locks
        CHECK(error.empty());
        continue;
      }
    }
    INFO(at << ": " << error);
    CHECK(contains(error, path.string()));
    CHECK(contains(error, "Disk quota exceeded: free some room"));
    const bool is_replaced = contains(error, "is replaced, but might not be so after a power failure");
    CHECK(text_of(path) == (is_replaced ? "after" : "before"));
    CHECK(others(path).empty());
    uncertain += is_replaced;
  }
  CHECK(uncertain == 2);  // the directory cannot be opened or synced
}

TEST_CASE("replace_file: an exception of the writer") {
  const Directory directory;
  const auto path = directory / "file";
  replace(path, "before");
  REQUIRE_ERROR("no more", inner::replace_file(path, [](inner::OutputFile& file) {
                  write(file, "after");
                  throw std::logic_error("no more");
                }));
  CHECK(text_of(path) == "before");
  CHECK(others(path).empty());
}

TEST_CASE("replace_file: removes leftovers of killed writers of the same file, and nothing else") {
  const Directory directory;
  const auto path = directory / "file";
  const auto killed = ::fork();
  if (killed == 0)
    inner::replace_file(path, [](inner::OutputFile& file) {
      write(file, "half");
      ::raise(SIGKILL);
    });
  REQUIRE(::waitpid(killed, nullptr, 0) == killed);
  REQUIRE(others(path).size() == 1);
  const auto gone = std::to_string(killed), own = std::to_string(::getpid());
  std::vector<std::string> kept{"another.tmp-" + gone + "-0123abcd",
                                "file.tmp-" + own + "-0123abcd",
                                "file.tmp-" + gone + "-0123abc",
                                "file.tmp-" + gone + "-0123abcd.safetensors",
                                "file.tmp-" + gone + "-0123ABCD",
                                "file.tmp-0-0123abcd",
                                "file.tmp--1-0123abcd",
                                "file.tmp-" + gone,
                                "file.tmp-" + gone + "-89abcdef",
                                "file.tmp-" + gone + "-00000000"};
  for (auto& name : kept) write_text(directory / name, "of somebody else");
  std::filesystem::remove(directory / kept.back());
  std::filesystem::create_directory(directory / kept.back());
  const auto locked = directory / kept.at(kept.size() - 2);  // for example, by a process on another machine
  const inner::Descriptor lock(locked, inner::Descriptor::Open::to_read);
  REQUIRE(lock.lock());
  write_text(directory / ("file.tmp-" + gone + "-00000001"), "left");
  replace(path, "text");
  auto names = others(path);
  std::sort(names.begin(), names.end());
  std::sort(kept.begin(), kept.end());
  CHECK(names == kept);
  CHECK(text_of(path) == "text");
}

TEST_CASE("replace_file: a running writer keeps its temporary file") {
  const Directory directory;
  const auto path = directory / "file";
  const auto writer = ::fork();
  if (writer == 0)
    inner::replace_file(path, [&](inner::OutputFile& file) {
      write(file, "first");
      if (const auto other = ::fork(); other == 0) {
        replace(path, "second");
        ::_exit(0);
      } else {
        ::waitpid(other, nullptr, 0);
      }
      if (text_of(path) != "second") ::_exit(1);
      file.close();
      ::_exit(others(path).size() == 1 ? 0 : 2);
    });
  int status = 0;
  REQUIRE(::waitpid(writer, &status, 0) == writer);
  CHECK(status == 0);
}

TEST_CASE("replace_file: in the working directory") {
  const Directory directory;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path((directory / "x").parent_path());
  replace("file", "text");
  std::filesystem::current_path(before);
  CHECK(text_of(directory / "file") == "text");
}

TEST_CASE("sync_directory: a file system without support is not an error, other failures are") {
  const Directory directory;
  const auto path = (directory / "x").parent_path();
  for (const int error : {EINVAL, ENOTSUP}) {
    const FailingFiles files(1, How::fail, error);
    inner::sync_directory(path);
    CHECK(files.has_failed());
  }
  const FailingFiles files(1, How::fail, EIO);
  REQUIRE_ERROR(path.string() + ": must be synced to the disk, got Input/output error: check the disk",
                inner::sync_directory(path));
}

TEST_CASE("make_directory: makes all missing ones, and syncs each one's parent") {
  const Directory directory;
  const auto path = directory / "a/b/";
  {
    const FailingFiles files;
    inner::make_directory(path);
    const auto parent = (directory / "x").parent_path().filename().string();
    CHECK(files.calls() == std::vector<std::string>{"mkdir a", "open " + parent, "fsync " + parent, "close " + parent,
                                                    "mkdir b", "open a", "fsync a", "close a", "mkdir "});
  }
  CHECK(std::filesystem::is_directory(path));
  const FailingFiles files;
  inner::make_directory(path);
  CHECK(files.calls().empty());
}

TEST_CASE("make_directory: is not made if it cannot be synced, nor in place of a file") {
  const Directory directory;
  {
    const FailingFiles files(2, How::fail, EIO);
    REQUIRE_ERROR("must be synced to the disk", inner::make_directory(directory / "a"));
  }
  CHECK_FALSE(std::filesystem::exists(directory / "a"));
  write_text(directory / "a", "text");
  REQUIRE_ERROR("a: must be a directory, or one that can be created, got File exists",
                inner::make_directory(directory / "a"));
  CHECK(text_of(directory / "a") == "text");
}

TEST_CASE("InputFile: only regular files") {
  const Directory directory;
  const auto path = directory / "file";
  write_text(path, "text");
  inner::InputFile file(path);
  CHECK(file.bytes() == 4);
  std::string text(10, '-');
  CHECK(file.read_at(0, text.data(), 3) == 3);
  CHECK(file.read_at(3, text.data() + 3, 7) == 1);
  CHECK(text == "text------");
  std::filesystem::create_symlink(path, directory / "link");
  REQUIRE_ERROR("link: must be a regular file, got a symbolic link", inner::InputFile(directory / "link"));
  REQUIRE_ERROR("none: must be a file that can be read, got No such file", inner::InputFile(directory / "none"));
  REQUIRE_ERROR("must be a regular file, got a directory", inner::InputFile(path.parent_path()));
  REQUIRE(::mkfifo((directory / "pipe").c_str(), 0600) == 0);  // opening it would wait for a writer
  REQUIRE_ERROR("pipe: must be a regular file, got a device, pipe", inner::InputFile(directory / "pipe"));
  {
    inner::InputFile again(path);
    const FailingFiles files(0, How::interrupt);
    CHECK(again.read_at(0, text.data(), 4) == 4);
  }
  inner::InputFile again(path);
  const FailingFiles files(0, How::fail, EIO);
  REQUIRE_ERROR(path.string() + ": must be read, got Input/output error", again.read_at(0, text.data(), 4));
}
