// What training runs the frozen decoder on: a context whose rows carry masks, and the texts that follow it, and the
// rows at which it is compared with a teacher.
#pragma once
#include <concepts>
#include <span>
#include <vector>

#include "kvevict/core/shape.hpp"
#include "kvevict/model/decoder.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A row of a context's texts where student and teacher are compared.
template <std::floating_point T>
struct ScoredRow {
  index_t row = 0;             // counts the tokens of all branches
  double weight = 1;           // in the loss
  const T* teacher = nullptr;  // [layers][hidden]: the teacher's residual stream after each block
};

// One context, masked, and the texts that follow it. U: type of the cached rows.
template <std::floating_point T, class U>
struct MaskedContext {
  index_t tokens = 0;                          // rows of each head; the texts begin at this position
  const U *keys = nullptr, *values = nullptr;  // [layers][kv_heads][tokens][head_dim], keys after RoPE; dense: not read
  std::span<const index_t> dense;              // [tokens]: the context itself, where its queries see the mask too
  Branches branches;                           // texts, each alone behind the context
  const T* mask = nullptr;                     // [layers][kv_heads][tokens]; null: all ones
  T* grad_mask = nullptr;                      // the same shape, added to; null: not wanted
  std::vector<ScoredRow<T>> scored;
};

}  // namespace kvevict::inline KVEVICT_ABI
