// SPDX-License-Identifier: Apache-2.0

#include "idx.hpp"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dataset.hpp"
#include "idx_files.hpp"
#include "support/catch.hpp"

namespace fs = std::filesystem;
using namespace fashion_mnist;
using idx_files::Bytes;
using idx_files::gzip;
using idx_files::header;
using idx_files::operator+;

namespace {

/// A new directory, removed by the destructor.
struct Directory {
  fs::path path;
  Directory() {
    auto name = (fs::temp_directory_path() / "fashion_mnist.XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Directory() { fs::remove_all(path); }
  fs::path write(const std::string& name, const Bytes& bytes) const { return idx_files::write(path / name, bytes); }
};

const Bytes two_images = idx_files::images(2, Bytes(2 * 784, 7));
const Bytes three_labels = idx_files::labels({0, 9, 4});

std::int64_t peak_kilobytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

/// Writes one image and then `megabytes` of zeros, in small pieces that need no memory.
void write_bomb(const fs::path& path, int megabytes) {
  const auto file = gzopen(path.c_str(), "wb9");
  const auto start = header({0x803, 1, 28, 28});
  const Bytes zeros(1 << 20);
  gzwrite(file, start.data(), static_cast<unsigned>(start.size()));
  for (int i = 0; i < megabytes; ++i) gzwrite(file, zeros.data(), static_cast<unsigned>(zeros.size()));
  REQUIRE(gzclose_w(file) == Z_OK);
}

/// Requires this error for the bytes as an image file, unchanged and zipped.
void require_image_error(const Bytes& bytes, const std::string& part) {
  Directory directory;
  const auto plain = directory.write("plain", bytes), zipped = directory.write("zipped.gz", gzip(bytes));
  for (const auto& path : {plain, zipped}) {
    REQUIRE_ERROR(part, read_idx(path, IdxKind::images));
    REQUIRE_ERROR(path.string(), read_idx(path, IdxKind::images));
  }
}

}  // namespace

TEST_CASE("images and labels are read, zipped or not", "[idx]") {
  Directory directory;
  auto pixels = Bytes(3 * 784, 0);
  pixels[784 + 28 + 3] = 255;  // image 1, row 1, column 3
  for (const std::string end : {"", ".gz"}) {
    const auto write = [&](const std::string& name, const Bytes& bytes) {
      directory.write(name + end, end.empty() ? bytes : gzip(bytes));
    };
    write("train-images-idx3-ubyte", idx_files::images(3, pixels));
    write("train-labels-idx1-ubyte", three_labels);
    const auto [images, labels] = load_split(directory.path, "train", torch::kCPU, torch::kFloat);
    REQUIRE(images.sizes() == at::IntArrayRef({3, 28, 28}));
    REQUIRE(images.scalar_type() == at::kFloat);
    REQUIRE(images.index({1, 1, 3}).item<float>() == 1);
    REQUIRE(images.sum().item<float>() == 1);
    REQUIRE(at::equal(labels, torch::tensor({0, 9, 4}, torch::kInt64)));
  }
}

TEST_CASE("a file of several chunks is read whole", "[idx]") {
  Directory directory;
  Bytes pixels(3000 * 784);
  for (std::size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<std::uint8_t>(i * 2654435761u >> 24);
  const auto file = read_idx(directory.write("images.gz", gzip(idx_files::images(3000, pixels))), IdxKind::images);
  REQUIRE(file.count == 3000);
  REQUIRE(file.bytes == pixels);
}

TEST_CASE("files of another kind are refused", "[idx]") {
  require_image_error(three_labels, "magic number must be 0x00000803 (images), got 0x00000801");
  require_image_error(header({0xd03, 2, 28, 28}), "magic number must be 0x00000803 (images), got 0x00000d03");
  require_image_error({'<', 'h', 't', 'm', 'l', '>'}, "got 0x3c68746d");
  require_image_error({}, "must start with a header of 16 bytes, got 0");
  require_image_error({0, 0, 8}, "must start with a header of 16 bytes, got 3");
  require_image_error(header({0x803, 2, 28}), "must start with a header of 16 bytes, got 12");

  Directory directory;
  REQUIRE_ERROR("magic number must be 0x00000801 (labels), got 0x00000803",
                read_idx(directory.write("labels", two_images), IdxKind::labels));
}

TEST_CASE("impossible sizes are refused", "[idx]") {
  const Bytes pixels(784, 0);
  require_image_error(header({0x803, 0, 28, 28}), "count must be in [1, 1000000], got 0");
  require_image_error(header({0x803, 1000001, 28, 28}) + pixels, "count must be in [1, 1000000], got 1000001");
  require_image_error(header({0x803, 0xffffffff, 28, 28}) + pixels, "count must be in [1, 1000000], got 4294967295");
  require_image_error(header({0x803, 1, 27, 28}) + pixels, "images must be 28 x 28, got 27 x 28");
  require_image_error(header({0x803, 1, 28, 0x80000000}) + pixels, "images must be 28 x 28, got 28 x 2147483648");
  require_image_error(header({0x803, 1, 0, 0}), "images must be 28 x 28, got 0 x 0");
}

TEST_CASE("data shorter or longer than the header says are refused", "[idx]") {
  require_image_error(idx_files::images(2, Bytes(2 * 784 - 1)),
                      "must hold the 1568 bytes that its header promises, got 1567");
  require_image_error(idx_files::images(2, {}), "must hold the 1568 bytes that its header promises, got 0");
  require_image_error(idx_files::images(2, Bytes(2 * 784 + 1)), "must end after the data that its header promises");
}

TEST_CASE("a label outside of the classes is refused", "[idx]") {
  Directory directory;
  REQUIRE_ERROR("labels must be below 10, got 10 at index 2",
                read_idx(directory.write("labels", idx_files::labels({1, 2, 10})), IdxKind::labels));
}

TEST_CASE("a gzip file cut anywhere is refused", "[idx]") {
  Directory directory;
  const auto whole = gzip(two_images);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto path =
        directory.write("cut.gz", Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    INFO("cut to " << size << " of " << whole.size() << " bytes");
    REQUIRE_ERROR(path.string(), read_idx(path, IdxKind::images));
  }
}

TEST_CASE("a damaged gzip file never gives wrong data", "[idx]") {
  Directory directory;
  const auto whole = gzip(three_labels);
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    auto damaged = whole;
    damaged[bit / 8] ^= static_cast<std::uint8_t>(1u << bit % 8);
    const auto path = directory.write("damaged.gz", damaged);
    INFO("bit " << bit);
    Bytes classes;
    const auto message = testing::error_of([&] { classes = read_idx(path, IdxKind::labels).bytes; });
    if (message.empty())  // for example, a bit of the header's time stamp
      REQUIRE(classes == Bytes{0, 9, 4});
    else
      REQUIRE(testing::contains(message, path.string()));
  }
  auto checksum = whole;
  checksum[whole.size() - 8] ^= 1;
  REQUIRE_ERROR("must be intact, but reading it gave '",
                read_idx(directory.write("checksum.gz", checksum), IdxKind::labels));
}

TEST_CASE("a header with a wrong size takes no memory", "[idx]") {
  Directory directory;
  const auto promising = directory.write("promising", header({0x803, 1000000, 28, 28}) + Bytes(100));  // 784 MB
  const auto bomb = directory.path / "bomb.gz";
  write_bomb(bomb, 256);
  REQUIRE(fs::file_size(bomb) < 300'000);

  const auto before = peak_kilobytes();
  REQUIRE_ERROR("must hold the 784000000 bytes that its header promises, got 100",
                read_idx(promising, IdxKind::images));
  REQUIRE_ERROR("must end after the data that its header promises", read_idx(bomb, IdxKind::images));
  REQUIRE(peak_kilobytes() - before < 16 << 10);
}

TEST_CASE("paths without a readable file are refused", "[idx]") {
  Directory directory;
  REQUIRE_ERROR("must exist, but there is no such file", read_idx(directory.path / "none", IdxKind::images));
  REQUIRE_ERROR("must be a regular file", read_idx(directory.path, IdxKind::images));

  const auto pipe = directory.path / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  REQUIRE_ERROR("must be a regular file", read_idx(pipe, IdxKind::images));  // without waiting for a writer

  if (geteuid() == 0) SKIP("root reads every file");
  const auto secret = directory.write("secret", two_images);
  fs::permissions(secret, fs::perms::none);
  REQUIRE_ERROR("must be readable, got 'Permission denied'", read_idx(secret, IdxKind::images));
}

TEST_CASE("a data set is loaded as floats in [0, 1]", "[idx]") {
  Directory directory;
  idx_files::write_split(directory.path, "train", 20);
  idx_files::write_split(directory.path, "t10k", 10);
  const auto dataset = load_dataset(directory.path);
  REQUIRE(dataset.train.images.sizes() == at::IntArrayRef({20, 28, 28}));
  REQUIRE(dataset.train.images.scalar_type() == at::kFloat);
  REQUIRE(dataset.train.images.max().item<float>() <= 1.0f);
  REQUIRE(dataset.train.images.max().item<float>() > 0.8f);
  REQUIRE(dataset.test.labels.size(0) == 10);
}

TEST_CASE("a data set whose files do not match is refused", "[idx]") {
  Directory directory;
  REQUIRE_ERROR("must hold train-images-idx3-ubyte.gz or train-images-idx3-ubyte", load_dataset(directory.path));
  idx_files::write_split(directory.path, "train", 3);
  directory.write("train-labels-idx1-ubyte.gz", gzip(idx_files::labels({1, 2})));
  REQUIRE_ERROR("train-labels-idx1-ubyte: must hold one label for each of the 3 images, got 2",
                load_dataset(directory.path));
}
