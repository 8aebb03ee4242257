#include "inputs.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

nb::object as_layers(const nb::object& o, bool one_layer) {
  if (!one_layer || o.is_none()) return o;
  nb::list out;
  out.append(o);
  return out;
}

void require_like_keys(std::string_view name, const HeadTable& t, const HeadTable& keys) {
  if (t.element != keys.element)
    throw nb::type_error(
        joined_text(name, ": elements of ", word_of(t.element), " where the keys hold ", word_of(keys.element))
            .c_str());
  if (t.layers != keys.layers) fail_argument(name, ": ", t.layers, " layers where the keys have ", keys.layers);
}

// An object with shape, tokens(), keys(), values() and positions() instead of arrays.
bool is_view(nb::handle o) {
  for (const char* name : {"keys", "values", "positions", "tokens", "shape"})
    if (!nb::hasattr(o, name)) return false;
  return PyCallable_Check(nb::object(o.attr("keys")).ptr()) && PyCallable_Check(nb::object(o.attr("tokens")).ptr());
}

void expand_view(InputArguments& a) {
  const nb::object view = a.keys;
  if (!a.values.is_none() || !a.positions.is_none())
    fail_argument("keys: an object that shows its rows brings values and positions with it; leave those out");
  const nb::object shape = view.attr("shape");
  index_t layers = 0, heads = 0;
  if (!nb::isinstance<nb::sequence>(shape) || nb::len(shape) < 2 || !nb::try_cast(nb::object(shape[0]), layers) ||
      !nb::try_cast(nb::object(shape[1]), heads))
    throw nb::type_error("keys: the shape of an object that shows its rows begins with layers and heads");
  nb::list keys, values, positions;
  for (index_t l = 0; l < layers; ++l) {
    nb::list k, v, p;
    for (index_t h = 0; h < heads; ++h) {
      k.append(view.attr("keys")(l, h));
      v.append(view.attr("values")(l, h));
      p.append(view.attr("positions")(l, h));
    }
    keys.append(k);
    values.append(v);
    positions.append(p);
  }
  a.keys = keys;
  a.values = values;
  a.positions = positions;
  if (a.dtype.empty() && nb::hasattr(view, "dtype")) nb::try_cast(nb::object(view.attr("dtype")), a.dtype);
}

bool nested(const nb::object& o) {
  return (nb::isinstance<nb::list>(o) || nb::isinstance<nb::tuple>(o)) && nb::len(o) > 0 &&
         !nb::isinstance<nb::int_>(nb::object(o[0])) && !nb::isinstance<nb::float_>(nb::object(o[0]));
}

void read_positions(const nb::object& given, Inputs& in, bool one_layer) {
  const auto tokens = in.tokens();
  if (given.is_none()) {
    for (const index_t t : tokens) {
      in.positions.emplace_back(static_cast<std::size_t>(t));
      std::iota(in.positions.back().begin(), in.positions.back().end(), 0);
    }
    return;
  }
  if (nested(given)) {
    const nb::object layers = as_layers(given, one_layer);
    for (const nb::handle layer : nb::borrow<nb::sequence>(layers)) {
      if (!nb::isinstance<nb::sequence>(layer)) fail_argument("positions: a list of lists, one a layer, is required");
      for (const nb::handle head : nb::borrow<nb::sequence>(layer))
        in.positions.push_back(read_numbers(joined_text("positions of head ", in.positions.size()), head));
    }
  } else {
    in.positions.assign(tokens.size(), read_numbers("positions", given));
  }
  if (in.positions.size() != tokens.size())
    fail_argument("positions: lists of ", in.positions.size(), " heads where the keys have ", tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto& p = in.positions[i];
    const auto where = [&](const auto&... what) {
      fail_argument("positions: layer ", static_cast<index_t>(i) / in.shape.kv_heads, ", head ",
                    static_cast<index_t>(i) % in.shape.kv_heads, what...);
    };
    if (std::ssize(p) != tokens[i]) where(" has ", p.size(), " positions of ", tokens[i], " tokens");
    for (std::size_t t = 1; t < p.size(); ++t)
      if (p[t] <= p[t - 1]) where(": entry ", t, " is ", p[t], " after ", p[t - 1], "; positions must ascend");
  }
}

void read_query_positions(const nb::object& given, Inputs& in) {
  if (!in.queries) {
    if (!given.is_none()) fail_argument("query_positions: given without queries");
    return;
  }
  for (index_t l = 0; l < in.shape.layers; ++l) {
    const auto window = static_cast<std::size_t>(in.queries->at(l, 0).rows);
    for (index_t h = 0; h < in.queries->heads; ++h)
      if (std::cmp_not_equal(in.queries->at(l, h).rows, window))
        fail_argument("queries: layer ", l, ", head ", h, " has ", in.queries->at(l, h).rows, " rows where head 0 has ",
                      window);
    if (!given.is_none()) {
      in.query_positions.push_back(read_numbers("query_positions", given));
      if (in.query_positions.back().size() != window)
        fail_argument("query_positions: ", in.query_positions.back().size(), " entries for ", window, " query rows");
      continue;
    }
    // The newest rows, where all heads of the layer hold the same ones.
    const auto& p = in.positions[static_cast<std::size_t>(in.shape.at(l, 0))];
    for (index_t h = 1; h < in.shape.kv_heads; ++h)
      if (in.positions[static_cast<std::size_t>(in.shape.at(l, h))] != p)
        fail_argument("query_positions: the heads of layer ", l,
                      " hold rows at different positions; say where the queries stand");
    if (p.size() < window)
      fail_argument("queries: ", window, " rows for ", p.size(), " tokens in layer ", l,
                    "; at most one a token, or query_positions");
    in.query_positions.emplace_back(p.end() - static_cast<std::ptrdiff_t>(window), p.end());
  }
}

}  // namespace

