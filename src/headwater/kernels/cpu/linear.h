// A weight [N][K] as the products read it: panels of 32 columns (output features), K in dwords of 1 float, 2 bf16 or
// 4 int8 of one column:
//
//   panels[N / 32][dwords][32 columns]       dword d of a column = its K elements d * e .. d * e + e - 1, e = 1, 2 or 4
//
// A vector load takes the same dword of neighbouring columns, and meets the activations' dword in all lanes. N is
// filled up to whole panels and K to whole AMX steps of 16 dwords, with zeros.
#pragma once

#include "simd.h"

namespace hw {

enum Type : int32_t { F32 = 0, BF16 = 1, INT8 = 2 };

constexpr int COLUMNS = 32;  // of a panel
constexpr int STEP = 16;     // dwords of K in an AMX tile

HW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
HW_INLINE int64_t elements(int32_t type) { return type == F32 ? 1 : type == BF16 ? 2 : 4; }  // in a dword
HW_INLINE int64_t dwords(int32_t type, int64_t k) { return round_up(k, STEP * elements(type)) / elements(type); }

// The same structure is in native_linear.py.
struct Linear {
  const void* panels;
  const float* scale;     // [N filled up]: of the columns of an int8 weight; else ones
  const int32_t* offset;  // [N filled up]: 128 times the sum of a column where ``product`` is INT8
  const float* bias;      // [N filled up]
  int64_t k, n;
  int32_t weight;    // Type of the panels
  int32_t product;   // Type of what is multiplied: int8 panels are widened to BF16 or F32 if it is that
  int32_t compute;   // Type of the activations given: F32 or BF16
  int32_t out;       // Type of the result: F32 or BF16
  int32_t hadamard;  // elements in a piece of the activations that is transformed first, a power of two; or 0
};

}  // namespace hw
