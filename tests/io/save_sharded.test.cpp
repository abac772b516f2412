// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/save_sharded.hpp>

#include <gradaccum/io/weights.hpp>
#include <gradaccum/memory_meter.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "support/files.hpp"

#include <sys/wait.h>
#include <unistd.h>

namespace ga = gradaccum;
using ga::io::PlannedTensor;
using testing::Directory;

namespace {

/// Five tensors of ten numbers, 40 bytes each.
const std::vector<PlannedTensor> five{{"e", {10}}, {"b", {2, 5}}, {"a.c", {10}}, {"d", {5, 1, 2}}, {"a.b", {10}}};

/// Makes a tensor whose numbers depend on its name.
at::Tensor made(const PlannedTensor& planned) {
  return torch::full(planned.shape, static_cast<double>(planned.name.back()), planned.dtype);
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::map<std::string, std::string> weight_map(const std::filesystem::path& folder) {
  return nlohmann::json::parse(testing::text_of(folder / "model.safetensors.index.json")).at("weight_map");
}

bool all_there(const std::filesystem::path& folder, const std::vector<PlannedTensor>& planned) {
  const ga::io::WeightFiles files(folder);
  return files.keys().size() == planned.size() && files.unlisted().empty() &&
         std::ranges::all_of(planned, [&](auto& tensor) { return files.get_tensor(tensor.name).equal(made(tensor)); });
}

const std::string first = "model-00001-of-00003.safetensors", second = "model-00002-of-00003.safetensors",
                  third = "model-00003-of-00003.safetensors";

}  // namespace

TEST_CASE("save_sharded: shards in the order of the tensors, and an index") {
  const Directory directory;
  const auto folder = directory / "new" / "model";
  ga::io::save_sharded(five, folder, made, {.shard_bytes = 119});  // two fit, three do not
  CHECK(names_in(folder) == std::vector<std::string>{first, second, third, "model.safetensors.index.json"});
  CHECK(weight_map(folder) ==
        std::map<std::string, std::string>{{"a.b", third}, {"a.c", second}, {"b", first}, {"d", second}, {"e", first}});
  CHECK(all_there(folder, five));
  CHECK(testing::text_of(folder / "model.safetensors.index.json") ==
        "{\n  \"metadata\": {\n    \"total_parameters\": 50,\n    \"total_size\": 200\n  },\n  \"weight_map\": {\n"
        "    \"a.b\": \"" +
            third + "\",\n    \"a.c\": \"" + second + "\",\n    \"b\": \"" + first + "\",\n    \"d\": \"" + second +
            "\",\n    \"e\": \"" + first + "\"\n  }\n}\n");
  CHECK(ga::io::SafetensorsFile(folder / first).metadata() == ga::io::Metadata{{"format", "pt"}});
}

TEST_CASE("save_sharded: one file if all fit, with the bytes of save_file") {
  const Directory directory;
  ga::io::Tensors tensors;
  for (auto& planned : five) tensors[planned.name] = made(planned);
  ga::io::save_file(tensors, directory / "expected", {{"format", "pt"}});
  for (const std::uint64_t bytes : {std::uint64_t{200}, ga::io::SaveShardedOptions().shard_bytes}) {
    const auto folder = directory / std::to_string(bytes);
    ga::io::save_sharded(five, folder, made, {.shard_bytes = bytes});
    CHECK(names_in(folder) == std::vector<std::string>{"model.safetensors"});
    CHECK(testing::text_of(folder / "model.safetensors") == testing::text_of(directory / "expected"));
  }
}

TEST_CASE("save_sharded: a tensor larger than a shard has a separate one; no tensors make an empty file") {
  const Directory directory;
  ga::io::save_sharded({{"a", {1}}, {"b", {100}}, {"c", {0, 7}}, {"d", {1}, at::kLong}}, directory / "large", made,
                       {.shard_bytes = 8});
  CHECK(weight_map(directory / "large") ==
        std::map<std::string, std::string>{{"a", first}, {"b", second}, {"c", third}, {"d", third}});
  CHECK(ga::io::WeightFiles(directory / "large").get_tensor("d").scalar_type() == at::kLong);
  ga::io::save_sharded({}, directory / "nothing", made);
  CHECK(ga::io::WeightFiles(directory / "nothing").keys().empty());
}

TEST_CASE("save_sharded: one tensor at a time is in memory") {
  const Directory directory;
  std::vector<PlannedTensor> planned;
  for (int i = 0; i < 20; ++i) planned.push_back({"w" + std::to_string(i), {1 << 14}});
  const ga::MemoryMeter meter;
  ga::io::save_sharded(planned, directory / "model", [](auto& tensor) { return torch::empty(tensor.shape).fill_(1); },
                       {.shard_bytes = 5 << 16});
  CHECK(meter.peak_bytes(at::kCPU) == 1 << 16);
}

TEST_CASE("save_sharded: stopped by an error or killed, nothing can be read; after a repetition all can") {
  for (std::size_t stop = 0; stop < five.size(); ++stop) {
    const Directory directory;
    const auto folder = directory / "model";
    std::size_t count = 0;
    const auto fails = [&](auto& planned) {
      TORCH_CHECK(count++ < stop, "enough");
      return made(planned);
    };
    CHECK_THROWS_AS(ga::io::save_sharded(five, folder, fails, {.shard_bytes = 80}), c10::Error);
    for (auto& name : names_in(folder)) CHECK(name.find(".tmp-") == name.npos);
    CHECK_THROWS_AS(ga::io::WeightFiles(folder), std::runtime_error);

    const auto child = fork();
    if (child == 0) {
      const auto dies = [&](auto& planned) {
        return count++ < 2 * stop + 1 ? made(planned) : (_exit(7), at::Tensor());
      };
      ga::io::save_sharded(five, folder, dies, {.shard_bytes = 80});
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 7));
    CHECK_THROWS_AS(ga::io::WeightFiles(folder), std::runtime_error);
    ga::io::save_sharded(five, folder, made, {.shard_bytes = 80});
    CHECK(all_there(folder, five));
  }
}

