// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/weights.hpp>
#include <gradaccum/memory_meter.hpp>

#include "io/hugging_face_folders.hpp"
#include "io/module_of_tensors.hpp"
#include "support/files.hpp"

#include <sys/stat.h>

// Weights in a folder: one file, or several with an index.

namespace ga = gradaccum;
using testing::ModuleOfTensors;
using testing::zeros_like;
using Names = std::vector<std::string>;
using WeightMap = std::map<std::string, std::string>;

namespace {

const std::string index_name = "model.safetensors.index.json";
const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";

using Files = std::map<std::string, ga::io::Tensors>;

/// A new folder of files with these tensors, and an index of all files.
struct Folder : testing::Directory {
  explicit Folder(const Files& files) {
    nlohmann::json map = WeightMap();
    for (auto& [file, tensors] : files) {
      ga::io::save_file(tensors, *this / file);
      for (auto& [name, tensor] : tensors) map[name] = file;
    }
    write_index({{"metadata", {{"total_size", 1}}}, {"weight_map", map}});
  }
  void write_index(const nlohmann::json& json) const { testing::write_text(*this / index_name, json.dump()); }
  std::filesystem::path path() const { return *this / ""; }
};

/// Three weights in two files.
const ga::io::Tensors in_first{{"a", torch::arange(3.0)}, {"b.c", torch::arange(4.0, 8.0).view({2, 2})}};
const ga::io::Tensors in_second{{"b.d", torch::arange(10.0, 13.0)}};
Folder two_files() { return Folder({{first, in_first}, {second, in_second}}); }

ga::io::Tensors joined(ga::io::Tensors all, const ga::io::Tensors& more) {
  all.insert(more.begin(), more.end());
  return all;
}

/// Returns the error of loading into three weights, and checks that they do not change.
std::string error_of_loading(const std::filesystem::path& path, bool strict = true) {
  auto module = zeros_like(joined(in_first, in_second));
  const auto before = testing::copies_of(module);
  auto message = testing::error_of([&] { ga::io::load_weights(module, path, {.strict = strict}); });
  CHECK(testing::equal(testing::copies_of(module), before));
  return message;
}

}  // namespace

TEST_CASE("load_weights: a folder of one file") {
  testing::Directory folder;
  ga::io::save_file(in_first, folder / "model.safetensors");
  ga::io::save_file(in_second, folder / "other.safetensors");  // not read
  for (auto* path : {".", "", "model.safetensors"}) {
    auto module = zeros_like(in_first);
    CHECK(ga::io::load_weights(module, folder / path).complete());
    CHECK(testing::equal(testing::copies_of(module), in_first));
  }
}

TEST_CASE("load_weights: a folder of several files") {
  for (std::int64_t files : {1, 2, 3}) {
    INFO(files);
    Files shards;
    ga::io::Tensors all;
    for (std::int64_t i = 0; i < 7; ++i) {
      const auto name = "layers." + std::to_string(i) + ".weight";
      all[name] = shards["model-" + std::to_string(i % files) + ".safetensors"][name] = torch::arange(i, i + 5);
    }
    const Folder folder(shards);
    for (auto& path : {folder.path(), folder / index_name}) {
      auto module = zeros_like(all);
      CHECK(ga::io::load_weights(module, path).complete());
      CHECK(testing::equal(testing::copies_of(module), all));
    }
  }
}

TEST_CASE("load_weights: one file takes precedence over several, as in Python") {
  const auto folder = two_files();
  ga::io::save_file({{"a", torch::full({3}, 7.0)}}, folder / "model.safetensors");
  auto module = zeros_like({{"a", torch::zeros({3})}});
  ga::io::load_weights(module, folder.path());
  CHECK(module.at("a").equal(torch::full({3}, 7.0)));
}

TEST_CASE("load_weights: the files of a folder may be links, as in Hugging Face's cache") {
  const auto blobs = two_files();
  testing::Directory snapshot;
  for (auto& name : {first, second, index_name}) std::filesystem::create_symlink(blobs / name, snapshot / name);
  auto module = zeros_like(joined(in_first, in_second));
  CHECK(ga::io::load_weights(module, snapshot / "").complete());
  CHECK(module.at("b.d").equal(in_second.at("b.d")));
  std::filesystem::remove(blobs / index_name);
  REQUIRE(testing::contains(error_of_loading(snapshot / ""),
                            (snapshot / index_name).string() + ": must be a file that can be read, got No such file"));
}

