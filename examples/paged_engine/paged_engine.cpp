// An engine evicts from its own paged pool: during prefill, layer by layer, for a batch of requests, and while
// decoding, with a prefix that stays untouched. pool.hpp is what the engine had before; docs/engines.md explains every
// step. The program checks its own result and exits with 1 where anything is wrong.
#include <algorithm>
#include <cstdio>
#include <span>
#include <vector>

#include "kvevict/cache/compact_rows.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan_options.hpp"
#include "kvevict/policy/snapkv.hpp"
#include "pool.hpp"

using namespace kvevict;
using engine::Element, engine::Pool, engine::Request, engine::RequestLayer;

// ---- step 1: show the rows ----

// One request as a KVCacheView: no copy, only addresses.
struct RequestView {
  using element_type = Element;
  using memory_space = host_space;
  const Pool* pool;
  const Request* request;

  CacheShape shape() const {
    const auto& m = pool->model;
    return {.layers = m.layers, .kv_heads = m.kv_heads, .q_heads = m.q_heads, .head_dim_k = m.dim, .head_dim_v = m.dim};
  }
  index_t tokens(index_t layer, index_t head) const { return static_cast<index_t>(positions(layer, head).size()); }
  Rows<const Element> keys(index_t layer, index_t head) const { return rows(pool->keys.data(), layer, head); }
  Rows<const Element> values(index_t layer, index_t head) const { return rows(pool->values.data(), layer, head); }
  std::span<const index_t> positions(index_t layer, index_t head) const { return at(layer).positions[to_size(head)]; }

  // The rows of one head behind the layer's block table, of keys or values; const or not, as `pool_data` is.
  template <class T>
  Rows<T> rows(T* pool_data, index_t layer, index_t head) const {
    return {.data = pool_data + head * pool->head_stride(),
            .rows = tokens(layer, head),
            .cols = pool->model.dim,
            .row_stride = pool->model.dim,
            .blocks = at(layer).blocks.data(),
            .block_rows = pool->block_rows,
            .block_stride = pool->block_stride()};
  }

 private:
  static std::size_t to_size(index_t i) { return static_cast<std::size_t>(i); }
  const RequestLayer& at(index_t layer) const { return request->layers[to_size(layer)]; }
};
static_assert(KVCacheView<RequestView>);

// ---- step 2: say what a scorer may look at ----

// What the view cannot know: the scale of the logits, and the newest queries with their positions. The result points
// into the request and owns the small arrays in between.
OwnedObservation<Element> observe(const Pool& pool, const Request& request, index_t layer) {
  auto out = observe_layer(RequestView{&pool, &request}, layer, 0.25f);  // 1 / sqrt(dim)
  const auto count = static_cast<std::int64_t>(request.query_positions.size());
  const Element* queries = request.queries[static_cast<std::size_t>(layer)].data();
  for (index_t h = 0; h < pool.model.q_heads; ++h)
    out.window_queries.push_back(dense_rows(queries + h * count * pool.model.dim, count, pool.model.dim));
  out.window_positions = request.query_positions;
  return out;
}

// ---- step 3: carry a plan out in the pool ----

// Moves the kept rows of every head to the front of its blocks and gives blocks back that no head reaches any more.
void compact(Pool& pool, Request& request, index_t layer, const LayerPlan& plan) {
  const RequestView view{&pool, &request};
  RequestLayer& rows = request.layers[static_cast<std::size_t>(layer)];
  std::size_t longest = 0;
  for (index_t h = 0; h < pool.model.kv_heads; ++h) {
    const std::span<const index_t> keep = plan.keep.head(h);  // ascending row numbers, not positions
    compact_rows(view.rows(pool.keys.data(), layer, h), keep);
    compact_rows(view.rows(pool.values.data(), layer, h), keep);
    auto& positions = rows.positions[static_cast<std::size_t>(h)];
    for (std::size_t i = 0; i < keep.size(); ++i) positions[i] = positions[static_cast<std::size_t>(keep[i])];
    positions.resize(keep.size());
    longest = std::max(longest, keep.size());
  }
  const auto block_rows = static_cast<std::size_t>(pool.block_rows);
  while (rows.blocks.size() > (longest + block_rows - 1) / block_rows) {
    pool.free_blocks.push_back(rows.blocks.back());
    rows.blocks.pop_back();
  }
}

