// error: deleted
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"

float first(const kvevict::RaggedCache<float>& cache) {
#ifdef RIGHT
  const kvevict::PagedCache<float> paged(cache);
  const auto keys = paged.keys(0, 0);
#else
  const auto keys = kvevict::PagedCache<float>(cache).keys(0, 0);
#endif
  return keys.at(0, 0);
}