TEST_CASE("load_weights: errors in any file are found before any change") {
  const auto all = joined(in_first, in_second);
  {
    const Folder folder({{first, in_first}, {second, {{"b.d", torch::zeros({4})}}}});
    CHECK(testing::contains(error_of_loading(folder.path()), "mis-shaped (1):\n  b.d: [4] in the file, [3] in"));
  }
  {
    const Folder folder({{first, in_first}, {second, {{"b.e", torch::zeros({4})}}}});
    CHECK(testing::contains(error_of_loading(folder.path()), "missing (1):\n  b.d\nunexpected (1):\n  b.e\n"));
  }
  for (bool strict : {true, false}) {
    const Folder folder({{first, in_first}, {second, {{"b.d", torch::ones({3}, at::kBool)}}}});
    auto bytes = testing::text_of(folder / second);
    bytes.back() = '\2';
    testing::write_text(folder / second, bytes);
    CHECK(testing::contains(error_of_loading(folder.path(), strict), "only bytes 0 and 1, as its dtype is bool"));
  }
  for (bool strict : {true, false}) {
    const auto folder = two_files();
    testing::write_text(folder / second, testing::text_of(folder / second) + "more");
    CHECK(
        testing::contains(error_of_loading(folder.path(), strict), (folder / second).string() + ": its tensors must"));
  }
}

TEST_CASE("load_weights: without strict, it loads matching tensors from all files") {
  const Folder folder({{first, in_first}, {second, {{"b.e", torch::zeros({4})}}}});
  auto module = zeros_like(joined(in_first, in_second));
  const auto report = ga::io::load_weights(module, folder.path(), {.strict = false});
  CHECK(report.missing == Names{"b.d"});
  CHECK(report.unexpected == Names{"b.e"});
  CHECK(module.at("b.c").equal(in_first.at("b.c")));
}

TEST_CASE("load_weights: an invalid index") {
  const auto folder = two_files();
  const std::string a_in_first = R"("a":")" + first + "\"";
  const auto file = [&](const std::string& name) { return R"({"weight_map":{"a":")" + name + "\"}}"; };
  const auto plain = [](const std::string& name) {
    return "the file of \"a\" must have a plain name (A-Z a-z 0-9 _ . -, no dot in front) that ends in .safetensors, "
           "got \"" +
           name + "\"";
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "must be JSON in UTF-8, got what is none at byte"},
      {"{", "must be JSON in UTF-8, got what is none at byte"},
      {R"({"weight_map":{}} x)", "must be JSON in UTF-8, got what is none at byte"},
      {"{\"weight_map\":{}}" + std::string(1, '\0'), "must be JSON in UTF-8, got a zero at byte 18"},
      {"{\"weight_map\":{\"\xff\":\"x.safetensors\"}}", "must be JSON in UTF-8"},
      {"[]", "must be an object, got array"},
      {"{}", "must have an object \"weight_map\", got none"},
      {R"({"weight_map":["a"]})", "must have an object \"weight_map\", got array"},
      {R"({"weight_map":{"a":1}})", "the file of \"a\" must be a text, got number"},
      {R"({"weight_map":{"a":null}})", "the file of \"a\" must be a text, got null"},
      {"{\"weight_map\":{" + a_in_first + "," + a_in_first + "}}", "must have every name once, got \"a\" twice"},
      {R"({"weight_map":{},"weight_map":{}})", "must have every name once, got \"weight_map\" twice"},
      {R"({"metadata":[[[[[[[[]]]]]]]],"weight_map":{}})", "must not be nested deeper than 8"},
      {R"({"weight_map":{")" + std::string(4097, 'a') + R"(":"x.safetensors"}})", "at most 4096 bytes, got 4097"},
      {file("../" + first), plain("../" + first)},
      {file("sub/" + first), plain("sub/" + first)},
      {file("/" + first), plain("/" + first)},
      {file("..\\\\" + first), plain("..\\\\" + first)},
      {file(".hidden.safetensors"), plain(".hidden.safetensors")},
      {file(".."), plain("..")},
      {file(""), plain("")},
      {file(".safetensors"), plain(".safetensors")},
      {file("a\\u0000.safetensors"), plain("a\\u0000.safetensors")},
      {file("C:x.safetensors"), plain("C:x.safetensors")},
      {file(std::string(250, 'a') + ".safetensors"), "got \"" + std::string(200, 'a') + "\""},
      {file("pytorch_model-00001-of-00002.bin"), plain("pytorch_model-00001-of-00002.bin")},
      {file("other.safetensors"), "lists other.safetensors, which must be in the same folder but is not"},
      {R"({"weight_map":{"b.d":")" + first + "\"," + a_in_first + "}}",
       "lists the tensor \"b.d\" in " + first + ", which must have it but does not"},
      {R"({"weight_map":{"b.d":")" + first + R"(","b.c":")" + second + "\"}}",
       "lists the tensor \"b.c\" in " + second + ", which must have it but does not"},
      {R"({"weight_map":{"none":")" + first + "\"}}",
       "lists the tensor \"none\" in " + first + ", which must have it but does not"}};
  for (auto& [text, expected] : cases)
    for (bool strict : {true, false}) {
      testing::write_text(folder / index_name, text);
      const auto message = error_of_loading(folder.path(), strict);
      INFO(text << "\n" << message);
      CHECK(testing::contains(message, (folder / index_name).string() + ": "));
      CHECK(testing::contains(message, expected));
    }
}

