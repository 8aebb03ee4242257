// What is wrong with a recording for a policy: an input that it lacks, with the command that would record it, or a
// value that is no number.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/io/dump.hpp"
#include "kvevict/metrics/finite.hpp"
#include "kvevict/naming/any.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::tool {

// "; `kvevict record ...` records it", or an empty text where the recording holds everything that the scorer asks for.
// future: the continuation's queries are wanted too.
template <CacheElement T>
std::string how_to_record(const Dump<T>& dump, Needs needs, index_t window, bool future = false) {
  const auto& cache = dump.cache();
  const bool queries = window_rows_used(window, cache.prompt_len()) <= std::ssize(cache.prompt_query_positions());
  std::string flags;
  const auto wants = [&](Needs one, const char* extra, const std::string& flag) {
    if (includes_need(needs, one) && !dump.extra(0, extra)) flags += ' ' + flag;
  };
  if (includes_need(needs, Needs::window_queries) && !queries) flags += " --window " + std::to_string(window);
  wants(Needs::attn_sum, "attn_sum", "--attention-sums");
  wants(Needs::q_stats, "q_cov", "--query-statistics");
  wants(Needs::o_proj, "o_proj", "--output-projection");
  const bool continuation = (future || includes_need(needs, Needs::future_queries)) && cache.continuation_len() == 0;
  if (flags.empty() && !continuation) return "";
  const auto& info = dump.info();
  const index_t prompt =
      continuation ? std::max(1, info.prompt_len - std::max(1, info.prompt_len / 8)) : info.prompt_len;
  return "; `kvevict record --model MODEL --tokens " + dump.name() + " --prompt-len " + std::to_string(prompt) + flags +
         " --out NEW.safetensors` records it";
}

// Throws std::domain_error for the first value of the prompt in one layer that is no finite number.
template <CacheElement T>
void check_finite_prompt(const Dump<T>& dump, index_t layer) {
  std::vector<Rows<const T>> queries;
  for (index_t h = 0; h < dump.info().shape.q_heads; ++h) queries.push_back(dump.cache().prompt_queries(layer, h));
  check_finite(dump.cache(), layer, AttentionQueries<T>{queries, {}}, LocalRows<T>{});
}

// body(); what it complains of is said with the name of the recording in front and the command that would help behind.
// Scores that are no numbers are laid to the value they come from, where there is one.
template <CacheElement T, class Body>
auto naming_file(const Dump<T>& dump, const AnyScorer& scorer, Body&& body) {
  try {
    return body();
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(dump.name() + ": " + e.what() +
                                how_to_record(dump, scorer.needs, scorer.window_rows()));
  } catch (const std::domain_error& e) {
    try {
      for (index_t l = 0; l < dump.info().shape.layers; ++l) check_finite_prompt(dump, l);
    } catch (const std::domain_error& value) {
      throw std::domain_error(dump.name() + ": " + scorer.specification() + ": " + value.what());
    }
    throw std::domain_error(dump.name() + ": " + e.what());
  }
}

}  // namespace kvevict::tool
