// Weights from plain rows into panels (linear.h), and single rows back out of them.
#include <algorithm>

#include "linear.h"

using namespace hw;

namespace {

HW_INLINE float as_float(float x) { return x; }
HW_INLINE float as_float(int8_t x) { return x; }
HW_INLINE float as_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

template <class To, class From>
HW_INLINE To as(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  float f = as_float(x);
  if constexpr (std::is_same_v<To, float>) return f;
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest bf16, ties to even
  return (To)(f == f ? rounded : (bits >> 16) | 0x40);
}

// One panel: ``columns`` rows of the weight, row_bytes apart.
template <class To, class From>
void pack_panel(const char* rows, int64_t row_bytes, int64_t columns, int64_t k, To* panel, int64_t n_dwords) {
  constexpr int64_t E = 4 / sizeof(To);
  constexpr int64_t BLOCK = STEP * E;  // a cache line of each row at a time
  for (int64_t k0 = 0; k0 < n_dwords * E; k0 += BLOCK)
    for (int64_t c = 0; c < COLUMNS; c++) {
      const From* row = (const From*)(rows + c * row_bytes);
      To* to = panel + k0 * COLUMNS + c * E;
      int64_t n = c < columns ? std::clamp<int64_t>(k - k0, 0, BLOCK) : 0;
      for (int64_t i = 0; i < BLOCK; i++) to[i / E * E * COLUMNS + i % E] = i < n ? as<To>(row[k0 + i]) : To(0);
    }
}

template <class To, class From>
void pack(const char* rows, int64_t row_bytes, int64_t n, int64_t k, int32_t type, To* panels) {
  int64_t n_dwords = dwords(type, k);
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < n; at += COLUMNS)
    pack_panel<To, From>(rows + at * row_bytes, row_bytes, std::min<int64_t>(COLUMNS, n - at), k,
                         panels + at * n_dwords * elements(type), n_dwords);
}

template <class To, class From>
void unpack(const Linear& w, int64_t row, To* out) {
  constexpr int64_t E = 4 / sizeof(From);
  const From* at = (const From*)w.panels + (row / COLUMNS * dwords(w.weight, w.k) * COLUMNS + row % COLUMNS) * E;
  for (int64_t i = 0; i < w.k; i++) {
    From x = at[i / E * E * COLUMNS + i % E];
    if constexpr (std::is_same_v<From, int8_t>) out[i] = as<To>(as_float(x) * w.scale[row]);
    else out[i] = as<To>(x);
  }
}

}  // namespace

// rows [n][k] of ``from``, row_bytes apart, into panels of ``to``: any float into any, int8 into int8.
HW_API void hw_pack(const void* rows, int32_t from, int64_t row_bytes, int64_t n, int64_t k, int32_t to, void* panels) {
  const char* p = (const char*)rows;
  if (to == INT8) return pack<int8_t, int8_t>(p, row_bytes, n, k, to, (int8_t*)panels);
  if (to == BF16 && from == BF16) return pack<bf16, bf16>(p, row_bytes, n, k, to, (bf16*)panels);
  if (to == BF16) return pack<bf16, float>(p, row_bytes, n, k, to, (bf16*)panels);
  if (from == BF16) return pack<float, bf16>(p, row_bytes, n, k, to, (float*)panels);
  pack<float, float>(p, row_bytes, n, k, to, (float*)panels);
}

// out [n][k] in w.compute: the rows ``ids`` of the weight. Returns n, or which of the ids is none of its rows; then
// nothing is written.
HW_API int64_t hw_rows(const Linear* w, const int64_t* ids, int64_t n, void* out) {
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= w->n) return i;
#pragma omp parallel for schedule(static) if (n > 8)
  for (int64_t i = 0; i < n; i++) {
    if (w->compute == BF16) {
      bf16* to = (bf16*)out + i * w->k;
      if (w->weight == INT8) unpack<bf16, int8_t>(*w, ids[i], to);
      else unpack<bf16, bf16>(*w, ids[i], to);
    } else {
      float* to = (float*)out + i * w->k;
      if (w->weight == INT8) unpack<float, int8_t>(*w, ids[i], to);
      else unpack<float, float>(*w, ids[i], to);
    }
  }
  return n;
}