TEST_CASE("save_sharded: refused arguments") {
  const Directory directory;
  const auto save = [&](const std::vector<PlannedTensor>& planned, auto make) {
    ga::io::save_sharded(planned, directory / "model", make);
  };
  REQUIRE_ERROR("SaveShardedOptions: shard_bytes must be > 0, got 0",
                ga::io::save_sharded(five, directory / "model", made, {.shard_bytes = 0}));
  REQUIRE_ERROR("each tensor must have a name of its own, got \"a\" twice",
                save({{"a", {1}}, {"b", {1}}, {"a", {2}}}, made));
  REQUIRE_ERROR("\"a\" must have sizes >= 0 and fewer than 2^64 bytes, got [-1]", save({{"a", {-1}}}, made));
  const auto most = std::numeric_limits<std::int64_t>::max();
  REQUIRE_ERROR("must have sizes >= 0 and fewer than 2^64 bytes", save({{"a", {most, most}}}, made));
  REQUIRE_ERROR("must have a dtype that safetensors has", save({{"a", {1}, at::kComplexDouble}}, made));
  REQUIRE_ERROR("__metadata__", save({{"__metadata__", {1}}}, made));
  REQUIRE_ERROR("UTF-8", save({{"a\xff", {1}}}, made));
  REQUIRE_ERROR("the tensor \"a\" must be as planned, Float [2], got Float [3]",
                save({{"a", {2}}}, [](auto&) { return torch::ones({3}); }));
  REQUIRE_ERROR("got Double [2]", save({{"a", {2}}}, [](auto&) { return torch::ones({2}, at::kDouble); }));
  REQUIRE_ERROR("got none", save({{"a", {2}}}, [](auto&) { return at::Tensor(); }));
  CHECK(names_in(directory / "model").empty());
  save({{"a", {2}}}, made);
  REQUIRE_ERROR("model.safetensors: must not exist yet", save({{"a", {2}}}, made));
  std::filesystem::remove(directory / "model" / "model.safetensors");
  testing::write_text(directory / "model" / "model.safetensors.index.json", "");
  REQUIRE_ERROR("model.safetensors.index.json: must not exist yet", save({{"a", {2}}}, made));
  REQUIRE_ERROR("/dev/null", ga::io::save_sharded(five, "/dev/null/model", made));
}