TEST_CASE("load_weights: other things in place of an index or a file") {
  {
    const auto folder = two_files();
    std::filesystem::resize_file(folder / index_name, 100'000'001);  // zeros, which take no space on the disk
    CHECK(testing::contains(error_of_loading(folder.path()), "must have at most 100000000 bytes, got 100000001"));
  }
  for (auto& name : {index_name, second}) {
    const auto folder = two_files();
    const auto path = folder / name;
    std::filesystem::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    CHECK(testing::contains(error_of_loading(folder.path()), path.string() + ": must be a regular file, got a pipe"));
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    CHECK(testing::contains(error_of_loading(folder.path()), path.string() + ": must be a regular file, got a dir"));
  }
}

TEST_CASE("load_weights: a tensor must be in one file, listed or not") {
  const Folder folder({{first, joined(in_first, {{"b.d", torch::ones({3})}})}, {second, in_second}});
  const auto two = "must be in one file, got it in " + first + " and in " + second;
  CHECK(testing::contains(error_of_loading(folder.path(), false), "the tensor \"b.d\" " + two));
  const Folder unlisted(
      {{first, joined(in_first, {{"x", torch::ones({1})}})}, {second, joined(in_second, {{"x", torch::ones({1})}})}});
  unlisted.write_index({{"weight_map", {{"a", first}, {"b.c", first}, {"b.d", second}}}});
  CHECK(testing::contains(error_of_loading(unlisted.path(), false), "the tensor \"x\" " + two));
}

TEST_CASE("load_weights: tensors that the index lacks are unexpected, and not loaded") {
  const auto folder = two_files();
  folder.write_index({{"weight_map", {{"a", first}, {"b.d", second}}}});
  CHECK(testing::contains(error_of_loading(folder.path()),
                          "missing (1):\n  b.c\nunexpected (1):\n  b.c (not in the index)\n"));
  auto module = zeros_like(joined(in_first, in_second));
  const auto report = ga::io::load_weights(module, folder.path(), {.strict = false});
  CHECK(report.unexpected == Names{"b.c (not in the index)"});
  CHECK(module.at("b.c").equal(torch::zeros({2, 2})));
  CHECK(module.at("a").equal(in_first.at("a")));
}

