// The tool with two more parts. Everything that it can do works with them: compare, score, plan, grids.
//   my_policy compare --policy uniform/value-norm,snapkv --retain 0.15
#include "cli/tool.hpp"
#include "first_heads.hpp"
#include "kvevict/naming/registry.hpp"
#include "value_norm.hpp"

int main(int argc, char** argv) {
  kvevict::Registry registry = kvevict::tool::standard_parts();
  registry.add_scorer<ValueNorm>();
  registry.add_allocator<FirstHeads>();
  return kvevict::tool::run(argc, argv, registry);
}