// ---- step 4: prefill, layer by layer ----

// Reads `tokens` tokens into an empty request. A layer is planned after its attention; no layer is full when the next
// one begins.
template <class P>
EvictionPlan prefill(const host_exec& exec, Pool& pool, Request& request, index_t tokens, const P& policy,
                     const Budget& budget, const PlanOptions& options) {
  const CacheShape shape = RequestView{&pool, &request}.shape();
  const std::vector<index_t> rows(static_cast<std::size_t>(shape.heads_total()), tokens);  // of every (layer, head)
  auto planner = policy.make_planner(shape, rows, budget, options);
  for (index_t l = 0; l < shape.layers; ++l) {
    run_layer(pool, request, l, 0, tokens, policy.scorer.window);
    const auto observed = observe(pool, request, l);
    const LayerPlan plan = planner.layer(exec, observed.observation());
    compact(pool, request, l, plan);
  }
  request.next_position = tokens;
  return planner.finish(exec);  // what happened, as data: rows, budget, notes
}

// ---- step 5: evict again while decoding ----

// The same loop over rows that are there already. `options` says what must not be touched.
template <class P>
EvictionPlan evict_again(const host_exec& exec, Pool& pool, Request& request, const P& policy, const Budget& budget,
                         const PlanOptions& options) {
  const RequestView view{&pool, &request};
  const CacheShape shape = view.shape();
  std::vector<index_t> rows;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) rows.push_back(view.tokens(l, h));
  auto planner = policy.make_planner(shape, rows, budget, options);
  for (index_t l = 0; l < shape.layers; ++l) {
    const auto observed = observe(pool, request, l);
    compact(pool, request, l, planner.layer(exec, observed.observation()));
  }
  return planner.finish(exec);
}

template <class P>
void decode(const host_exec& exec, Pool& pool, Request& request, index_t steps, index_t interval, const P& policy,
            const Budget& budget, const PlanOptions& options) {
  for (index_t step = 1; step <= steps; ++step) {
    for (index_t l = 0; l < pool.model.layers; ++l)
      run_layer(pool, request, l, request.next_position, 1, policy.scorer.window);
    ++request.next_position;  // the token's position; it does not depend on how many rows are left
    if (step % interval == 0) evict_again(exec, pool, request, policy, budget, options);
  }
}

// ---- step 6: the same rows on every tensor-parallel rank ----

// Each rank sees some of the query heads. It scores what it sees, the engine adds the scores of all ranks up, and every
// rank plans from the sum: equal scores give equal plans, bit for bit. Here the ranks take turns.
template <class P>
std::vector<std::vector<index_t>> plan_on_ranks(const host_exec& exec, const Pool& pool, const Request& request,
                                                index_t layer, int ranks, const P& policy, const Budget& budget) {
  const auto whole = observe(pool, request, layer);
  const index_t tokens = whole.observation().most_tokens(), heads = whole.shape.kv_heads;
  std::vector<float> sum(static_cast<std::size_t>(heads * tokens)), part = sum;
  for (int rank = 0; rank < ranks; ++rank) {
    auto mine = whole;
    mine.shape.q_heads = heads;  // one query head of each group
    mine.window_queries.clear();
    for (index_t h = 0; h < heads; ++h)
      mine.window_queries.push_back(whole.window_queries[static_cast<std::size_t>(h * ranks + rank)]);
    score_on(exec, policy.scorer, mine.observation(), Matrix<float>{part.data(), heads, tokens, tokens});
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];  // the engine's all-reduce
  }
  std::vector<std::vector<index_t>> kept;
  CacheShape shape = whole.shape;
  shape.layers = 1;
  for (int rank = 0; rank < ranks; ++rank) {
    auto planner = policy.make_planner(shape, std::vector<index_t>(static_cast<std::size_t>(heads), tokens), budget);
    const LayerPlan plan = planner.layer(exec, Matrix<const float>{sum.data(), heads, tokens, tokens});
    kept.emplace_back(plan.keep.rows.begin(), plan.keep.rows.end());
  }
  return kept;
}

// ---- the checks of this example ----