TEST_CASE("load_weights: a folder that has only pickles") {
  testing::Directory folder;
  REQUIRE_ERROR(folder.operator/("").string() +
                    ": must have model.safetensors or model.safetensors.index.json, got a " + "folder without them",
                ga::io::WeightFiles(folder / ""));
  for (auto* name : {"pytorch_model.bin.index.json", "pytorch_model.bin"}) {
    testing::write_text(folder / name, "PK\x03\x04");
    for (auto& path : {folder / "", folder / name}) {
      const auto message = error_of_loading(path);
      CHECK(testing::contains(message,
                              (folder / name).string() + ": weights must be in safetensors files; a pickle can run"));
      CHECK(
          testing::contains(message, "\npython3 -c \"import glob, torch, safetensors.torch; safetensors.torch.save_"));
      CHECK(testing::contains(message, "weights_only=True"));
    }
    if (std::string(name) != "pytorch_model.bin") std::filesystem::remove(folder / name);
  }
  ga::io::save_file({{"a", torch::ones({1})}}, folder / "model.safetensors");
  CHECK(ga::io::WeightFiles(folder / "").keys() == Names{"a"});
  REQUIRE_ERROR("no_folder: must be a file that can be read, got No such file", ga::io::WeightFiles("no_folder"));
}

TEST_CASE("load_weights: shared weights, whose names are in two files or in one") {
  const auto shared = torch::zeros({3}), numbers = torch::arange(3.0);
  ModuleOfTensors module({{"a", shared}, {"b.d", shared}});
  CHECK(ga::io::load_weights(module, Folder({{first, {{"a", numbers}}}, {second, {{"b.d", numbers + 5}}}}).path())
            .complete());
  CHECK(shared.equal(numbers + 5));  // the last by name
  CHECK(ga::io::load_weights(module, Folder({{first, {}}, {second, {{"a", numbers}}}}).path()).complete());
  CHECK(shared.equal(numbers));
}

TEST_CASE("load_weights: each file may have a different dtype") {
  const auto numbers = torch::tensor({1.5, -2.0, 0.1});
  const Folder folder({{"half.safetensors", {{"half", numbers.to(at::kHalf)}}},
                       {"bfloat16.safetensors", {{"bfloat16", numbers.to(at::kBFloat16)}}},
                       {"long.safetensors", {{"long", torch::arange(3)}}}});
  auto module = zeros_like({{"half", numbers}, {"bfloat16", numbers}, {"long", numbers}});
  ga::io::load_weights(module, folder.path());
  CHECK(module.at("half").equal(numbers.to(at::kHalf).to(at::kFloat)));
  CHECK(module.at("bfloat16").equal(numbers.to(at::kBFloat16).to(at::kFloat)));
  CHECK(!module.at("half").equal(module.at("bfloat16")));
  CHECK(module.at("long").equal(torch::arange(3.0)));
}

TEST_CASE("load_weights: a module without weights") {
  torch::nn::Tanh module;
  CHECK(ga::io::load_weights(module, Folder(Files{}).path()).complete());
  CHECK(ga::io::load_weights(module, Folder(Files{{first, {}}}).path()).complete());
  REQUIRE_ERROR("unexpected (3):\n  a\n  b.c\n  b.d\n", ga::io::load_weights(module, two_files().path()));
}

TEST_CASE("load_weights: takes the memory of one tensor at a time, if any") {
  constexpr std::int64_t bytes = 1 << 20;
  const auto ones = torch::ones({bytes / 4});
  const ga::io::Tensors all{{"a", ones}, {"b", ones}, {"c", ones}};
  const Folder folder({{first, {{"a", ones}, {"b", ones}}}, {second, {{"c", ones}}}});
  const auto peak_of_loading = [&] {
    auto module = zeros_like(all);
    std::int64_t peak = 0;
    {
      const ga::MemoryMeter meter;
      ga::io::load_weights(module, folder.path());
      peak = meter.peak_bytes();
    }
    CHECK(testing::equal(testing::copies_of(module), all));
    return peak;
  };
  CHECK(peak_of_loading() == 0);
  for (auto& name : {first, second}) {  // another space in the header makes all numbers unaligned
    auto text = testing::text_of(folder / name);
    text.insert(9, " ");
    ++text[0];
    testing::write_text(folder / name, text);
  }
  CHECK(peak_of_loading() == bytes);
  const ga::MemoryMeter meter;
  const auto both = ga::io::load_file(folder / first);
  CHECK(meter.live_bytes() == 2 * bytes);
}

