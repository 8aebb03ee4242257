// error: deleted
#include "kvevict/io/dump.hpp"

float first() {
#ifdef RIGHT
  const kvevict::Dump<float> dump("recording");
  const auto keys = dump.cache().keys(0, 0);
#else
  const auto keys = kvevict::Dump<float>("recording").cache().keys(0, 0);
#endif
  return keys.at(0, 0);
}
