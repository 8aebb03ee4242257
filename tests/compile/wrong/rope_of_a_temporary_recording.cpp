// error: deleted
#include "kvevict/io/dump.hpp"

float first() {
#ifdef RIGHT
  const kvevict::Dump<float> dump("recording");
  const auto rope = dump.info().rope();
#else
  const auto rope = kvevict::Dump<float>("recording").info().rope();
#endif
  return rope.inv_freq[0];
}
