// A thread block on the host: every CUDA thread is a fibre that runs until it meets a barrier or a warp operation, so
// kernel bodies (templates over a Cta) run as they are, with real barriers. The order in which fibres run is a
// parameter: a missing barrier changes results between orders. Shared memory is allocated to its exact size and filled
// with garbage, so that sanitizers and wrong results find what lies outside or was never written.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/cuda/detail/cta.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define KVEVICT_FIBRE_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define KVEVICT_FIBRE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVEVICT_FIBRE_ASAN 1
#elif __has_feature(thread_sanitizer)
#define KVEVICT_FIBRE_TSAN 1
#endif
#endif
#if defined(KVEVICT_FIBRE_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(KVEVICT_FIBRE_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvevict::emulation {

// forward: warps take turns; backward: a warp runs as far as it can before the next; shuffled: both, at random.
enum class Order { forward, backward, shuffled };

// One block in flight: its fibres and their barriers.
class Block {
 public:
  Block(int threads, std::size_t shared_bytes, Order order) : order_(order), threads_(threads) {
    if (threads % cuda::warp_size != 0 || threads < 32 || threads > 1024)
      throw std::invalid_argument("a block has 32 to 1024 threads, in whole warps");
    shared_.resize((shared_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    fibres_.resize(static_cast<std::size_t>(threads));
    barriers_.resize(static_cast<std::size_t>(threads / cuda::warp_size));
    auto& stacks = stack_pool();
    while (stacks.size() < fibres_.size()) stacks.emplace_back(new std::byte[stack_bytes]);  // not zeroed on purpose
    for (std::size_t t = 0; t < fibres_.size(); ++t) fibres_[t].stack = stacks[t].get();
  }

  void* shared() { return shared_.data(); }
  int threads() const { return threads_; }

  // Runs body(thread) on every fibre to its end. Throws where some threads wait for others that have ended.
  void run(const std::function<void(int)>& body) {
    body_ = &body;
    for (int t = 0; t < threads_; ++t) start(t);
    std::vector<int> warps(barriers_.size()), lanes(cuda::warp_size);
    std::iota(warps.begin(), warps.end(), 0);
    std::iota(lanes.begin(), lanes.end(), 0);
    if (order_ == Order::backward) {
      std::reverse(warps.begin(), warps.end());
      std::reverse(lanes.begin(), lanes.end());
    }
    std::mt19937 random(1);
    for (int done = 0; done < threads_;) {
      if (order_ == Order::shuffled) {
        std::shuffle(warps.begin(), warps.end(), random);
        std::shuffle(lanes.begin(), lanes.end(), random);
      }
      bool moved = false;
      for (const int w : warps) {
        // A warp runs alone until it waits for the others, or takes turns with them.
        const bool alone = order_ != Order::forward && (order_ == Order::backward || random() % 2 == 0);
        bool again = true;
        while (again) {
          again = false;
          for (const int l : lanes) {
            Fibre& f = fibres_[static_cast<std::size_t>(w * cuda::warp_size + l)];
            if (f.ended || (f.waits && f.waits->round == f.round)) continue;
            moved = again = true;
            resume(w * cuda::warp_size + l);
            done += f.ended;
          }
          again = again && alone;
        }
      }
      if (!moved) throw std::logic_error("threads of a block wait at a barrier that others never reach");
    }
  }

  // Until all threads of the block, or of the warp, have arrived.
  void sync(int t) { arrive(t, block_, threads_); }
  void sync_warp(int t) { arrive(t, barriers_[static_cast<std::size_t>(t / cuda::warp_size)], cuda::warp_size); }

  // Each lane leaves a value; after the warp has met, all of them are there to read until the lane's next exchange.
  template <class T>
  const T* exchange(int t, const T& value) {
    static_assert(sizeof(T) <= slot_bytes);
    Warp& w = warps_at(t);
    auto& side = w.side[w.turn[static_cast<std::size_t>(t % cuda::warp_size)]++ & 1];
    std::memcpy(side.data() + static_cast<std::size_t>(t % cuda::warp_size) * sizeof(T), &value, sizeof(T));
    sync_warp(t);
    return reinterpret_cast<const T*>(side.data());
  }

 private:
  static constexpr std::size_t stack_bytes = 64 * 1024, slot_bytes = 64;

  struct Barrier {
    int arrived = 0;
    unsigned round = 0;
  };
  struct Warp {
    alignas(16) std::array<std::byte, slot_bytes * cuda::warp_size> side[2];
    std::array<unsigned, cuda::warp_size> turn{};
  };
  struct Fibre {
    std::byte* stack = nullptr;
    ucontext_t context;  // its first entry only: swapcontext calls the kernel each time, _longjmp does not
    jmp_buf place{};
    bool entered = false;
    const Barrier* waits = nullptr;
    unsigned round = 0;
    bool ended = false;
    void* fake_stack = nullptr;
    void* tsan = nullptr;
  };

  // One block runs at a time, so all of them use the same stacks.
  static std::vector<std::unique_ptr<std::byte[]>>& stack_pool() {
    static std::vector<std::unique_ptr<std::byte[]>> pool;
    return pool;
  }

  Warp& warps_at(int t) {
    if (warps_.empty()) warps_.resize(barriers_.size());
    return warps_[static_cast<std::size_t>(t / cuda::warp_size)];
  }

  void arrive(int t, Barrier& b, int count) {
    Fibre& f = fibres_[static_cast<std::size_t>(t)];
    f.waits = &b;
    f.round = b.round;
    if (++b.arrived == count) {
      b.arrived = 0;
      ++b.round;
    }
    leave(f);
    f.waits = nullptr;
  }

  static void entry(unsigned high, unsigned low, int t) {
    auto* self = reinterpret_cast<Block*>(static_cast<std::uintptr_t>(high) << 32 | low);
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &self->main_bottom_, &self->main_size_);
#endif
    (*self->body_)(t);
    Fibre& f = self->fibres_[static_cast<std::size_t>(t)];
    f.ended = true;
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_start_switch_fiber(nullptr, self->main_bottom_, self->main_size_);
#endif
    self->jump_out(f);
  }

  void start(int t) {
    Fibre& f = fibres_[static_cast<std::size_t>(t)];
    f.ended = false;
    f.entered = false;
    f.waits = nullptr;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = stack_bytes;
    f.context.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&f.context, reinterpret_cast<void (*)()>(&Block::entry), 3, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self & 0xffffffffu), t);
  }