std::vector<index_t> Inputs::tokens() const {
  std::vector<index_t> out;
  for (const RawRows& r : keys.rows) out.push_back(static_cast<index_t>(r.rows));
  return out;
}

Inputs gather(const InputArguments& given, bool one_layer) {
  InputArguments a = given;
  if (!one_layer && is_view(a.keys)) expand_view(a);
  Inputs in;
  in.keys = read_heads("keys", as_layers(a.keys, one_layer), a.dtype);
  in.shape = {in.keys.layers, in.keys.heads, in.keys.heads, in.keys.rows[0].cols, in.keys.rows[0].cols};
  if (!a.values.is_none()) {
    in.values = read_heads("values", as_layers(a.values, one_layer), a.dtype);
    require_like_keys("values", *in.values, in.keys);
    if (in.values->heads != in.keys.heads)
      fail_argument("values: ", in.values->heads, " heads where the keys have ", in.keys.heads);
    for (std::size_t i = 0; i < in.keys.rows.size(); ++i)
      if (in.values->rows[i].rows != in.keys.rows[i].rows)
        fail_argument("values: layer ", static_cast<index_t>(i) / in.keys.heads, ", head ",
                      static_cast<index_t>(i) % in.keys.heads, " has ", in.values->rows[i].rows,
                      " rows where the keys have ", in.keys.rows[i].rows);
    in.shape.head_dim_v = in.values->rows[0].cols;
  }
  if (!a.queries.is_none()) {
    in.queries = read_heads("queries", as_layers(a.queries, one_layer), a.dtype);
    require_like_keys("queries", *in.queries, in.keys);
    in.shape.q_heads = in.queries->heads;
    if (in.queries->rows[0].cols != in.shape.head_dim_k)
      fail_argument("queries: rows of ", in.queries->rows[0].cols, " elements where the keys have ",
                    in.shape.head_dim_k);
  }
  const auto statistics = [&](const char* name, const nb::object& o) {
    HeadTable t = read_heads(name, o, "");
    if (t.element != Element::f32)
      throw nb::type_error(joined_text(name, ": elements of ", word_of(t.element), "; float32 is required").c_str());
    return t;
  };
  if (!a.q_mean.is_none()) {
    nb::list all;
    if (one_layer) all.append(as_layers(a.q_mean, true));
    else all.append(a.q_mean);
    in.q_mean = statistics("q_mean", all);  // [layers] of [q_heads][dim]: the layers stand where heads stand elsewhere
    if (in.q_mean->heads != in.shape.layers)
      fail_argument("q_mean: ", in.q_mean->heads, " layers where the keys have ", in.shape.layers);
    if (!in.queries) in.shape.q_heads = static_cast<index_t>(in.q_mean->rows[0].rows);
  }
  if (!a.q_cov.is_none()) {
    in.q_cov = statistics("q_cov", as_layers(a.q_cov, one_layer));
    if (in.q_cov->layers != in.shape.layers)
      fail_argument("q_cov: ", in.q_cov->layers, " layers where the keys have ", in.shape.layers);
  }
  check_shape(in.shape);
  if (in.q_mean)
    for (const RawRows& r : in.q_mean->rows)
      if (r.rows != in.shape.q_heads || r.cols != in.shape.head_dim_k)
        fail_argument("q_mean: [", r.rows, "][", r.cols, "] a layer; [", in.shape.q_heads, "][", in.shape.head_dim_k,
                      "] is required");
  if (in.q_cov)
    for (const RawRows& r : in.q_cov->rows)
      if (in.q_cov->heads != in.shape.q_heads || r.rows != in.shape.head_dim_k || r.cols != in.shape.head_dim_k)
        fail_argument("q_cov: [", in.q_cov->heads, "][", r.rows, "][", r.cols, "] a layer; [", in.shape.q_heads, "][",
                      in.shape.head_dim_k, "][", in.shape.head_dim_k, "] is required");
  if (a.softmax_scale) in.softmax_scale = *a.softmax_scale;
  if (a.rope) in.rope = *a.rope;
  if (static_cast<index_t>(2 * in.rope.inv_freq.size()) > in.shape.head_dim_k)
    fail_argument("rope: ", in.rope.inv_freq.size(), " frequencies; at most head_dim / 2 = ", in.shape.head_dim_k / 2);
  if (a.q_stats_first < 0) fail_argument("q_stats_first: ", a.q_stats_first, "; 0 or more is required");
  in.q_stats_first = a.q_stats_first;
  read_positions(a.positions, in, one_layer);
  read_query_positions(a.query_positions, in);
  return in;
}

}  // namespace kvevict::inline KVEVICT_ABI::python
