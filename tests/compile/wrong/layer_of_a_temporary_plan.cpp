// error: deleted
#include "kvevict/plan/plan.hpp"

kvevict::EvictionPlan make();

std::size_t kept() {
#ifdef RIGHT
  const auto plan = make();
  const auto layer = plan.layer(0);
#else
  const auto layer = make().layer(0);
#endif
  return layer.keep.rows.size();
}
