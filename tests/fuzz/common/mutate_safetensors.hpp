// Mutations of a safetensors file that leave most of it right, so that they reach what stands behind the header's own
// checks: sizes, types, names, offsets and metadata one at a time, elements of the tensors, and sizes changed wherever
// they occur. Most results get offsets that fit their shapes again.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {

std::string mutate_safetensors(std::string_view input, std::size_t most, Random& random);

}  // namespace kvevict::fuzz
