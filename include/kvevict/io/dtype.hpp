// Element types of tensors in files, with their names and sizes in the safetensors format.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "kvevict/core/half.hpp"

namespace kvevict::inline KVEVICT_ABI {

enum class DType { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean, f8_e4m3, f8_e5m2, f8_e8m0, c64 };

namespace detail {
struct DTypeEntry {
  DType dtype;
  std::string_view name;
  std::size_t bytes;
};
inline constexpr std::array dtype_table{
    DTypeEntry{DType::f64, "F64", 8},         DTypeEntry{DType::f32, "F32", 4},
    DTypeEntry{DType::f16, "F16", 2},         DTypeEntry{DType::bf16, "BF16", 2},
    DTypeEntry{DType::i64, "I64", 8},         DTypeEntry{DType::i32, "I32", 4},
    DTypeEntry{DType::i16, "I16", 2},         DTypeEntry{DType::i8, "I8", 1},
    DTypeEntry{DType::u64, "U64", 8},         DTypeEntry{DType::u32, "U32", 4},
    DTypeEntry{DType::u16, "U16", 2},         DTypeEntry{DType::u8, "U8", 1},
    DTypeEntry{DType::boolean, "BOOL", 1},    DTypeEntry{DType::f8_e4m3, "F8_E4M3", 1},
    DTypeEntry{DType::f8_e5m2, "F8_E5M2", 1}, DTypeEntry{DType::f8_e8m0, "F8_E8M0", 1},
    DTypeEntry{DType::c64, "C64", 8},
};
}  // namespace detail

// "F32", "BF16", ...: as file headers spell it.
constexpr std::string_view dtype_name(DType d) noexcept {
  return detail::dtype_table[static_cast<std::size_t>(d)].name;
}
constexpr std::size_t dtype_bytes(DType d) noexcept { return detail::dtype_table[static_cast<std::size_t>(d)].bytes; }
// The type with this name in file headers, or nothing.
constexpr std::optional<DType> dtype_named(std::string_view name) noexcept {
  for (const auto& entry : detail::dtype_table)
    if (entry.name == name) return entry.dtype;
  return std::nullopt;
}

// The element type that a C++ type stands for in a file.
template <class T>
constexpr DType dtype_of() noexcept {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, fp16_t>) {
    return DType::f16;
  } else if constexpr (std::is_same_v<U, bf16_t>) {
    return DType::bf16;
  } else if constexpr (std::is_floating_point_v<U>) {
    static_assert(sizeof(U) == 4 || sizeof(U) == 8);
    return sizeof(U) == 4 ? DType::f32 : DType::f64;
  } else {
    static_assert(std::is_integral_v<U>, "this type has no counterpart in a file");
    if (std::is_same_v<U, bool>) return DType::boolean;
    const bool sign = std::is_signed_v<U>;
    switch (sizeof(U)) {
      case 1:
        return sign ? DType::i8 : DType::u8;
      case 2:
        return sign ? DType::i16 : DType::u16;
      case 4:
        return sign ? DType::i32 : DType::u32;
      default:
        return sign ? DType::i64 : DType::u64;
    }
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
