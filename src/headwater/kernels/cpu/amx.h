// AMX tiles: 16 rows of 64 bytes. The compiler's intrinsics tell it too little (GCC 12 drops the stores that fill a
// configuration, and moves stores past a tile's load), so each instruction here says what memory it touches.
//
//   tmm0..3  accumulators   [rows of A][16 floats or int32]
//   tmm4, 5  A              [rows][16 dwords of K]
//   tmm6, 7  B              [16 dwords of K][16 columns]
#pragma once

#if defined(__AMX_TILE__)
#include <cstdint>

namespace hw::amx {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0, 1 (and A's tile 4) get ``rows_0`` rows, tiles 2, 3 (and 5) ``rows_1``; B's tiles ``k_dwords`` rows. 1 to 16 each.
inline void configure(int rows_0, int rows_1, int k_dwords = 16) {
  Config c;
  const int rows[8] = {rows_0, rows_0, rows_1, rows_1, rows_0, rows_1, k_dwords, k_dwords};
  for (int i = 0; i < 8; i++) {
    c.rows[i] = (uint8_t)rows[i];
    c.bytes_per_row[i] = (uint16_t)(i == 4 || i == 5 ? 4 * k_dwords : 64);
  }
  asm volatile("ldtilecfg %0" ::"m"(c) : "memory");
}
inline void release() { asm volatile("tilerelease" ::: "memory"); }

template <int T> inline void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> inline void load(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
// For what is read once while other tiles are read again and again: does not push those out of the nearest cache.
template <int T> inline void load_once(const void* p, int64_t stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
template <int T> inline void store(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
// C += A * B, row by row in the order of K: a row's bits do not depend on the rows beside it.
template <int C, int A, int B> inline void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B> inline void dot_u8s8() { asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

}  // namespace hw::amx
#endif
