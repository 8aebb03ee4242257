// Masked attention: the forward pass against plain loops, the mask's meaning, the guards, and every gradient.
#include "kvevict/train/masked_attention.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvevict;

namespace {

// One (layer, head) with two query heads and two pieces of three local rows each, packed: rows see their own piece.
template <class T>
struct Example {
  index_t group = 2, pieces = 2, length = 3, tokens = 7, dk = 4, dv = 3;
  std::vector<T> q, ck, cv, lk, lv, mask;
  std::vector<VisibleRange> visible;
  std::vector<index_t> seen;

  explicit Example(unsigned seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> draw;
    const auto fill = [&](index_t n) {
      std::vector<T> x(static_cast<std::size_t>(n));
      for (auto& v : x) v = static_cast<T>(draw(random));
      return x;
    };
    q = fill(rows() * dk);
    ck = fill(tokens * dk);
    cv = fill(tokens * dv);
    lk = fill(locals() * dk);
    lv = fill(locals() * dv);
    for (index_t j = 0; j < tokens; ++j) mask.push_back(static_cast<T>(j + 1) / static_cast<T>(tokens + 1));
    for (index_t g = 0; g < group; ++g)
      for (index_t p = 0; p < pieces; ++p)
        for (index_t i = 0; i < length; ++i) visible.push_back({p * length, p * length + i + 1});
  }
  index_t locals() const { return pieces * length; }
  index_t rows() const { return group * locals(); }
  MaskedAttention<T> view() const {
    return {{q.data(), rows(), dk, dk},
            {ck.data(), tokens, dk, dk},
            {cv.data(), tokens, dv, dv},
            mask,
            {lk.data(), locals(), dk, dk},
            {lv.data(), locals(), dv, dv},
            visible,
            seen,
            T(0.7)};
  }
  std::vector<T> forward() const {
    std::vector<T> out(static_cast<std::size_t>(rows() * dv));
    MaskedAttentionState<T> state;
    masked_attention<T>(view(), {out.data(), rows(), dv, dv}, state);
    return out;
  }
};

// The definition in plain loops; `keep` lists the context rows that exist, `additive` uses scores + log m.
std::vector<double> plain(const Example<double>& x, const std::vector<index_t>& keep, bool additive = false) {
  std::vector<double> out;
  const auto dot = [&](const std::vector<double>& a, index_t i, const std::vector<double>& b, index_t j) {
    double s = 0;
    for (index_t c = 0; c < x.dk; ++c)
      s += a[static_cast<std::size_t>(i * x.dk + c)] * b[static_cast<std::size_t>(j * x.dk + c)];
    return 0.7 * s;
  };
  for (index_t r = 0; r < x.rows(); ++r) {
    double sum = 0;
    std::vector<double> o(static_cast<std::size_t>(x.dv), 0.0);
    const auto add = [&](double p, const std::vector<double>& v, index_t j) {
      sum += p;
      for (index_t c = 0; c < x.dv; ++c)
        o[static_cast<std::size_t>(c)] += p * v[static_cast<std::size_t>(j * x.dv + c)];
    };
    for (const index_t j : keep) {
      if (!x.seen.empty() && j >= x.seen[static_cast<std::size_t>(r)]) continue;
      const double m = x.mask[static_cast<std::size_t>(j)], s = dot(x.q, r, x.ck, j);
      add(additive ? std::exp(s + std::log(m)) : std::exp(s) * m, x.cv, j);
    }
    const VisibleRange v = x.visible.empty() ? VisibleRange{} : x.visible[static_cast<std::size_t>(r)];
    for (index_t j = v.begin; j < v.end; ++j) add(std::exp(dot(x.q, r, x.lk, j)), x.lv, j);
    for (const double value : o) out.push_back(sum > 0 ? value / sum : 0);
  }
  return out;
}

void check_close(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance = 1e-12) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - wanted[i]) <= tolerance);
}

const std::vector<index_t> all{0, 1, 2, 3, 4, 5, 6};

}  // namespace

TEST_CASE("two keys by hand") {
  // Scores 0 and ln 3, masks 1/2 and 1: weights 1/2 and 3, so P = 1/7 and 6/7.
  const std::vector<double> q{1}, k{0, std::log(3.0)}, v{7, 14}, mask{0.5, 1};
  double out = 0;
  MaskedAttentionState<double> state;
  MaskedAttention<double> a;
  a.queries = {q.data(), 1, 1, 1};
  a.context_keys = {k.data(), 2, 1, 1};
  a.context_values = {v.data(), 2, 1, 1};
  a.mask = mask;
  masked_attention<double>(a, {&out, 1, 1, 1}, state);
  CHECK(out == doctest::Approx(13));
  // dL/dm_0 = e^0 / 3.5 * (7 - 13) for L = out.
  const double one = 1;
  std::vector<double> grad(2, 0.0);
  MaskedAttentionGradients<double> grads;
  grads.mask = grad;
  masked_attention_backward<double>(a, {&out, 1, 1, 1}, {&one, 1, 1, 1}, state, grads);
  CHECK(grad[0] == doctest::Approx(-6 / 3.5));
  CHECK(grad[1] == doctest::Approx(3 * 1 / 3.5));
}

TEST_CASE("T6: a soft mask equals plain loops and the additive log form") {
  const Example<double> x;
  check_close(x.forward(), plain(x, all));
  check_close(x.forward(), plain(x, all, true));
  auto open = x;
  open.mask.clear();
  auto ones = x;
  ones.mask.assign(7, 1.0);
  check_close(open.forward(), ones.forward());
}