#if defined(KVEVICT_FIBRE_TSAN)
  // The thread sanitizer follows fibres by name and jumps not at all.
  void jump_in(Fibre& f) {
    if (!main_tsan_) main_tsan_ = __tsan_get_current_fiber();
    if (!f.entered) f.tsan = __tsan_create_fiber(0);
    f.entered = true;
    __tsan_switch_to_fiber(f.tsan, 0);
    swapcontext(&main_context_, &f.context);
    if (f.ended) __tsan_destroy_fiber(f.tsan);
  }
  void jump_out(Fibre& f) {
    __tsan_switch_to_fiber(main_tsan_, 0);
    swapcontext(&f.context, &main_context_);
  }
  ucontext_t main_context_;
  void* main_tsan_ = nullptr;
#else
  void jump_in(Fibre& f) {
    if (_setjmp(main_) != 0) return;
    if (f.entered) _longjmp(f.place, 1);
    f.entered = true;
    setcontext(&f.context);
  }
  void jump_out(Fibre& f) {
    if (_setjmp(f.place) == 0) _longjmp(main_, 1);
  }
  jmp_buf main_{};
#endif

  void resume(int t) {
    Fibre& f = fibres_[static_cast<std::size_t>(t)];
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_start_switch_fiber(&main_fake_stack_, f.stack, stack_bytes);
#endif
    jump_in(f);
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_finish_switch_fiber(main_fake_stack_, nullptr, nullptr);
#endif
  }

  void leave(Fibre& f) {
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_start_switch_fiber(&f.fake_stack, main_bottom_, main_size_);
#endif
    jump_out(f);
#if defined(KVEVICT_FIBRE_ASAN)
    __sanitizer_finish_switch_fiber(f.fake_stack, &main_bottom_, &main_size_);
#endif
  }

  Order order_;
  int threads_;
  std::vector<std::max_align_t> shared_;
  std::vector<Fibre> fibres_;
  Barrier block_;
  std::vector<Barrier> barriers_;
  std::vector<Warp> warps_;
  const void* main_bottom_ = nullptr;
  std::size_t main_size_ = 0;
  void* main_fake_stack_ = nullptr;
  const std::function<void(int)>* body_ = nullptr;
};

// The Cta of one emulated thread.
class HostCta {
 public:
  HostCta(Block& block, int thread, int x, int y, int z) : block_(block), thread_(thread), x_(x), y_(y), z_(z) {}

