// Digests of results, and the lines that the tools print.
#pragma once
#include <bit>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pin/api.hpp"

namespace pin {

// FNV-1a over 64-bit words.
class Digest {
 public:
  void add(std::uint64_t word) { hash_ = (hash_ ^ word) * 0x100000001b3u; }
  void add(float x) { add(std::uint64_t{std::bit_cast<std::uint32_t>(x)}); }
  void add(const std::string& s) {
    for (const char c : s) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
    add(std::uint64_t{s.size()});
  }
  template <class N>
  void add_all(std::span<const N> values) {
    for (const N x : values) {
      if constexpr (std::is_same_v<N, float>) add(x);
      else add(static_cast<std::uint64_t>(x));
    }
    add(std::uint64_t{values.size()});
  }
  std::string text() const {
    char out[17];
    std::snprintf(out, sizeof out, "%016llx", static_cast<unsigned long long>(hash_ ^ (hash_ >> 29)));
    return out;
  }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

// Messages may be reworded; the kind of an error is what callers tell apart.
template <class F>
std::string outcome(F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument&) {
    return "error=invalid_argument";
  } catch (const std::domain_error&) {
    return "error=domain_error";
  } catch (const std::logic_error&) {
    return "error=logic_error";
  } catch (const kvevict::format_error&) {
    return "error=format_error";
  } catch (const std::runtime_error&) {
    return "error=runtime_error";
  } catch (const std::bad_alloc&) {
    return "error=bad_alloc";
  } catch (const std::exception&) {
    return "error=exception";
  }
}

inline std::string describe(const Kept& kept) {
  Digest heads, rows;
  heads.add_all(std::span<const std::int64_t>(kept.offsets));
  rows.add_all(std::span<const index_t>(kept.rows));
  return "granted=" + std::to_string(kept.granted) + " kept=" + std::to_string(kept.rows.size()) +
         " heads=" + heads.text() + " rows=" + rows.text();
}

// Prints a line per case, or folds cases into one digest per group.
class Report {
 public:
  explicit Report(bool fold) : fold_(fold) {}

  // group: what stays of the name when lines are folded.
  void line(const std::string& group, const std::string& detail, const std::string& result) {
    if (!fold_) {
      std::printf("%s%s%s : %s\n", group.c_str(), detail.empty() ? "" : " ", detail.c_str(), result.c_str());
      return;
    }
    Digest& d = folded_[group];
    d.add(detail);
    d.add(result);
  }
  std::map<std::string, std::string> folded() const {
    std::map<std::string, std::string> out;
    for (const auto& [name, digest] : folded_) out[name] = digest.text().substr(8);
    return out;
  }

 private:
  bool fold_;
  std::map<std::string, Digest> folded_;
};

}  // namespace pin