int failures = 0;
void check(bool right, const char* what) {
  if (!right) std::printf("wrong: %s\n", what), ++failures;
}

// Every row holds the value of its position: nothing was mixed up when rows moved.
void check_rows(const Pool& pool, const Request& request) {
  const RequestView view{&pool, &request};
  for (index_t l = 0; l < view.shape().layers; ++l)
    for (index_t h = 0; h < view.shape().kv_heads; ++h)
      for (index_t r = 0; r < view.tokens(l, h); ++r) {
        const index_t p = view.positions(l, h)[static_cast<std::size_t>(r)];
        const Element value = from_float<Element>(engine::number(request, l, 1, h, p, 0));
        check(view.values(l, h).at(r, 0).bits == value.bits, "a row keeps its value and its position");
      }
}

// True where every head of every layer holds each of these positions.
bool holds(const Pool& pool, const Request& request, const std::vector<index_t>& wanted) {
  const RequestView view{&pool, &request};
  for (index_t l = 0; l < view.shape().layers; ++l)
    for (index_t h = 0; h < view.shape().kv_heads; ++h) {
      const auto positions = view.positions(l, h);
      if (!std::includes(positions.begin(), positions.end(), wanted.begin(), wanted.end())) return false;
    }
  return true;
}

int main() {
  const host_exec exec{.threads = 1};
  // 160 tokens in blocks of 8 are 20 blocks a layer. With a quarter kept, prefill needs one full layer and 5 blocks for
  // each of the other two; two requests at once, of which one is compacted already: 15 + 20 + 5 + 5.
  Pool pool(engine::ModelShape{}, 8, 45);
  SnapKV policy;
  policy.scorer.window = 16;
  const std::vector<index_t> looked_at{37, 74, 111};  // pool.hpp: what later queries look at

  // A batch is several requests with a planner each; the policy is shared.
  std::vector<Request> batch;
  for (int i = 0; i < 2; ++i) {
    batch.push_back(engine::new_request(pool, i));
    const EvictionPlan plan = prefill(exec, pool, batch.back(), 160, policy, Budget::retain(0.25), {});
    check(plan.rows_kept() == 3 * 2 * 40, "a quarter of 160 rows stays in every head");
  }
  for (const Request& request : batch) {
    check_rows(pool, request);
    check(holds(pool, request, looked_at), "tokens that the window looks at stay");
    for (const auto& layer : request.layers) check(layer.blocks.size() == 5, "40 rows take 5 blocks of 8");
  }
  check(pool.free_blocks.size() == 45 - 2 * 15, "the other blocks are free again");

  // Decoding: 24 rows of every head besides the first 16, which belong to a prefix that others use; the newest 4 stay.
  Request& request = batch[0];
  const std::vector<int> prefix_blocks(request.layers[1].blocks.begin(), request.layers[1].blocks.begin() + 2);
  const RequestView view{&pool, &request};
  const auto first_rows = view.positions(1, 0).first(16);
  const std::vector<index_t> prefix(first_rows.begin(), first_rows.end());
  decode(exec, pool, request, 24, 8, policy, Budget::rows(24), {.first = 16, .align = pool.block_rows, .recent = 4});
  check(request.next_position == 184 && view.tokens(0, 0) == 40, "184 tokens were read, 16 + 24 rows are left");
  check(std::equal(prefix.begin(), prefix.end(), view.positions(1, 0).begin()), "rows of the prefix are untouched");
  check(std::equal(prefix_blocks.begin(), prefix_blocks.end(), request.layers[1].blocks.begin()),
        "and so are its blocks");
  check(holds(pool, request, {180, 181, 182, 183}), "the newest rows stay");
  check_rows(pool, request);

  // Two ranks plan the same rows.
  const auto ranks = plan_on_ranks(exec, pool, batch[1], 0, 2, policy, Budget::rows(20));
  check(ranks[0] == ranks[1] && ranks[0].size() == 2 * 20, "every rank keeps the same rows");

  std::printf("%d layers of %d heads: %d tokens read, %d rows left, %zu of 45 blocks free\n", pool.model.layers,
              pool.model.kv_heads, request.next_position, view.tokens(0, 0), pool.free_blocks.size());
  return failures == 0 ? 0 : 1;
}
