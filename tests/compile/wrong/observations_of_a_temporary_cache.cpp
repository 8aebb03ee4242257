// error: deleted
#include "kvevict/cache/ragged.hpp"
#include "kvevict/observe/observations.hpp"

// A cache that ends with the statement takes the rows with it.
auto look(const kvevict::RaggedCache<float>& cache) {
#ifdef RIGHT
  return kvevict::observe_all(cache, 1.f);
#else
  return kvevict::observe_all(kvevict::RaggedCache<float>(cache), 1.f);
#endif
}
