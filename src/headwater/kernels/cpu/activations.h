// Rows of activations as a product wants them: transformed, quantised, filled up with zeros to whole dwords and steps.
#pragma once

#include <algorithm>
#include <cfloat>

#include "buffer.h"
#include "linear.h"

namespace hw {

template <int HALF, int... i>
HW_INLINE vf butterfly(vf v, std::integer_sequence<int, i...>) {
  constexpr vi SIGNS = {((i & HALF) ? INT32_MIN : 0)...};
  return vf{v[i ^ HALF]...} + (vf)((vi)v ^ SIGNS);  // lane i: v[i] + its partner, or its partner - v[i]
}

// The orthonormal Walsh-Hadamard transform of pieces of ``size`` (int8_ref.hadamard: the same sums in the same order).
inline void hadamard(float* x, int64_t n, int64_t size) {
  vf scale = splat((float)(1 / std::sqrt((double)size)));
  for (int64_t i = 0; i < n; i += LANES) {
    vf v = load(x + i);
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
    if (size > 1) v = butterfly<1>(v, lanes);
    if (size > 2) v = butterfly<2>(v, lanes);
    if constexpr (LANES > 4)
      if (size > 4) v = butterfly<4>(v, lanes);
    if constexpr (LANES > 8)
      if (size > 8) v = butterfly<8>(v, lanes);
    store(x + i, v);
  }
  for (int64_t half = LANES; half < size; half *= 2)
    for (int64_t at = 0; at < n; at += 2 * half)
      for (int64_t i = at; i < at + half; i += LANES) {
        vf a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
  for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i) * scale);
}

// u8 = 128 + x * 127 / max|x|, rounded to nearest, ties to even (int8_ref.quantize_rows); returns max|x| / 127. A row
// that is not finite gets the scale NaN, one of (almost) zeros 0.
inline float quantize(const float* x, int64_t n, uint8_t* to) {
  typedef uint8_t vb __attribute__((vector_size(LANES)));
  vi tops = {};
  for (int64_t i = 0; i < n; i += LANES) {
    vi v = load_as<vi>(x + i) & INT32_MAX;  // the bits of |x| order like |x|, infinity above numbers, NaN above all
    tops = v > tops ? v : tops;
  }
  int32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits = std::max(bits, (int32_t)tops[i]);
  float top;
  std::memcpy(&top, &bits, sizeof top);
  float inverse = 1.f / top * 127.f;  // as PyTorch divides
  if (!(inverse <= FLT_MAX) || !std::isfinite(top)) inverse = 0;
  vf magic = splat(12582912.f);  // 1.5 * 2 ** 23: adding it rounds to a whole number, in the low bits
  for (int64_t i = 0; i < n; i += LANES) {
    vi whole = (vi)(load(x + i) * splat(inverse) + magic) + 128;
    vb bytes = __builtin_convertvector(whole, vb);
    std::memcpy(to + i, &bytes, sizeof bytes);
  }
  return !std::isfinite(top) ? NAN : inverse == 0 ? 0 : top / 127.f;
}

inline int64_t pitch(const Linear& w) { return 4 * dwords(w.product, w.k); }  // bytes of a row of staged activations

// Activations can be multiplied where they lie if nothing is to be done to them and no dword is to be filled up.
inline bool as_they_lie(const Linear& w) {
  return !w.hadamard && w.product == w.compute && pitch(w) == (w.compute == BF16 ? 2 : 4) * w.k;
}

// One row to ``to`` (pitch(w) bytes), filled up with zeros. Returns its scale, 1 unless it is quantised.
template <class T>
float stage(const Linear& w, const T* x, char* to) {
  if (!w.hadamard && w.product == w.compute) {
    std::memcpy(to, x, w.k * sizeof(T));
    std::memset(to + w.k * sizeof(T), 0, pitch(w) - w.k * sizeof(T));
    return 1;
  }
  static thread_local Buffer<float> memory;
  int64_t n = dwords(w.product, w.k) * elements(w.product);
  float* wide = memory.of(n);
  int64_t i = 0;
  for (; i + LANES <= w.k; i += LANES) store(wide + i, load(x + i));
  T last[LANES] = {};
  std::memcpy(last, x + i, (w.k - i) * sizeof(T));
  std::memset(wide + i, 0, (n - i) * sizeof(float));
  if (i < n) store(wide + i, load(last));
  if (w.hadamard) hadamard(wide, round_up(w.k, LANES), w.hadamard);
  if (w.product != INT8) {
    for (i = 0; i < n; i += LANES) store((T*)to + i, load(wide + i));
    return 1;
  }
  if (w.hadamard && w.compute == BF16)
    for (i = 0; i < n; i += LANES) store(wide + i, widen(narrow(load(wide + i))));
  return quantize(wide, n, (uint8_t*)to);
}

}  // namespace hw
