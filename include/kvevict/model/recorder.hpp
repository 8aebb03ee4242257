// Records a model run as a dump (`kvevict-dump`): keys, values and queries of a prompt and of what follows it, with
// every optional tensor on request. A dump is written whole or not at all.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/dump_info.hpp"
#include "kvevict/io/dump_writer.hpp"
#include "kvevict/model/capture.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/observe/observation.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct RecordOptions {
  index_t prompt_len = 0;       // tokens that a policy may see; the rest is the continuation, for measuring
  index_t window = 64;          // newest prompt queries to record; all continuation queries are recorded
  bool all_queries = false;     // every prompt query
  std::vector<index_t> layers;  // ascending; empty: all
  bool attention_sums = false, query_statistics = false, output_projection = false;
  index_t statistics_first = 4;  // query statistics leave out the tokens before
  std::string model, description;
};

namespace detail {

template <CacheElement T>
void append_as(std::vector<T>& out, const float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out.push_back(from_float<T>(values[i]));
}
template <CacheElement T, class Row>
void append_rows(std::vector<T>& out, const Rows<Row>& rows) {
  for (std::int64_t r = 0; r < rows.rows; ++r) append_as(out, rows.row(r), rows.cols);
}

// Queries of the continuation, [layer][q_head][row][dim] once the pass is over.
struct ContinuationQueries {
  index_t q_heads, dim;
  std::vector<std::vector<std::vector<float>>> rows;  // [layer][q_head]

  void queries(index_t layer, index_t, Matrix<const float> q, const float*) {
    for (index_t r = 0; r < q.rows; ++r)
      for (index_t h = 0; h < q_heads; ++h) {
        auto& out = rows[static_cast<std::size_t>(layer)][static_cast<std::size_t>(h)];
        const float* x = q.row(r) + h * dim;
        out.insert(out.end(), x, x + dim);
      }
  }
};

inline void check_recording(const Decoder& decoder, std::size_t tokens, const RecordOptions& o) {
  if (o.prompt_len < 1 || static_cast<std::size_t>(o.prompt_len) > tokens)
    fail_argument("record: prompt_len ", o.prompt_len, "; 1 to ", tokens, ", the number of tokens, is legal");
  if (o.window < 1) fail_argument("record: window of ", o.window, " queries; at least 1 is required");
  if (o.query_statistics && (o.statistics_first < 0 || o.statistics_first >= o.prompt_len))
    fail_argument("record: query statistics from token ", o.statistics_first, " on; the prompt has ", o.prompt_len);
  for (std::size_t i = 0; i < o.layers.size(); ++i)
    if (o.layers[i] < 0 || o.layers[i] >= decoder.config().layers || (i > 0 && o.layers[i] <= o.layers[i - 1]))
      fail_argument("record: layer ", o.layers[i], "; ascending numbers from 0 to ", decoder.config().layers - 1,
                    " are required");
}

}  // namespace detail

// Throws std::invalid_argument for options that do not fit, and as Decoder::feed does. Peak memory is the full cache
// and the dump.
template <CacheElement T = fp16_t>
void record(const host_exec& exec, const Decoder& decoder, std::span<const index_t> tokens,
            const RecordOptions& options, const std::filesystem::path& path) {
  detail::check_recording(decoder, tokens.size(), options);
  const CacheShape shape = decoder.cache_shape();
  const ModelConfig& config = decoder.config();
  std::vector<index_t> chosen = options.layers;
  if (chosen.empty())
    for (index_t l = 0; l < shape.layers; ++l) chosen.push_back(l);
  std::vector<DumpLayer<T>> layers(chosen.size());
  const auto place_of = [&](index_t layer) {
    const auto found = std::lower_bound(chosen.begin(), chosen.end(), layer);
    return found != chosen.end() && *found == layer ? &layers[static_cast<std::size_t>(found - chosen.begin())]
                                                    : nullptr;
  };

  CaptureOptions capture;
  capture.window = options.all_queries ? options.prompt_len : std::min(options.window, options.prompt_len);
  capture.statistics = options.query_statistics;
  capture.statistics_first = options.statistics_first;
  capture.column_sums = options.attention_sums;
  capture.output_projection = options.output_projection;
  RaggedCache<float> cache(shape);
  ForwardState state;
  std::vector<std::vector<float>> prompt_queries(chosen.size());  // [layer] of [q_head][window][dim]
  decoder.feed(exec, tokens.first(static_cast<std::size_t>(options.prompt_len)), cache, state,
               LayerCapture(exec, decoder, cache, options.prompt_len, capture, [&](const LayerObservation<float>& o) {
                 DumpLayer<T>* out = place_of(o.layer);
                 if (!out) return;
                 auto& queries = prompt_queries[static_cast<std::size_t>(out - layers.data())];
                 for (const auto& q : o.window_queries) detail::append_rows(queries, q);
                 for (const auto& rows : o.extras.attn_sum) detail::append_rows(out->attn_sum, rows);
                 for (const auto& rows : o.extras.q_mean) detail::append_rows(out->q_mean, rows);
                 for (const auto& rows : o.extras.q_cov) detail::append_rows(out->q_cov, rows);
                 if (o.extras.o_proj.data) detail::append_rows(out->o_proj, o.extras.o_proj);
               }));

  const auto rest = tokens.subspan(static_cast<std::size_t>(options.prompt_len));
  detail::ContinuationQueries after{shape.q_heads, shape.head_dim_k, {}};
  after.rows.assign(static_cast<std::size_t>(shape.layers),
                    std::vector<std::vector<float>>(static_cast<std::size_t>(shape.q_heads)));
  if (!rest.empty()) decoder.feed(exec, rest, cache, state, after);

  for (std::size_t i = 0; i < chosen.size(); ++i) {
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      detail::append_rows(layers[i].k, cache.keys(chosen[i], h));
      detail::append_rows(layers[i].v, cache.values(chosen[i], h));
    }
    const std::int64_t per_head = std::int64_t{capture.window} * shape.head_dim_k;
    for (index_t h = 0; h < shape.q_heads; ++h) {
      detail::append_as(layers[i].q, prompt_queries[i].data() + h * per_head, per_head);
      const auto& more = after.rows[static_cast<std::size_t>(chosen[i])][static_cast<std::size_t>(h)];
      detail::append_as(layers[i].q, more.data(), std::ssize(more));
    }
  }

  DumpInfo info;
  info.model = options.model.empty() ? config.model_type : options.model;
  info.description = options.description;
  info.shape = shape;
  info.shape.layers = static_cast<index_t>(chosen.size());
  info.prompt_len = options.prompt_len;
  info.softmax_scale = config.softmax_scale();
  info.rope_style = config.rope_style;
  info.rope_theta = config.rope_theta;
  if (config.rope_scaled) info.rope_inv_freq = config.inv_freq;
  info.q_stats_first = options.query_statistics ? options.statistics_first : 0;
  info.layers = options.layers;
  info.token_ids.assign(tokens.begin(), tokens.end());
  for (index_t p = 0; p < static_cast<index_t>(tokens.size()); ++p) {
    info.positions.push_back(p);
    if (p >= options.prompt_len - capture.window) info.q_positions.push_back(p);
  }
  write_dump(path, info, layers);
}

}  // namespace kvevict::inline KVEVICT_ABI
