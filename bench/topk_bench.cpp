// topk/<implementation>/<n>: the best 15 % of n scores, float32, lognormal, one thread. Suffixes on the operation name
// other element types (bf16, f16), shares (k1, k50) and inputs. topk_flat: the counts that Ada-KV needs.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "common/inputs.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"

namespace kvevict::bench {
namespace {

struct Point {
  Scores kind = Scores::lognormal;
  int percent = 15;
  std::size_t n = 0;

  index_t k() const { return static_cast<index_t>(n * static_cast<std::size_t>(percent) / 100); }
};

// The arrays of a point, made when first used and kept, so that cases may be interleaved.
template <class T>
const std::vector<std::vector<T>>& inputs(const Point& point) {
  static std::map<std::pair<Scores, std::size_t>, std::vector<std::vector<T>>> made;
  std::vector<std::vector<T>>& arrays = made[{point.kind, point.n}];
  while (arrays.size() < rotation(point.n)) {
    const auto seed = static_cast<std::uint32_t>(arrays.size() + 1);
    const std::vector<float> scores = make_scores(point.kind, point.n, seed);
    std::vector<T>& array = arrays.emplace_back(point.n);
    std::transform(scores.begin(), scores.end(), array.begin(), from_float<T>);
  }
  return arrays;
}

// Working memory of every implementation, taken before the clock starts.
template <class T>
struct Work {
  explicit Work(const Point& point)
      : pairs(point.n),
        packed(point.n),
        scratch(topk_scratch_bytes(static_cast<std::int64_t>(point.n))),
        out(static_cast<std::size_t>(point.k())) {}
  std::vector<std::pair<float, index_t>> pairs;
  std::vector<std::uint64_t> packed;
  std::vector<std::byte> scratch;
  std::vector<index_t> out;
};

template <class T>
void kvevict_topk(const std::vector<T>& scores, Work<T>& work) {
  topk(std::span<const T>(scores), static_cast<index_t>(work.out.size()), work.out, work.scratch);
}

// The textbook way: partition (score, index) pairs.
template <class T>
void nth_element_pair(const std::vector<T>& scores, Work<T>& work) {
  auto& pairs = work.pairs;
  for (std::size_t i = 0; i < scores.size(); ++i) pairs[i] = {to_float(scores[i]), static_cast<index_t>(i)};
  const auto k = static_cast<std::ptrdiff_t>(work.out.size());
  std::nth_element(pairs.begin(), pairs.begin() + k, pairs.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  for (std::size_t i = 0; i < work.out.size(); ++i) work.out[i] = pairs[i].second;
}

// The same with score and index in one integer, whose order is the rule itself: the reference.
template <class T>
void nth_element_u64(const std::vector<T>& scores, Work<T>& work) {
  auto& packed = work.packed;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const float score = to_float(scores[i]) + 0.f;  // -0 becomes +0
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    bits ^= (bits >> 31) != 0 ? 0xffffffffu : 0x80000000u;
    packed[i] = (std::uint64_t{bits} << 32) | static_cast<std::uint32_t>(~i);
  }
  const auto k = static_cast<std::ptrdiff_t>(work.out.size());
  std::nth_element(packed.begin(), packed.begin() + k, packed.end(), std::greater<>{});
  for (std::size_t i = 0; i < work.out.size(); ++i) work.out[i] = static_cast<index_t>(~packed[i] & 0x7fffffffu);
}

// The bound: reading every score once.
template <class T>
void read_floor(const std::vector<T>& scores, Work<T>& work) {
  using Bits = typename detail::KeyTraits<T>::key_type;
  const auto* bits = reinterpret_cast<const typename detail::ScoreBits<T>::type*>(scores.data());
  Bits largest = bits[0];
  for (std::size_t i = 1; i < scores.size(); ++i) largest = std::max<Bits>(largest, bits[i]);
  if (!work.out.empty()) work.out[0] = largest;
}

template <class T>
using Implementation = void (*)(const std::vector<T>&, Work<T>&);

template <class T>
void add_topk(const std::string& operation, const std::string& name, Implementation<T> select, bool bound,
              const Point& point) {
  const auto check = [=] {
    Work<T> work(point), reference(point);
    for (const std::vector<T>& scores : inputs<T>(point)) {
      select(scores, work);
      nth_element_u64(scores, reference);
      std::sort(reference.out.begin(), reference.out.end());
      if (std::string_view(name) != "kvevict") std::sort(work.out.begin(), work.out.end());
      if (work.out != reference.out) fail_domain("the selected indices differ from the reference");
    }
  };
  const auto run = [=](benchmark::State& state) {
    Work<T> work(point);
    const auto& arrays = inputs<T>(point);
    std::size_t next = 0;
    for (auto _ : state) {
      select(arrays[next], work);
      benchmark::DoNotOptimize(work.out.data());
      benchmark::ClobberMemory();
      next = next + 1 == arrays.size() ? 0 : next + 1;
    }
  };
  add_case({operation + '/' + name + '/' + std::to_string(point.n), bound ? std::function<void()>() : check, run});
}

template <class T>
void add_point(const std::string& operation, const Point& point) {
  add_topk<T>(operation, "kvevict", kvevict_topk<T>, false, point);
  add_topk<T>(operation, "nth_element_pair", nth_element_pair<T>, false, point);
  add_topk<T>(operation, "nth_element_u64", nth_element_u64<T>, false, point);
  add_topk<T>(operation, "read_floor", read_floor<T>, true, point);
}

const bool added = [] {
  for (const std::size_t n : {1024, 4096, 16384, 32768, 65536, 262144, 1048576}) add_point<float>("topk", {.n = n});
  constexpr std::size_t n = 32768;
  for (const int percent : {1, 50}) add_point<float>("topk.k" + std::to_string(percent), {.percent = percent, .n = n});
  for (const Scores kind : {Scores::uniform, Scores::maxpooled, Scores::rounded, Scores::ascending, Scores::descending,
                            Scores::equal, Scores::two_values, Scores::denormal, Scores::infinite, Scores::spikes})
    add_point<float>("topk." + std::string(name_of(kind)), {.kind = kind, .n = n});
  add_point<bf16_t>("topk.bf16", {.n = n});
  add_point<bf16_t>("topk.bf16.k50", {.percent = 50, .n = n});
  add_point<fp16_t>("topk.f16", {.n = n});
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
