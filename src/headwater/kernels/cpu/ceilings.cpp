// What this machine can do at most, for a benchmark to compare with: dot instructions with nothing to load, and memory
// with nothing to compute.
#include "amx.h"
#include "linear.h"

using namespace hw;

namespace {

constexpr int CHAINS = 12;  // enough that none waits for its own last sum

// What is multiplied: numbers of many different bits (a CPU runs faster on zeros than it ever does on real data).
struct alignas(64) Operands {
  uint32_t tile[4][256];
  Operands() {
    uint32_t state = 1;
    for (auto& part : tile)
      for (uint32_t& dword : part) {
        state = state * 1664525u + 1013904223u;
        dword = 0x3f003f00 | (state & 0x80ff0000) | (state >> 16 & 0x80ff);  // two bf16 of either sign around 1
      }
  }
};

template <class Sum, class Dot>
int64_t vector_chains(int64_t n, int64_t flops, Dot dot) {
  Sum sums[CHAINS] = {};
  Operands operands;
  vi a = load_as<vi>(operands.tile[0]), b = load_as<vi>(operands.tile[1]);
  for (int64_t i = 0; i < n; i++) repeat<CHAINS>([&](auto c) { dot(sums[c], a, b); });
  for (Sum& sum : sums) asm volatile("" : : "m"(sum));
  return n * CHAINS * LANES * flops;
}

#if defined(__AMX_TILE__)
template <class Dots>
int64_t tile_chains(int64_t n, int64_t flops, Dots dots) {
  Operands operands;
  amx::configure(16, 16);
  amx::load<4>(operands.tile[0], 64), amx::load<5>(operands.tile[1], 64);
  amx::load<6>(operands.tile[2], 64), amx::load<7>(operands.tile[3], 64);
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  for (int64_t i = 0; i < n; i++) dots();
  amx::release();
  return n * 4 * 16 * 16 * 16 * flops;
}
#endif

int64_t chains(int32_t type, int64_t n) {
#if defined(__AMX_TILE__)
  if (type == BF16)
    return tile_chains(n, 4, [] {
      amx::dot_bf16<0, 4, 6>(), amx::dot_bf16<1, 4, 7>(), amx::dot_bf16<2, 5, 6>(), amx::dot_bf16<3, 5, 7>();
    });
  if (type == INT8)
    return tile_chains(n, 8, [] {
      amx::dot_u8s8<0, 4, 6>(), amx::dot_u8s8<1, 4, 7>(), amx::dot_u8s8<2, 5, 6>(), amx::dot_u8s8<3, 5, 7>();
    });
#endif
  if (type == BF16) return vector_chains<vf>(n, 4, [](vf& sum, vi a, vi b) { dot_bf16(sum, a, b); });
  if (type == INT8) return vector_chains<vi>(n, 8, [](vi& sum, vi a, vi b) { dot_u8s8(sum, a, b); });
  return vector_chains<vf>(n, 2, [](vf& sum, vi a, vi b) { sum = fma((vf)a, (vf)b, sum); });
}

}  // namespace

// Multiplications and additions done by all threads in ``n`` rounds of the dot instruction for a Type.
HW_API int64_t hw_ceiling_dot(int32_t type, int64_t n) {
  int64_t operations = 0;
#pragma omp parallel reduction(+ : operations)
  operations += chains(type, n);
  return operations;
}

// Reads memory of ``bytes`` (a multiple of 1024) once, all threads together. Returns a sum of it.
HW_API int64_t hw_ceiling_read(const void* memory, int64_t bytes) {
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t at = 0; at < bytes; at += 1024) {
    const int32_t* p = (const int32_t*)((const char*)memory + at);
    vi sums[4] = {};
    for (int i = 0; i < 256; i += 4 * LANES)
      repeat<4>([&](auto k) { sums[k] += load_as<vi>(p + i + k * LANES); });
    vi all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    total += all[0];
    asm volatile("" : : "x"(all));
  }
  return total;
}
