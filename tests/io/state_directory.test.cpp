// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/io/formats.hpp>

#include "support/failing_files.hpp"
#include "support/files.hpp"

#include <array>
#include <chrono>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include <sys/wait.h>

namespace inner = gradaccum::detail;
using inner::StateDirectory;
using namespace testing;
using How = FailingFiles::How;
using Names = std::vector<std::string>;

namespace {

/// Writes two files that contain the step, and their manifest.
void write_state(const std::filesystem::path& folder, std::int64_t step) {
  inner::Manifest manifest;
  for (const std::string name : {"model", "optimizer"}) {
    inner::OutputFile file(folder / name);
    for (int i = 0; i < 3; ++i) file.write(&step, sizeof step);
    file.close();
    manifest.files[name] = {file.bytes(), file.crc32()};
  }
  manifest.values["step"] = step;
  inner::write_manifest(folder, manifest);
}

template <class Write>
std::filesystem::path add(const StateDirectory& states, std::int64_t step, const Write& write) {
  const auto state = states.begin(step);
  write(state->folder());
  return state->finish();
}

std::filesystem::path add(const StateDirectory& states, std::int64_t step) {
  return add(states, step, [step](const std::filesystem::path& folder) { write_state(folder, step); });
}

/// Returns the states' names. Throws if one is damaged.
Names checked(const StateDirectory& states) {
  Names names;
  for (const auto& state : states.finished()) {
    const auto manifest = inner::read_manifest(state.path);
    inner::check_files(state.path, manifest);
    REQUIRE(manifest.values.at("step") == inner::Manifest::Value(state.step));
    names.push_back(state.path.filename().string());
  }
  return names;
}

Names sorted_names(const std::filesystem::path& path) {
  auto names = inner::names_in(path);
  std::sort(names.begin(), names.end());
  return names;
}

/// Runs a function in a new process. Returns whether it ended, and was not killed.
template <class Run>
bool ended(const Run& run) {
  const auto child = ::fork();
  if (child == 0) {
    try {
      run();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE((WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL));
  return WIFEXITED(status);
}

}  // namespace

TEST_CASE("StateDirectory: names, in the order of their numbers") {
  const Directory directory;
  const auto path = directory / "states";
  StateDirectory states(path);
  CHECK(states.finished().empty());
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK(add(states, 40) == path / "step-000040");
  CHECK(add(states, 1'000'000) == path / "step-1000000");
  CHECK(add(states, 999'999) == path / "step-999999");
  for (int i = 1; i <= 10; ++i) CHECK(add(states, 40) == path / ("step-000040." + std::to_string(i)));
  CHECK(add(states, 0) == path / "step-000000");
  CHECK(checked(states) == Names{"step-000000", "step-000040", "step-000040.1", "step-000040.2", "step-000040.3",
                                 "step-000040.4", "step-000040.5", "step-000040.6", "step-000040.7", "step-000040.8",
                                 "step-000040.9", "step-000040.10", "step-999999", "step-1000000"});
  CHECK(states.finished()[11].step == 40);
  CHECK(states.finished()[11].repeat == 10);
  states.keep_last(3);
  CHECK(checked(states) == Names{"step-000040.10", "step-999999", "step-1000000"});
  CHECK(add(states, 40) == path / "step-000040.11");  // the newest of its step, though smaller numbers are free
  REQUIRE_ERROR(path.string() + ": step must be >= 0, got -1", add(states, -1));
}

TEST_CASE("StateDirectory: other names are neither listed nor changed") {
  const Directory directory;
  const auto path = directory / "states";
  std::filesystem::create_directory(path);
  const Names others{"best",
                     "step-",
                     "step-40",
                     "step-0000040",
                     "step-000040.0",
                     "step-000040.01",
                     "step-000040.",
                     "step-000040a",
                     "step-000040.1.2",
                     "step--00001",
                     "step--123456",
                     "step-+000040",
                     "Step-000040",
                     "step- 00040",
                     "step-99999999999999999999",
                     "step-000040.9223372036854775807",
                     "step-notes.tmp-1",
                     "a.tmp-1",
                     "step-000040.tmp"};
  for (const auto& name : others) std::filesystem::create_directory(path / name);
  write_text(path / "step-000050", "a file");
  StateDirectory states(path);
  CHECK(states.finished().empty());
  CHECK(add(states, 50) == path / "step-000050.1");
  add(states, 40);
  states.keep_last(1);
  CHECK(checked(states) == Names{"step-000050.1"});
  for (const auto& name : others) CHECK(std::filesystem::is_directory(path / name));
  CHECK(text_of(path / "step-000050") == "a file");
}

TEST_CASE("StateDirectory: its system calls in order") {
  const Directory directory;
  const auto path = directory / "states";
  StateDirectory states(path);
  add(states, 1);
  add(states, 2);
  const FailingFiles files;
  add(states, 3, [](const std::filesystem::path& folder) {
    inner::OutputFile file(folder / "file");
    file.close();
  });
  const auto calls_of_add = files.calls();
  states.keep_last(2);
  auto calls = files.calls();
  const auto temporary = calls.at(2).substr(6);
  CHECK(temporary.starts_with("step-000003.tmp-" + std::to_string(::getpid()) + "-"));
  CHECK(calls_of_add == Names{"open states", "flock states", "mkdir " + temporary, "open file", "fsync file",
                              "close file", "open " + temporary, "fsync " + temporary, "close " + temporary,
                              "rename " + temporary, "open states", "fsync states", "close states", "flock states",
                              "close states"});
  calls.erase(calls.begin(), calls.begin() + static_cast<long>(calls_of_add.size()));
  // Renames, and syncs that, before deleting files.
  REQUIRE(calls.size() > 7);
  calls.resize(6);
  CHECK(calls ==
        Names{"open states", "flock states", "rename step-000001", "open states", "fsync states", "close states"});
}

TEST_CASE("StateDirectory: an exception of the writer leaves nothing") {
  const Directory directory;
  const auto path = directory / "states";
  StateDirectory states(path);
  add(states, 1);
  REQUIRE_ERROR("no more", add(states, 2, [](const std::filesystem::path& folder) {
                  write_text(folder / "file", "text");
                  throw std::logic_error("no more");
                }));
  CHECK(sorted_names(path) == Names{"step-000001"});
}

TEST_CASE("StateDirectory: one writer at a time") {
  const Directory directory;
  const auto path = directory / "states";
  StateDirectory states(path), other(path);
  add(states, 1);
  add(states, 2);
  add(states, 3, [&](const std::filesystem::path& folder) {
    write_state(folder, 3);
    REQUIRE_ERROR(path.string() + ": must have only one writer, but another process or thread is writing to it",
                  add(other, 4));
    REQUIRE_ERROR("another process", other.keep_last(1));
    CHECK(checked(other) == Names{"step-000001", "step-000002"});
  });
  add(other, 4);
  CHECK(checked(states) == Names{"step-000001", "step-000002", "step-000003", "step-000004"});
}

TEST_CASE("StateDirectory: a process forked during a write neither locks the directory nor ends the write") {
  const Directory directory;
  StateDirectory states(directory / "states");
  auto state = states.begin(1);
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  const auto child = ::fork();
  if (child == 0) {
    ::close(pipe[1]);
    char none = 0;
    static_cast<void>(!::read(pipe[0], &none, 1));  // until the parent closes it
    state.reset();
    ::_exit(0);
  }
  REQUIRE_ERROR("must have only one writer", states.begin(2));
  write_state(state->folder(), 1);
  state->finish();
  state.reset();
  state = states.begin(2);  // though the child is running
  write_state(state->folder(), 2);
  ::close(pipe[1]);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  REQUIRE_ERROR("must have only one writer", states.begin(3));
  state->finish();
  CHECK(checked(states) == Names{"step-000001", "step-000002"});
  ::close(pipe[0]);
}

TEST_CASE("StateDirectory: a forked process that destroys its parent's pending state does not remove the files") {
  const Directory directory;
  StateDirectory states(directory / "states");
  auto state = states.begin(1);
  write_state(state->folder(), 1);
  REQUIRE(ended([&] { state.reset(); }));
  REQUIRE_ERROR("must have only one writer", states.begin(2));
  state->finish();
  CHECK(checked(states) == Names{"step-000001"});
}

TEST_CASE("StateDirectory: on a file system without locks") {
  const Directory directory;
  StateDirectory states(directory / "states");
  add(states, 1);
  const FailingFiles files(1, How::fail, ENOLCK);
  add(states, 2);
  CHECK(files.failed() == "flock states");
  CHECK(checked(states) == Names{"step-000001", "step-000002"});
}

TEST_CASE("StateDirectory: keep_last keeps the newest, and the given ones") {
  const Directory directory;
  std::mt19937 random(1);
  for (int trial = 0; trial < 20; ++trial) {
    const auto path = directory / ("states_" + std::to_string(trial));
    StateDirectory states(path);
    states.keep_last(1);  // no states yet
    for (int i = 0; i < 8; ++i)
      add(states, random() % 5, [](const std::filesystem::path& folder) { write_text(folder / "file", "text"); });
    const auto before = states.finished();
    REQUIRE(before.size() == 8);
    const auto count = 1 + random() % 9;
    const auto best = before[random() % 8].path;
    states.keep_last(count, {best, path / "none"});
    Names expected;
    for (std::size_t i = 0; i < 8; ++i)
      if (i + count >= 8 || before[i].path == best) expected.push_back(before[i].path.filename().string());
    Names names;
    for (const auto& state : states.finished()) names.push_back(state.path.filename().string());
    CHECK(names == expected);
    CHECK(sorted_names(path).size() == expected.size());
    states.keep_last(count, {best});
    CHECK(states.finished().size() == expected.size());
  }
  StateDirectory states(directory / "states");
  for (const std::int64_t count : {0, -1})
    REQUIRE_ERROR("states: must keep >= 1 states, got " + std::to_string(count), states.keep_last(count));
}

TEST_CASE("StateDirectory: the targets of symbolic links are not deleted") {
  const Directory directory;
  const auto path = directory / "states", elsewhere = directory / "elsewhere";
  std::filesystem::create_directory(elsewhere);
  write_text(elsewhere / "file", "text");
  StateDirectory states(path);
  add(states, 1, [&](const std::filesystem::path& folder) {
    std::filesystem::create_directory_symlink(elsewhere, folder / "link");
  });
  std::filesystem::create_directory_symlink(elsewhere, path / "step-000002");
  std::filesystem::create_directory_symlink(elsewhere, path / "step-000003.tmp-1-2");
  add(states, 4);
  CHECK(states.finished().size() == 3);
  states.keep_last(1);
  CHECK(sorted_names(path) == Names{"step-000004"});
  CHECK(text_of(elsewhere / "file") == "text");
}

TEST_CASE("StateDirectory: an impossible directory") {
  const Directory directory;
  write_text(directory / "file", "text");
  StateDirectory states(directory / "file");
  REQUIRE_ERROR("file: must be a directory that can be read, got Not a directory", states.finished());
  REQUIRE_ERROR("file: must be a directory, or one that can be created, got File exists", add(states, 1));
}

namespace {

/// A directory with two states and a leftover, to which a third state is added; two are kept.
struct Scene {
  Directory directory;
  std::filesystem::path path = directory / "states";
  StateDirectory states{path};

  Scene() {
    const FailingFiles none;  // skips waiting for the disk
    add(states, 1);
    add(states, 2);
    std::filesystem::create_directory(path / "step-000009.tmp-1-2");
    write_text(path / "step-000009.tmp-1-2/file", "text");
  }
  void run() {
    add(states, 3);
    states.keep_last(2);
  }
  /// Checks that the newest states exist and are intact, and that another one can be written.
  void check() {
    const FailingFiles none;
    const auto names = checked(states);
    INFO(Catch::Detail::stringify(names));
    const bool is_added = names.back() == "step-000003";
    CHECK((names == Names{"step-000001", "step-000002"} ||
           names == Names{"step-000001", "step-000002", "step-000003"} ||
           names == Names{"step-000002", "step-000003"}));
    add(states, 4);
    states.keep_last(2);
    CHECK(checked(states) == Names{is_added ? "step-000003" : "step-000002", "step-000004"});
    CHECK(sorted_names(path).size() == 2);  // no leftovers
  }
};

/// Counts the calls of the operating system in `run`.
long call_count() {
  Scene scene;
  const FailingFiles files;
  scene.run();
  return static_cast<long>(files.calls().size());
}

}  // namespace

TEST_CASE("StateDirectory: if any call fails, no state is lost or damaged") {
  const auto count = call_count();
  CHECK(count > 30);
  for (const auto how : {How::fail, How::fail_forever})
    for (const int error : {ENOSPC, EIO, EACCES})
      for (long at = 0; at < count; ++at) {
        Scene scene;
        std::string message, failed;
        {
          const FailingFiles files(at, how, error);
          message = error_of([&] { scene.run(); });
          REQUIRE(files.has_failed());
          failed = files.failed();
        }
        INFO(at << ": " << failed << ": " << message);
        // Closing a file that was only read is harmless, undeleted files are deleted later, and some file systems have
        // no locks.
        const bool is_harmless =
            failed.starts_with("unlinkat ") || failed.starts_with("close s") || failed.starts_with("flock ");
        if (!is_harmless || !message.empty()) {
          CHECK(contains(message, scene.path.string()));
          CHECK(contains(message, std::generic_category().message(error)));
        }
        scene.check();
      }
}

TEST_CASE("StateDirectory: a failing call of reading is an error, or changes nothing") {
  Scene scene;
  for (long at = 0;; ++at) {
    const FailingFiles files(at, How::fail, EIO);
    Names names;
    const auto message = error_of([&] { names = checked(scene.states); });
    if (!files.has_failed()) break;
    INFO(at << ": " << files.failed());
    if (files.failed().starts_with("close "))
      CHECK(names == Names{"step-000001", "step-000002"});
    else
      CHECK((contains(message, scene.path.string()) && contains(message, "Input/output error")));
  }
}

TEST_CASE("StateDirectory: interrupted calls and short writes change nothing") {
  const auto count = call_count();
  for (const auto how : {How::interrupt, How::shorten})
    for (long at = 0; at < count; ++at) {
      Scene scene;
      {
        const FailingFiles files(at, how);
        scene.run();
        REQUIRE(files.has_failed());
      }
      CHECK(checked(scene.states) == Names{"step-000002", "step-000003"});
      CHECK(sorted_names(scene.path).size() == 2);
    }
}

TEST_CASE("StateDirectory: killed before any of its calls, no state is lost or damaged") {
  const auto count = call_count();
  for (long at = 0; at < count; ++at) {
    Scene scene;
    CHECK_FALSE(ended([&] {
      const FailingFiles files(at, How::kill);
      scene.run();
    }));
    scene.check();
  }
  Scene scene;
  CHECK(ended([&] { scene.run(); }));  // otherwise no child would have reached the end
  CHECK(checked(scene.states) == Names{"step-000002", "step-000003"});
}

// The moments are random: GRADACCUM_KILLS sets their number.
TEST_CASE("StateDirectory: killed at any moment, no state is lost or damaged") {
  const auto* const wish = std::getenv("GRADACCUM_KILLS");
  const int kills = wish ? std::atoi(wish) : 20;
  const Directory directory;
  const auto path = directory / "states";
  StateDirectory states(path);
  add(states, 0);
  std::mt19937 random(1);
  std::int64_t newest = 0;
  int leftovers = 0;
  for (int kill = 0; kill < kills; ++kill) {
    const auto child = ::fork();
    if (child == 0) {
      for (auto step = newest + 1;; ++step) {
        add(states, step);
        states.keep_last(2);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ::kill(child, SIGKILL);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    REQUIRE_FALSE(checked(states).empty());
    REQUIRE(states.finished().back().step >= newest);
    newest = states.finished().back().step + 1;
    leftovers += sorted_names(path).size() > states.finished().size();
    add(states, newest);
    REQUIRE(sorted_names(path).size() == states.finished().size());
  }
  WARN(kills << " kills, " << leftovers << " with leftovers, " << newest << " states");
}
