// error: constraint
#include "kvevict/cache/ragged.hpp"

// Caches hold float, fp16_t or bf16_t.
#ifdef RIGHT
using Cache = kvevict::RaggedCache<float>;
#else
using Cache = kvevict::RaggedCache<double>;
#endif
Cache* cache = nullptr;