TEST_CASE("WeightFiles: the tensors of a folder") {
  const auto folder = two_files();
  folder.write_index({{"weight_map", {{"a", first}, {"b.d", second}}}});
  at::Tensor kept;
  {
    const ga::io::WeightFiles files(folder.path());
    CHECK(files.keys() == Names{"a", "b.d"});
    CHECK(files.unlisted() == Names{"b.c"});
    CHECK(files.contains("a"));
    CHECK(!files.contains("b.c"));
    CHECK(files.get_tensor("b.d").equal(in_second.at("b.d")));
    REQUIRE_ERROR(index_name + ": must have a tensor \"b.c\", but does not", files.get_tensor("b.c"));
    kept = files.get_tensor("a");
  }
  CHECK(kept.equal(in_first.at("a")));
  const ga::io::WeightFiles file(folder / first);
  CHECK(file.keys() == Names{"a", "b.c"});
  CHECK(file.unlisted().empty());
}

TEST_CASE("save_weights: to a folder, as model.safetensors") {
  testing::Directory directory;
  ModuleOfTensors module(in_first);
  ga::io::save_weights(module, directory / "file");
  const auto expected = testing::text_of(directory / "file");
  std::filesystem::create_directory(directory / "there");
  testing::write_text(directory / "there/config.json", "{}");
  for (const std::string folder : {"there", "there/", "new/", "deep/er/"}) {
    INFO(folder);
    for (int time = 0; time < 2; ++time) {  // the second replaces the first one's files
      ga::io::save_weights(module, directory / folder, {{"format", "pt"}});
      CHECK(testing::text_of(directory / folder / "model.safetensors") == expected);
      auto loaded = zeros_like(in_first);
      CHECK(ga::io::load_weights(loaded, directory / folder).complete());
      CHECK(testing::equal(testing::copies_of(loaded), in_first));
    }
  }
  CHECK(testing::text_of(directory / "there/config.json") == "{}");
  CHECK(std::distance(std::filesystem::directory_iterator(directory / "there"), {}) == 2);
  ga::io::save_weights(module, directory / "new_name");  // a file, because the path ends without a slash
  CHECK(testing::text_of(directory / "new_name") == expected);
  REQUIRE_ERROR("must be a directory, or one that can be created, got",
                ga::io::save_weights(module, directory / "file/"));
  CHECK(testing::text_of(directory / "file") == expected);
}

TEST_CASE("load_weights: folders of transformers") {
  const auto write = [](const auto& files, const testing::Directory& directory) {
    for (auto& [name, bytes] : files) testing::write_text(directory / name, bytes);
  };
  // Makes the numbers of hugging_face_folders.py.
  const auto counting = [](const ga::io::WeightFiles& files) {
    ga::io::Tensors tensors;
    std::int64_t start = 0;
    for (auto& name : files.keys()) {
      const auto shape = files.get_tensor(name).sizes().vec();
      const auto end = start + c10::multiply_integers(shape);
      tensors[name] = torch::arange(start, end).remainder(128).view(shape) / 64.0;
      start = end;
    }
    return tensors;
  };
  testing::Directory base, classifier;
  write(pytorch_values::hugging_face_folders.at("base"), base);
  write(pytorch_values::hugging_face_folders.at("classifier"), classifier);
  const auto base_weights = counting(ga::io::WeightFiles(base / ""));
  const auto classifier_weights = counting(ga::io::WeightFiles(classifier / ""));
  CHECK(base_weights.size() == 17);
  CHECK(classifier_weights.size() == 18);
  CHECK(ga::io::WeightFiles(base / "").get_tensor("ln_f.bias").scalar_type() == at::kHalf);
  CHECK(ga::io::WeightFiles(classifier / "").get_tensor("score.weight").scalar_type() == at::kBFloat16);

  auto model = zeros_like(base_weights);
  CHECK(ga::io::load_weights(model, base / "").complete());
  CHECK(testing::equal(testing::copies_of(model), base_weights));
  auto with_head = zeros_like(classifier_weights);
  CHECK(ga::io::load_weights(with_head, classifier / "").complete());
  CHECK(testing::equal(testing::copies_of(with_head), classifier_weights));

  const auto report =
      ga::io::load_weights(with_head, base / "", {.base_model_prefix = "transformer", .may_be_missing = {"score"}});
  CHECK(report.new_weights == Names{"score.weight"});
  for (auto& [name, tensor] : base_weights) CHECK(with_head.at("transformer." + name).equal(tensor));
  CHECK(with_head.at("score.weight").equal(classifier_weights.at("score.weight")));
}
