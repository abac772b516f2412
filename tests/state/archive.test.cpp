// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/archive.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace ga = gradaccum;

namespace {

template <class T>
T loaded(const ga::Archive& saved, const std::string& name) {
  T value{};
  ga::Archive(saved.values())(name, value);
  return value;
}

template <class T>
T round_trip(T value) {
  ga::Archive saved;
  saved("value", value);
  return loaded<T>(saved, "value");
}

// Compares bits, so that NaN and -0 count.
template <class T>
bool survives(T value) {
  const T back = round_trip(value);
  return std::memcmp(&back, &value, sizeof value) == 0;
}

struct Inner {
  std::int64_t count = 0;
  at::Tensor tensor;
  void state(ga::Archive& archive) {
    archive("count", count);
    archive("tensor", tensor);
  }
};
struct Outer {
  Inner first, second;
  double number = 0;
  void state(ga::Archive& archive) {
    archive("first", first);
    archive("number", number);
    archive("second", second);
  }
};

std::vector<std::string> names_of(const ga::Archive& archive) {
  std::vector<std::string> names;
  for (auto& [name, value] : archive.values()) names.push_back(name);
  return names;
}

}  // namespace

TEST_CASE("Archive: numbers, flags and texts are read back to the bit") {
  CHECK(survives(std::numeric_limits<std::int32_t>::min()));
  CHECK(survives(std::numeric_limits<std::int64_t>::max()));
  CHECK(survives(std::numeric_limits<std::int64_t>::min()));
  CHECK(survives(std::numeric_limits<std::uint64_t>::max()));  // such as a seed
  CHECK(survives(std::numeric_limits<std::uint8_t>::max()));
  CHECK(survives(true));
  CHECK(survives(false));
  CHECK(survives(0.1f));
  CHECK(survives(0.1));
  CHECK(survives(-0.0));
  CHECK(survives(std::numeric_limits<double>::denorm_min()));
  CHECK(survives(-std::numeric_limits<double>::infinity()));
  CHECK(survives(std::numeric_limits<float>::infinity()));
  CHECK(std::isnan(round_trip(std::numeric_limits<double>::quiet_NaN())));
  CHECK(std::isnan(round_trip(std::numeric_limits<float>::quiet_NaN())));
  for (const std::string text : {"", "a, \"b\"\n", "ü"}) CHECK(round_trip(text) == text);
  const std::string with_zero("a\0b", 3);
  CHECK(round_trip(with_zero) == with_zero);
}

TEST_CASE("Archive: tensors are read back as new ones") {
  const auto base = torch::arange(12, at::kFloat).reshape({3, 4});
  const std::vector<at::Tensor> tensors{
      base,
      base.t(),
      base.slice(1, 0, 4, 2),
      base.select(0, 1).select(0, 2),  // 0-dim
      base[0].expand({5, 4}),
      torch::empty({0, 3}, at::kDouble),
      torch::tensor({1.5, -0.25}).to(at::kBFloat16),
      torch::tensor({true, false}),
      torch::tensor({std::int64_t{1} << 62}),
      torch::complex(base, base + 1),
      torch::ones({2}, at::kDouble).set_requires_grad(true),
      torch::ones({2}, at::kDouble).set_requires_grad(true) * 2,  // not a leaf
  };
  for (auto& tensor : tensors) {
    INFO(tensor.toString() << tensor.sizes());
    const auto back = round_trip(tensor);
    CHECK(back.scalar_type() == tensor.scalar_type());
    CHECK(at::equal(back, tensor));
    CHECK_FALSE(back.requires_grad());
    CHECK((back.numel() == 0 || back.data_ptr() != tensor.data_ptr()));
  }
  CHECK_FALSE(round_trip(at::Tensor()).defined());
  const auto nan = torch::full({3}, std::numeric_limits<double>::quiet_NaN(), at::kBFloat16);
  CHECK(at::equal(round_trip(nan).view(at::kShort), nan.view(at::kShort)));
  const auto sparse = torch::sparse_coo_tensor(torch::tensor({{0, 2}}), torch::tensor({3.0, 4.0}), {4});
  CHECK(at::equal(round_trip(sparse).to_dense(), sparse.to_dense()));
}

TEST_CASE("Archive: a tensor is copied when saving and loading") {
  auto tensor = torch::zeros({2});
  ga::Archive saved;
  saved("tensor", tensor);
  tensor.fill_(1);
  auto first = loaded<at::Tensor>(saved, "tensor"), second = loaded<at::Tensor>(saved, "tensor");
  CHECK(at::equal(first, torch::zeros({2})));
  first.fill_(2);
  CHECK(at::equal(second, torch::zeros({2})));
  CHECK(at::equal(loaded<at::Tensor>(saved, "tensor"), torch::zeros({2})));
  at::Tensor there = torch::full({3}, 7.0);  // replaced, not written to
  const auto alias = there;
  ga::Archive(saved.values())("tensor", there);
  CHECK(there.numel() == 2);
  CHECK(at::equal(alias, torch::full({3}, 7.0)));
}

