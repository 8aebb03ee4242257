// error: deleted
#include "kvevict/plan/plan.hpp"

kvevict::EvictionPlan make();

kvevict::index_t sum() {
  kvevict::index_t out = 0;
#ifdef RIGHT
  const auto plan = make();
  for (const auto row : plan.head(0, 0)) out += row;
#else
  for (const auto row : make().head(0, 0)) out += row;
#endif
  return out;
}