TEST_CASE("T6: a 0/1 mask equals attention on the compacted context") {
  Example<double> x;
  x.mask = {1, 0, 0, 1, 0, 1, 0};
  check_close(x.forward(), plain(x, {0, 3, 5}));
}

TEST_CASE("T6: an empty head gives the local-only output, and zero where there is nothing at all") {
  Example<double> x;
  x.mask.assign(7, 0.0);
  check_close(x.forward(), plain(x, {}));
  x.visible.clear();
  for (const double v : x.forward()) CHECK(v == 0);
}

TEST_CASE("context_seen limits what a row sees of the context") {
  Example<double> x;
  for (index_t r = 0; r < x.rows(); ++r) x.seen.push_back(r % 8);
  check_close(x.forward(), plain(x, all));
}

TEST_CASE("masked-out rows with enormous scores leave values and gradients finite") {
  Example<float> x;
  x.mask.assign(7, 0.f);
  x.mask[2] = 1e-12f;
  for (std::size_t c = 0; c < 4; ++c) x.ck[c] = 1e4f;
  std::vector<float> out(static_cast<std::size_t>(x.rows() * x.dv)), g(out.size(), 1.f), grad(7, 0.f),
      dq(x.q.size(), 0.f);
  MaskedAttentionState<float> state;
  masked_attention<float>(x.view(), {out.data(), x.rows(), x.dv, x.dv}, state);
  MaskedAttentionGradients<float> grads;
  grads.mask = grad;
  grads.queries = {dq.data(), x.rows(), x.dk, x.dk};
  masked_attention_backward<float>(x.view(), {out.data(), x.rows(), x.dv, x.dv}, {g.data(), x.rows(), x.dv, x.dv},
                                   state, grads);
  for (const auto* v : {&out, &grad, &dq})
    CHECK(std::all_of(v->begin(), v->end(), [](float y) { return std::isfinite(y); }));
}

TEST_CASE("T4: every gradient agrees with finite differences, relative 1e-6") {
  for (const bool dense : {false, true}) {
    Example<double> x(7);
    x.mask[3] = 1e-9;
    x.mask[4] = 0;
    if (dense)
      for (index_t r = 0; r < x.rows(); ++r) x.seen.push_back(1 + r % 7);
    std::vector<double> g;
    std::mt19937 random(9);
    std::normal_distribution<double> draw;
    for (index_t i = 0; i < x.rows() * x.dv; ++i) g.push_back(draw(random));
    const auto loss = [&] {
      const auto out = x.forward();
      double s = 0;
      for (std::size_t i = 0; i < out.size(); ++i) s += g[i] * out[i];
      return s;
    };
    std::vector<double> dq(x.q.size()), dck(x.ck.size()), dcv(x.cv.size()), dlk(x.lk.size()), dlv(x.lv.size()), dm(7);
    std::vector<double> out(g.size());
    MaskedAttentionState<double> state;
    masked_attention<double>(x.view(), {out.data(), x.rows(), x.dv, x.dv}, state);
    masked_attention_backward<double>(x.view(), {out.data(), x.rows(), x.dv, x.dv}, {g.data(), x.rows(), x.dv, x.dv},
                                      state,
                                      {{dq.data(), x.rows(), x.dk, x.dk},
                                       {dlk.data(), x.locals(), x.dk, x.dk},
                                       {dlv.data(), x.locals(), x.dv, x.dv},
                                       dm,
                                       {dck.data(), x.tokens, x.dk, x.dk},
                                       {dcv.data(), x.tokens, x.dv, x.dv}});
    const auto check = [&](std::vector<double>& values, const std::vector<double>& grad, bool one_sided = false) {
      double largest = 0;
      for (const double v : grad) largest = std::max(largest, std::abs(v));
      for (std::size_t i = 0; i < values.size(); ++i) {
        // Fourth order, so that 1e-6 is met with room; a mask of 0 can only be raised, but the function is smooth
        // there.
        const double h = 1e-3, keep = values[i];
        const auto at = [&](double step) {
          values[i] = keep + step;
          const double l = loss();
          values[i] = keep;
          return l;
        };
        const bool edge = one_sided && keep < 2 * h;
        const double numeric =
            edge ? (-25 * at(0) + 48 * at(h) - 36 * at(2 * h) + 16 * at(3 * h) - 3 * at(4 * h)) / (12 * h)
                 : (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
        CHECK(std::abs(grad[i] - numeric) <= (edge ? 1e-5 : 1e-6) * std::max(largest, std::abs(numeric)));
      }
    };
    check(x.q, dq);
    check(x.ck, dck);
    check(x.cv, dcv);
    check(x.lk, dlk);
    check(x.lv, dlv);
    check(x.mask, dm, true);
  }
}

TEST_CASE("one state serves calls of different sizes") {
  MaskedAttentionState<double> state;
  for (const unsigned seed : {1u, 2u, 3u}) {
    Example<double> x(seed);
    if (seed == 2) x.mask.resize(static_cast<std::size_t>(x.tokens = 3));
    std::vector<double> out(static_cast<std::size_t>(x.rows() * x.dv));
    masked_attention<double>(x.view(), {out.data(), x.rows(), x.dv, x.dv}, state);
    check_close(out, plain(x, seed == 2 ? std::vector<index_t>{0, 1, 2} : all));
  }
}

TEST_CASE("inputs that do not fit together are refused") {
  Example<double> x;
  x.mask.pop_back();
  CHECK_THROWS_WITH_AS(x.forward(), "masked_attention: a mask of 6 for 7 context rows", std::invalid_argument);
  Example<double> y;
  y.visible.back().end = 7;
  CHECK_THROWS_AS(y.forward(), std::invalid_argument);
}