  int thread() const { return thread_; }
  int threads() const { return block_.threads(); }
  int lane() const { return thread_ % 32; }
  int warp() const { return thread_ / 32; }
  int warps() const { return block_.threads() / 32; }
  int block_x() const { return x_; }
  int block_y() const { return y_; }
  int block_z() const { return z_; }

  void sync() { block_.sync(thread_); }
  void sync_warp() { block_.sync_warp(thread_); }
  std::uint32_t ballot(bool p) {
    const auto* all = block_.exchange(thread_, p);
    std::uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) bits |= static_cast<std::uint32_t>(all[l]) << l;
    return bits;
  }
  template <class T>
  T shuffle(T v, int from) {
    return block_.exchange(thread_, v)[from];
  }
  template <class T>
  T shuffle_xor(T v, int mask) {
    return block_.exchange(thread_, v)[lane() ^ mask];
  }
  template <class T>
  T shuffle_up(T v, int lanes) {
    return block_.exchange(thread_, v)[lane() < lanes ? lane() : lane() - lanes];
  }

  void add(std::uint32_t& counter, std::uint32_t n) { counter += n; }
  void add_global(std::uint32_t& counter, std::uint32_t n) { counter += n; }
  void smallest_global(unsigned long long& word, unsigned long long n) { word = std::min(word, n); }
  void largest_global(std::int32_t& word, std::int32_t n) { word = std::max(word, n); }

  // m16n8k16, fragments as in the PTX manual: with g = lane / 4 and t = lane % 4, register i of A holds row
  // g + 8 (i & 1), columns 2t + 8 (i / 2) and the next; register i of B holds column g, rows 2t + 8i and the next;
  // c[i] is row g + 8 (i / 2), column 2t + (i & 1).
  template <class T>
  void multiply(T, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    struct Registers {
      std::uint32_t a[4], b[2];
    };
    const auto* r = block_.exchange(thread_, Registers{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const auto half = [](std::uint32_t word, int i) {
      const auto bits = static_cast<std::uint16_t>(word >> (16 * i));
      return static_cast<double>(to_float(T{bits}));
    };
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + (i & 1);
      double sum = c[i];
      for (int k = 0; k < 16; ++k) {
        const int pair = k % 8 / 2, second = k / 8;
        sum += half(r[row % 8 * 4 + pair].a[row / 8 + 2 * second], k & 1) * half(r[column * 4 + pair].b[second], k & 1);
      }
      c[i] = static_cast<float>(sum);
    }
  }
  // m16n8k8 on TF32 (the low 13 bits of each float are not read): register i of A holds row g + 8 (i & 1), column
  // t + 4 (i / 2); register i of B holds row t + 4i, column g.
  void multiply(float, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    struct Registers {
      std::uint32_t a[4], b[2];
    };
    const auto* r = block_.exchange(thread_, Registers{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const auto tf32 = [](std::uint32_t word) { return static_cast<double>(std::bit_cast<float>(word & 0xffffe000u)); };
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + (i & 1);
      double sum = c[i];
      for (int k = 0; k < 8; ++k)
        sum += tf32(r[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)]) * tf32(r[column * 4 + k % 4].b[k / 4]);
      c[i] = static_cast<float>(sum);
    }
  }

  std::uint32_t opaque(std::uint32_t word) const { return word; }
  float exp2(float x) const { return std::exp2(x); }
  float log2(float x) const { return std::log2(x); }
  float sqrt(float x) const { return std::sqrt(x); }
  float exp(float x) const { return std::exp(x); }
  float log1p(float x) const { return std::log1p(x); }
  double log(double x) const { return std::log(x); }
  double cosine(double x) const { return std::cos(x); }
  double sine(double x) const { return std::sin(x); }

 private:
  Block& block_;
  int thread_, x_, y_, z_;
};

struct Grid {
  int x = 1, y = 1, z = 1;
};

// Launches body(cta, shared memory) on every block of a grid, one block after the other.
template <class Body>
void launch(Grid grid, int threads, std::size_t shared_bytes, Order order, Body&& body) {
  Block block(threads, shared_bytes, order);
  std::vector<Grid> blocks;
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
  if (order == Order::backward) std::reverse(blocks.begin(), blocks.end());
  if (order == Order::shuffled) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(2));
  for (const Grid at : blocks) {
    std::fill_n(static_cast<unsigned char*>(block.shared()), shared_bytes, static_cast<unsigned char>(0xcd));
    block.run([&](int t) {
      HostCta cta(block, t, at.x, at.y, at.z);
      body(cta, block.shared());
    });
  }
}

}  // namespace kvevict::emulation
