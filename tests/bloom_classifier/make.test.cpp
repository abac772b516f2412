// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "data/read_csv.hpp"
#include "make/make_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gradaccum/io/weights.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/files.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ga = gradaccum;
using namespace bloom;

namespace {

MakeOptions small() { return {.size = {.layers = 2, .width = 32, .heads = 4, .words = 300}, .seed = 1}; }

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Returns all files of a folder by name.
std::map<std::string, std::string> files_of(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (auto& name : names_in(folder)) files[name] = testing::text_of(folder / name);
  return files;
}

bool same_weights(const std::filesystem::path& a, const std::filesystem::path& b) {
  const ga::io::WeightFiles first(a), second(b);
  return first.keys() == second.keys() && std::ranges::all_of(first.keys(), [&](auto& name) {
           return first.get_tensor(name).equal(second.get_tensor(name));
         });
}

/// FNV-1a.
std::uint64_t hash_of(const at::Tensor& numbers) {
  std::string bytes(numbers.nbytes(), '\0');
  std::memcpy(bytes.data(), numbers.const_data_ptr(), numbers.nbytes());
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace

TEST_CASE("make: BLOOM-560m's numbers") {
  const auto size = ModelSize::of("560m");
  CHECK(size.config().parameter_count() - 2 * 1024 == 559'214'592);  // without a head
  CHECK(size.tokens() == 250'680);
  CHECK(size.config().head_dim() == 64);
  std::int64_t numbers = 0;
  for (auto& planned : planned_weights(size.config())) numbers += c10::multiply_integers(planned.shape);
  CHECK(numbers == 559'214'592);
  REQUIRE_ERROR("size must be tiny or 560m, got '1b'", ModelSize::of("1b"));
}

TEST_CASE("make: the folder opens, with exactly the weights of the model") {
  const testing::Directory directory;
  auto options = small();
  options.shard_bytes = 50'000;
  options.reviews = 10;
  make_model(options, directory / "model/");
  auto folder = open_model_folder(directory / "model", 3, "cpu");  // refuses missing and additional weights
  CHECK(folder.config.vocab_size == 300);
  CHECK(folder.tokenizer.vocabulary_size() == 300);
  CHECK(folder.model->forward(torch::tensor({{5, 17, 299}})).sizes() == at::IntArrayRef({1, 3}));
  CHECK(read_csv(directory / "model" / "reviews.csv").rows.size() == 10);
  auto names = names_in(directory / "model");
  CHECK(names == std::vector<std::string>{"config.json", "model-00001-of-00004.safetensors",
                                          "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
                                          "model-00004-of-00004.safetensors", "model.safetensors.index.json",
                                          "reviews.csv", "tokenizer.json"});
  CHECK(names_in(directory / "") == std::vector<std::string>{"model"});
  std::set<std::string> expected, planned;
  for (auto& item : folder.model->transformer->named_parameters()) expected.insert(item.key());
  for (auto& tensor : planned_weights(folder.config)) planned.insert(tensor.name);
  CHECK(planned == expected);
}

TEST_CASE("make: matrices are normal, biases 0, normalisations 1") {
  const testing::Directory directory;
  make_model({.size = {.layers = 1, .width = 64, .heads = 4, .words = 800}, .seed = 7}, directory / "model");
  const ga::io::WeightFiles files(directory / "model");
  std::vector<at::Tensor> matrices;
  for (auto& name : files.keys()) {
    INFO(name);
    const auto weight = files.get_tensor(name);
    CHECK(weight.scalar_type() == at::kFloat);
    if (weight.dim() == 2)
      matrices.push_back(weight.flatten().to(at::kDouble) / 0.02);
    else
      CHECK(weight.eq(name.ends_with(".bias") ? 0 : 1).all().item<bool>());
  }
  CHECK(matrices.size() == 5);
  const auto all = torch::cat(matrices);  // 100,352 numbers: the mean is exact to 1/317 of the standard deviation
  CHECK(std::abs(all.mean().item<double>()) < 0.015);
  CHECK(all.square().mean().item<double>() == Approx(1).margin(0.02));
  CHECK(std::abs(all.pow(3).mean().item<double>()) < 0.06);
  CHECK(all.pow(4).mean().item<double>() == Approx(3).margin(0.15));
  for (const double z : {-2.5, -1.0, 0.0, 0.5, 2.0})
    CHECK(all.lt(z).to(at::kDouble).mean().item<double>() == Approx(0.5 * std::erfc(-z / std::sqrt(2))).margin(0.006));
  const auto unlike = [](const at::Tensor& a, const at::Tensor& b) {  // neither equal nor shifted numbers
    const auto size = std::min(a.size(0), b.size(0)) - 1;
    for (const std::int64_t shift : {0, 1})
      if (std::abs((a.narrow(0, 0, size) * b.narrow(0, shift, size)).mean().item<double>()) > 0.08) return false;
    return true;
  };
  for (std::size_t i = 0; i < matrices.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) CHECK(unlike(matrices[i], matrices[j]));
}

TEST_CASE("normal_quantile: inverts the distribution function") {
  CHECK(normal_quantile(0.5) == 0);
  CHECK(normal_quantile(0.975) == Approx(1.959963984540054).epsilon(2e-7));
  CHECK(normal_quantile(0.9) == Approx(1.2815515655446004).epsilon(2e-7));
  CHECK(normal_quantile(1e-9) == Approx(-5.9978070150076865).epsilon(2e-7));
  CHECK(normal_quantile(1e-15) == Approx(-7.941345326170997).epsilon(2e-7));
  for (const double p : {1e-6, 0.01, 0.0749, 0.0751, 0.3}) {
    CHECK(0.5 * std::erfc(-normal_quantile(p) / std::sqrt(2)) == Approx(p).epsilon(1e-5));
    CHECK(normal_quantile(1 - p) == Approx(-normal_quantile(p)).epsilon(1e-6));
  }
}

TEST_CASE("make: a seed always gives the same bytes") {
  const testing::Directory directory;
  auto options = small();
  options.reviews = 5;
  make_model(options, directory / "a");
  make_model(options, directory / "b");
  CHECK(files_of(directory / "a") == files_of(directory / "b"));
  options.shard_bytes = 10'000;
  make_model(options, directory / "in shards");
  CHECK(same_weights(directory / "a", directory / "in shards"));
  options.size.layers = 1;  // the other tensors do not change
  make_model(options, directory / "shorter");
  CHECK(ga::io::WeightFiles(directory / "shorter")
            .get_tensor("h.0.mlp.dense_4h_to_h.weight")
            .equal(ga::io::WeightFiles(directory / "a").get_tensor("h.0.mlp.dense_4h_to_h.weight")));
  options = small();
  options.seed = 2;
  make_model(options, directory / "other");
  CHECK_FALSE(same_weights(directory / "a", directory / "other"));
  CHECK(testing::text_of(directory / "a" / "tokenizer.json") !=
        testing::text_of(directory / "other" / "tokenizer.json"));
}

TEST_CASE("fill_with_normal: the same bits everywhere, with any number of threads") {
  const auto threads = at::get_num_threads();
  std::vector<at::Tensor> filled;
  for (const int number : {1, 3}) {
    at::set_num_threads(number);
    fill_with_normal(filled.emplace_back(torch::empty({100'000})), 0.02, seed_of("weight", 1));
  }
  at::set_num_threads(threads);
  CHECK(filled[0].equal(filled[1]));
  CHECK(hash_of(filled[0]) == 0xd9536535755915eau);
  CHECK(seed_of("weight", 1) != seed_of("weight", 2));
  CHECK(seed_of("weight", 1) != seed_of("weighs", 1));
}

TEST_CASE("make: killed or without space at any byte, there is no folder; the next one is complete") {
  const testing::Directory directory;
  auto options = small();
  options.shard_bytes = 20'000;
  make_model(options, directory / "whole");
  const auto whole = files_of(directory / "whole");
  int killed = 0, failed = 0;
  // A signal ends programs that write files beyond this limit; for the library's files it is an error.
  for (const auto limit : std::vector<rlim_t>{0, 300, 5'000, 15'000, 36'000}) {
    INFO(limit);
    const auto child = fork();
    if (child == 0) {
      const rlimit most{.rlim_cur = limit, .rlim_max = limit};
      ::signal(SIGXFSZ, SIG_DFL);
      ::setrlimit(RLIMIT_FSIZE, &most);
      try {
        make_model(options, directory / "model");
      } catch (const std::runtime_error&) {
        _exit(2);
      }
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    const bool is_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ;
    CHECK((is_killed || (WIFEXITED(status) && WEXITSTATUS(status) == 2)));
    CHECK_FALSE(std::filesystem::exists(directory / "model"));
    CHECK(std::filesystem::exists(directory / "model.partial") == is_killed);
    ++(is_killed ? killed : failed);
  }
  CHECK(killed > 1);
  CHECK(failed > 1);
  make_model(options, directory / "model");
  CHECK(files_of(directory / "model") == whole);
  CHECK(names_in(directory / "") == std::vector<std::string>{"model", "whole"});
}

TEST_CASE("make: never overwrites, and only one process at a time") {
  const testing::Directory directory;
  std::filesystem::create_directory(directory / "model");
  make_model(small(), directory / "model");  // into an empty folder
  const auto before = files_of(directory / "model");
  REQUIRE_ERROR("model: must not exist yet, or be an empty folder", make_model(small(), directory / "model"));
  CHECK(files_of(directory / "model") == before);
  testing::write_text(directory / "file", "text");
  REQUIRE_ERROR("file: must not exist yet", make_model(small(), directory / "file"));
  CHECK(testing::text_of(directory / "file") == "text");

  testing::write_text(directory / "empty", "");
  REQUIRE_ERROR("empty: must not exist yet", make_model(small(), directory / "empty"));
  std::filesystem::create_directory_symlink(directory / "model", directory / "link.partial");  // is not deleted
  REQUIRE_ERROR("link.partial: must be a folder that can be opened", make_model(small(), directory / "link"));
  CHECK(files_of(directory / "model") == before);

  std::filesystem::create_directory(directory / "other.partial");
  const int descriptor = open((directory / "other.partial").c_str(), O_RDONLY);
  REQUIRE(flock(descriptor, LOCK_EX) == 0);
  REQUIRE_ERROR("other.partial: must be this process's alone, and another is writing to it",
                make_model(small(), directory / "other"));
  CHECK(std::filesystem::exists(directory / "other.partial"));
  close(descriptor);
  make_model(small(), directory / "other");
}

TEST_CASE("make: an error leaves nothing, and names the requirement") {
  const testing::Directory directory;
  const auto refused = [&](const ModelSize& size) {
    auto message = testing::error_of([&] { make_model({.size = size}, directory / "model"); });
    CHECK(names_in(directory / "").empty());
    return message;
  };
  CHECK(testing::contains(refused({.width = 64, .heads = 5}), "hidden_size must be divisible by n_head, got 64 and 5"));
  CHECK(testing::contains(refused({.words = 259}),
                          "tokens must be at least 260, the special ones and the bytes, got 259"));
  CHECK(testing::contains(refused({.layers = 0}), "n_layer must be in [1, 1024], got 0"));
}

TEST_CASE("make: its tokenizer restores texts, from ids of the whole vocabulary") {
  const testing::Directory directory;
  constexpr std::int64_t words = 8000;
  make_model({.size = {.layers = 1, .width = 8, .heads = 1, .words = words}, .seed = 3, .reviews = 200},
             directory / "model");
  const auto tokenizer = BloomTokenizer::from_file(directory / "model" / "tokenizer.json");
  CHECK(tokenizer.vocabulary_size() == words - 6);
  std::set<std::int64_t> ids;
  double tokens = 0;
  auto texts = read_csv(directory / "model" / "reviews.csv").rows;
  for (auto& [text, label] : texts) {
    const auto encoded = tokenizer.encode(text);
    CHECK(tokenizer.decode(encoded) == text);
    ids.insert(encoded.begin(), encoded.end());
    tokens += static_cast<double>(encoded.size());
  }
  CHECK(tokens / 200 == Approx(297).epsilon(0.15));
  CHECK(ids.size() > 1000);
  std::vector<double> parts(8);
  for (const auto id : ids) ++parts[static_cast<std::size_t>(id * 8 / words)];
  const auto [least, most] = std::minmax_element(parts.begin(), parts.end());
  CHECK(*least > 0.7 * *most);

  for (const std::string text : {"unused 17", " unused 4000 <s> Wörter 漢字 😀\t\n", "a\x01z"}) {
    const auto encoded = tokenizer.encode(text);
    CHECK(tokenizer.decode(encoded) == text);
    for (const auto id : encoded) CHECK_FALSE(tokenizer.decode(std::vector{id}).starts_with("unused "));
  }
  const char* const special[] = {"<unk>", "<s>", "</s>", "<pad>"};
  for (std::int64_t id = 0; id < 4; ++id) CHECK(tokenizer.token_to_id(special[id]) == id);
}
