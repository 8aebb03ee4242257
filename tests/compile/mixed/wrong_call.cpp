// Declares what another object defines with other settings: must not link.
#include "kvevict/plan/plan.hpp"

std::int64_t rows_of_plan(const kvevict::EvictionPlan& plan);
#ifdef DEFINE
std::int64_t rows_of_plan(const kvevict::EvictionPlan& plan) { return plan.rows_kept(); }
#else
int main() { return static_cast<int>(rows_of_plan({})); }
#endif
