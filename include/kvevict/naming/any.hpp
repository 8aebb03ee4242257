// Parts whose type is chosen at run time. Erased per part, never per pair: a tool works with
// Policy<AnyAllocator, AnyScorer, TopK>, and AnyScorer has one virtual call per element type.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/policy/planner.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

class AnyScorer {
 public:
  template <class S>
  requires(!std::same_as<S, AnyScorer> && TokenScorer<S, float> && TokenScorer<S, fp16_t> &&
           TokenScorer<S, bf16_t>) explicit AnyScorer(S scorer)
      : needs(needs_of(scorer)),
        heads_comparable(kvevict::heads_comparable(scorer)),
        self_(std::make_shared<const Model<S>>(std::move(scorer))) {}

  Needs needs;
  bool heads_comparable;

  index_t window_rows() const { return self_->window_rows(); }
  Protect protection() const { return self_->protection(); }
  index_t score_heads(const CacheShape& shape) const { return self_->score_heads(shape); }
  std::string specification() const { return self_->specification(); }
  template <CacheElement T>
  friend void score_on(const host_exec& exec, const AnyScorer& scorer, const LayerObservation<T>& o,
                       Matrix<float> out) {
    scorer.self_->score(exec, o, out);
  }

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual index_t window_rows() const = 0;
    virtual Protect protection() const = 0;
    virtual index_t score_heads(const CacheShape& shape) const = 0;
    virtual std::string specification() const = 0;
    virtual void score(const host_exec&, const LayerObservation<float>&, Matrix<float>) const = 0;
    virtual void score(const host_exec&, const LayerObservation<fp16_t>&, Matrix<float>) const = 0;
    virtual void score(const host_exec&, const LayerObservation<bf16_t>&, Matrix<float>) const = 0;
  };
  template <class S>
  struct Model final : Interface {
    explicit Model(S s) : scorer(std::move(s)) {}
    index_t window_rows() const override { return scorer.window_rows(); }
    Protect protection() const override { return scorer.protection(); }
    index_t score_heads(const CacheShape& shape) const override { return kvevict::score_heads(scorer, shape); }
    std::string specification() const override { return kvevict::specification(scorer); }
    void score(const host_exec& e, const LayerObservation<float>& o, Matrix<float> m) const override {
      score_on(e, scorer, o, m);
    }
    void score(const host_exec& e, const LayerObservation<fp16_t>& o, Matrix<float> m) const override {
      score_on(e, scorer, o, m);
    }
    void score(const host_exec& e, const LayerObservation<bf16_t>& o, Matrix<float> m) const override {
      score_on(e, scorer, o, m);
    }
    S scorer;
  };

  std::shared_ptr<const Interface> self_;
};

// Offers the calls of all three kinds; kind() says which of them work. The others throw std::logic_error.
class AnyAllocator {
 public:
  // The order of the constraints matters: a copy must not ask whether it is an allocator.
  template <class A>
  requires(!std::same_as<A, AnyAllocator> && Allocator<A>) explicit AnyAllocator(A allocator)
      : minimum_rows(allocator.minimum_rows), self_(std::make_shared<const Model<A>>(std::move(allocator))) {}

  index_t minimum_rows;

  AllocatorKind kind() const { return self_->kind(); }
  std::string specification() const { return self_->specification(); }
  void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                Matrix<index_t> out, Audit& audit) const {
    self_->allocate(shape, tokens, budget, out, audit);
  }
  void layer_totals(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                    std::span<std::int64_t> totals, Audit& audit) const {
    self_->layer_totals(shape, tokens, budget, totals, audit);
  }
  ScoreSplit split_layer(const SharingHeads& heads, std::int64_t total) const {
    return self_->split_layer(heads, total);
  }
  bool counts_by_rule() const { return self_->counts_by_rule(); }
  void apply_rule(const SharingHeads& heads, std::int64_t total, std::span<index_t> rows, Audit& audit) const {
    self_->apply_rule(heads, total, rows, audit);
  }
  ScoreSplit split_all(const SharingHeads& heads, std::int64_t total) const { return self_->split_all(heads, total); }

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual AllocatorKind kind() const = 0;
    virtual std::string specification() const = 0;
    virtual void allocate(const CacheShape&, std::span<const index_t>, const GrantedBudget&, Matrix<index_t>,
                          Audit&) const = 0;
    virtual void layer_totals(const CacheShape&, std::span<const index_t>, const GrantedBudget&,
                              std::span<std::int64_t>, Audit&) const = 0;
    virtual ScoreSplit split_layer(const SharingHeads&, std::int64_t) const = 0;
    virtual bool counts_by_rule() const = 0;
    virtual void apply_rule(const SharingHeads&, std::int64_t, std::span<index_t>, Audit&) const = 0;
    virtual ScoreSplit split_all(const SharingHeads&, std::int64_t) const = 0;
  };
  template <class A>
  struct Model final : Interface {
    explicit Model(A a) : allocator(std::move(a)) {}
    AllocatorKind kind() const override { return kind_of(allocator); }
    std::string specification() const override { return kvevict::specification(allocator); }
    void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                  Matrix<index_t> out, Audit& audit) const override {
      if constexpr (StaticAllocator<A>) allocator.allocate(shape, tokens, budget, out, audit);
      else not_of_this_kind();
    }
    void layer_totals(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                      std::span<std::int64_t> totals, Audit& audit) const override {
      if constexpr (LayerAllocator<A>) allocator.layer_totals(shape, tokens, budget, totals, audit);
      else not_of_this_kind();
    }
    ScoreSplit split_layer(const SharingHeads& heads, std::int64_t total) const override {
      if constexpr (LayerAllocator<A>) return allocator.split_layer(heads, total);
      else not_of_this_kind();
    }
    bool counts_by_rule() const override { return kvevict::counts_by_rule(allocator); }
    void apply_rule(const SharingHeads& heads, std::int64_t total, std::span<index_t> rows,
                    Audit& audit) const override {
      if constexpr (requires { allocator.apply_rule(heads, total, rows, audit); })
        allocator.apply_rule(heads, total, rows, audit);
      else not_of_this_kind();
    }
    ScoreSplit split_all(const SharingHeads& heads, std::int64_t total) const override {
      if constexpr (GlobalAllocator<A>) return allocator.split_all(heads, total);
      else not_of_this_kind();
    }
    [[noreturn]] void not_of_this_kind() const {
      throw std::logic_error(
          joined_text(kvevict::specification(allocator), ": an allocator of another kind was called for"));
    }
    A allocator;
  };

  std::shared_ptr<const Interface> self_;
};

using AnyPolicy = Policy<AnyAllocator, AnyScorer, TopK>;

}  // namespace kvevict::inline KVEVICT_ABI
