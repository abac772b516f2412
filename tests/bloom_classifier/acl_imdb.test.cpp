// SPDX-License-Identifier: Apache-2.0

#include "data/acl_imdb.hpp"

#include "data/reviews.hpp"
#include "reviews_output.hpp"
#include "support/catch.hpp"
#include "support/files.hpp"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fs = std::filesystem;
using namespace bloom;

namespace {

/// The data set's folders with a review in each, and files that are not reviews.
struct AclImdb {
  testing::Directory directory;
  AclImdb() {
    for (const std::string part : {"train", "test"}) {
      for (const std::string kind : {"neg", "pos", "unsup"}) {
        fs::create_directories(directory / (part + "/" + kind));
        write(part + "/" + kind + "/0_9.txt", part + " " + kind);
      }
      write(part + "/urls_pos.txt", "no review");
    }
    write("train/pos/ORDER.md", "no review");
  }
  void write(const std::string& name, const std::string& text) const { testing::write_text(directory / name, text); }
  fs::path root() const { return directory / ""; }
};

}  // namespace

TEST_CASE("aclImdb: both parts, or one") {
  const AclImdb files;
  const std::vector<Review> train = {{"train neg", 0}, {"train pos", 1}}, test = {{"test neg", 0}, {"test pos", 1}};
  REQUIRE(read_acl_imdb(files.directory / "train").rows == train);
  REQUIRE(read_acl_imdb(files.directory / "test").rows == test);
  const auto both = read_acl_imdb(files.root());
  REQUIRE(both.rows == std::vector<Review>{train[0], train[1], test[0], test[1]});
  REQUIRE(both.skipped == 0);
}

TEST_CASE("aclImdb: in the order of file names, with unchanged bytes") {
  const AclImdb files;
  for (const std::string name : {"10_8", "9_7", "100_10", "1_1", "B", "a"})
    files.write("train/pos/" + name + ".txt", name);
  files.write("train/neg/1_1.txt", "two\r\nlines, \"quoted\" \xC3\xA9<br /><br />\n");
  const auto reviews = read_acl_imdb(files.directory / "train");
  std::vector<std::string> texts;
  for (const auto& row : reviews.rows) texts.push_back(row.text);
  REQUIRE(texts == std::vector<std::string>{"train neg", "two\r\nlines, \"quoted\" \xC3\xA9<br /><br />\n", "train pos",
                                            "100_10", "10_8", "1_1", "9_7", "B", "a"});
}

TEST_CASE("aclImdb: files without text are skipped and counted") {
  const AclImdb files;
  files.write("train/pos/1.txt", "");
  files.write("test/neg/1.txt", " \r\n");
  REQUIRE(read_acl_imdb(files.root()).skipped == 2);
  REQUIRE(read_acl_imdb(files.root()).rows.size() == 4);
  files.write("test/neg/0_9.txt", "");
  files.write("test/pos/0_9.txt", "");
  REQUIRE_ERROR("test: must have a review with text, got 3 without", read_acl_imdb(files.directory / "test"));
}

TEST_CASE("aclImdb: missing parts are named") {
  const AclImdb files;
  fs::remove_all(files.directory / "test/pos");
  REQUIRE_ERROR("test/pos: must be a folder of reviews, *.txt, but there is none", read_acl_imdb(files.root()));
  REQUIRE_ERROR("test/pos: must be a folder of reviews", read_acl_imdb(files.directory / "test"));
  fs::remove_all(files.directory / "test");
  REQUIRE_ERROR("test/neg: must be a folder of reviews", read_acl_imdb(files.root()));
  REQUIRE_ERROR("nowhere/train/neg: must be a folder of reviews", read_acl_imdb(files.directory / "nowhere"));
  fs::remove(files.directory / "train/neg/0_9.txt");
  REQUIRE_ERROR("train/neg: must hold reviews, *.txt, but holds none", read_acl_imdb(files.directory / "train"));
  fs::remove(files.directory / "train/neg");
  files.write("train/neg", "a file");
  REQUIRE_ERROR("train/neg: must be a folder of reviews", read_acl_imdb(files.directory / "train"));
}

TEST_CASE("aclImdb: links, folders, pipes, and files that are too large or no text are refused") {
  const AclImdb files;
  const auto path = files.directory / "train/pos/1.txt";
  const auto read = [&] { return read_acl_imdb(files.directory / "train"); };
  fs::create_symlink("0_9.txt", path);
  REQUIRE_ERROR("train/pos/1.txt: must be a regular file, got a symbolic link", read());
  fs::remove(path);
  fs::create_directory(path);
  REQUIRE_ERROR("train/pos/1.txt: must be a regular file, but is not", read());
  fs::remove(path);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  REQUIRE_ERROR("train/pos/1.txt: must be a regular file, but is not", read());
  fs::remove(path);
  files.write("train/pos/1.txt", std::string(max_review_bytes, 'a'));
  REQUIRE(read().rows.size() == 3);
  files.write("train/pos/1.txt", std::string(max_review_bytes + 1, 'a'));
  REQUIRE_ERROR("train/pos/1.txt: must have at most 1048576 bytes, got 1048577", read());
  files.write("train/pos/1.txt", std::string("a\0b", 3));
  REQUIRE_ERROR("train/pos/1.txt: must be text, got a zero byte", read());
  files.write("train/pos/1.txt", "a caf\xE9");
  REQUIRE_ERROR("train/pos/1.txt: must be UTF-8, got 'a caf\xEF\xBF\xBD'; iconv", read());
}