TEST_CASE("Archive: vectors and arrays of values, of the saved size") {
  struct {
    std::vector<Inner> parts{{1, torch::ones({2})}, {2, {}}};
    std::array<double, 2> numbers{0.1, -0.0};
    std::vector<std::array<std::string, 1>> texts{{"a"}};
    std::vector<std::int64_t> none;
    void state(ga::Archive& archive) {
      archive("parts", parts), archive("numbers", numbers), archive("texts", texts), archive("none", none);
    }
  } values;
  ga::Archive saved;
  saved("values", values);
  CHECK(saved.values().contains("values.parts.1.count"));
  auto loaded = values;
  loaded.parts = {{}, {}};
  loaded.numbers = {};
  loaded.texts = {{}};
  ga::Archive(saved.values())("values", loaded);
  CHECK(loaded.parts[1].count == 2);
  CHECK(at::equal(loaded.parts[0].tensor, torch::ones({2})));
  CHECK((loaded.numbers == values.numbers && std::signbit(loaded.numbers[1])));
  CHECK((loaded.texts == values.texts));

  ga::Archive loading(saved.values());
  std::vector<std::int64_t> one{1};
  loaded.none = one;
  loading.allow_changes(true);
  REQUIRE_ERROR("'values.none.size' does not fit, got 0, where the program has 1", loading("values", loaded));
  CHECK(loaded.none == one);
}

TEST_CASE("Archive: parts have separate names, and can be nested") {
  Outer outer{.first = {1, torch::ones({2})}, .second = {2, {}}, .number = 0.5}, other;
  ga::Archive saved;
  CHECK_FALSE(saved.loading());
  saved("outer", outer);
  std::int64_t count = 9;
  saved("count", count);
  CHECK(names_of(saved) == std::vector<std::string>{"count", "outer.first.count", "outer.first.tensor", "outer.number",
                                                    "outer.second.count", "outer.second.tensor"});
  ga::Archive loading(saved.values());
  CHECK(loading.loading());
  loading("outer", other);
  loading("count", count);
  loading.check_all_used();
  CHECK(other.first.count == 1);
  CHECK(at::equal(other.first.tensor, torch::ones({2})));
  CHECK(other.second.count == 2);
  CHECK_FALSE(other.second.tensor.defined());
  CHECK(other.number == 0.5);
}

TEST_CASE("Archive: a name may occur once, when saving and when loading") {
  std::int64_t count = 3;
  Inner inner;
  ga::Archive saved;
  saved("count", count);
  REQUIRE_ERROR("Archive: two values are named 'count'; give each part another name", saved("count", count));
  saved("inner", inner);
  REQUIRE_ERROR("Archive: two values are named 'inner'", saved("inner", inner));
  REQUIRE_ERROR("Archive: two values are named 'inner.count'", saved("inner.count", count));
  ga::Archive loading(saved.values());
  loading("count", count);
  REQUIRE_ERROR("Archive: two values are named 'count'", loading("count", count));
}

TEST_CASE("Archive: a missing value, or one of another type, or a too large one, is an error and changes nothing") {
  ga::Archive saved;
  std::int64_t whole = std::int64_t{1} << 40, one = 1;
  double real = 0.1;
  bool flag = true;
  std::string text = "text";
  auto tensor = torch::ones({1});
  saved("whole", whole);
  saved("one", one);
  saved("real", real);
  saved("flag", flag);
  saved("text", text);
  saved("tensor", tensor);
  const auto unchanged = [&](auto before, const std::string& name, const std::string& message) {
    auto value = before;
    REQUIRE_ERROR(message, ga::Archive(saved.values())(name, value));
    return value == before;
  };
  CHECK(unchanged(std::int64_t{7}, "none", "Archive: must have a value 'none', but does not"));
  Inner inner{.count = 7, .tensor = {}};
  REQUIRE_ERROR("Archive: must have a value 'inner.count', but does not", ga::Archive(saved.values())("inner", inner));
  CHECK(inner.count == 7);

  CHECK(unchanged(7.0, "one", "Archive: the value 'one' must be a floating-point number, got a whole number"));
  CHECK(unchanged(std::int64_t{7}, "real", "'real' must be a whole number, got a floating-point number"));
  CHECK(unchanged(std::int64_t{7}, "flag", "'flag' must be a whole number, got a flag"));
  CHECK(unchanged(false, "one", "'one' must be a flag, got a whole number"));
  CHECK(unchanged(std::string("x"), "tensor", "'tensor' must be a text, got a tensor"));
  CHECK(unchanged(7.0, "text", "'text' must be a floating-point number, got a text"));
  REQUIRE_ERROR("'text' must be a tensor, got a text", ga::Archive(saved.values())("text", tensor));
  CHECK(at::equal(tensor, torch::ones({1})));

  CHECK(unchanged(std::int32_t{7}, "whole", "Archive: the value 'whole' does not fit, got 1099511627776"));
  CHECK(unchanged(7.0f, "real", "Archive: the value 'real' does not fit, got 0.1"));
  CHECK(loaded<std::int32_t>(saved, "one") == 1);  // control
}

TEST_CASE("Archive: a value that is not loaded is an error") {
  ga::Archive saved;
  std::int64_t count = 3;
  Inner inner;
  saved("count", count);
  saved("inner", inner);
  ga::Archive loading(saved.values());
  loading("count", count);
  REQUIRE_ERROR("Archive: nothing loads the value 'inner.count'; it is from another program", loading.check_all_used());
  loading("inner", inner);
  loading.check_all_used();
}

TEST_CASE("Archive: after an exception inside a part, names are restored") {
  struct Throws {
    void state(ga::Archive& archive) {
      std::int64_t before = 1;
      archive("before", before);
      TORCH_CHECK(false, "no state");
    }
  } throws;
  struct Holds {
    Throws inner;
    void state(ga::Archive& archive) { archive("inner", inner); }
  } holds;
  ga::Archive saved;
  REQUIRE_ERROR("no state", saved("holds", holds));
  REQUIRE_ERROR("no state", saved("throws", throws));
  std::int64_t next = 2;
  saved("next", next);
  CHECK(names_of(saved) == std::vector<std::string>{"holds.inner.before", "next", "throws.before"});
}
