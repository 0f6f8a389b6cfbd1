// Rows of activations as a product wants them: transformed, quantised, filled up with zeros to whole dwords and steps.
#pragma once

#include <algorithm>
#include <cfloat>

#include "buffer.h"
#include "linear.h"

namespace hw {

template <int HALF, int... i>
HW_INLINE vf butterfly(vf v, std::integer_sequence<int, i...>) {
  constexpr vf SIGNS = {((i & HALF) ? -1.f : 1.f)...};
  return fma(v, SIGNS, vf{v[i ^ HALF]...});  // lane i: v[i] + its partner, or its partner - v[i]; rounded once
}

// LEVELS of the transform, from pairs ``half`` elements apart on, in registers; then times ``scale``.
template <int LEVELS>
HW_INLINE void butterflies(float* x, int64_t n, int64_t half, vf scale) {
  constexpr int VECTORS = 1 << LEVELS;
  for (int64_t at = 0; at < n; at += half * VECTORS)
    for (int64_t i = at; i < at + half; i += LANES) {
      vf v[VECTORS];
      repeat<VECTORS>([&](auto j) { v[j] = load(x + i + j * half); });
      repeat<LEVELS>([&](auto level) {
        repeat<VECTORS>([&](auto j) {
          constexpr int APART = 1 << level;
          if constexpr ((j & APART) == 0) {
            const vf a = v[j], b = v[j + APART];
            v[j] = a + b, v[j + APART] = a - b;
          }
        });
      });
      repeat<VECTORS>([&](auto j) { store(x + i + j * half, v[j] * scale); });
    }
}

// The orthonormal Walsh-Hadamard transform of pieces of ``size`` (int8_ref.hadamard: the same sums in the same order): what
// stays within a vector, or all of it where a piece is no longer than one; and the rest.
inline vf hadamard_within(vf v, int64_t size, vf scale) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  if (size > 1) v = butterfly<1>(v, lanes);
  if (size > 2) v = butterfly<2>(v, lanes);
  if constexpr (LANES > 4)
    if (size > 4) v = butterfly<4>(v, lanes);
  if constexpr (LANES > 8)
    if (size > 8) v = butterfly<8>(v, lanes);
  return size <= LANES ? v * scale : v;
}
inline void hadamard_across(float* x, int64_t n, int64_t size, vf scale) {
  const vf one = splat(1.f);
  for (int64_t half = LANES; half < size;) {
    const int64_t left = size / half;  // 2 ** levels that are left
    if (left >= 8) butterflies<3>(x, n, half, left == 8 ? scale : one), half *= 8;
    else if (left == 4) butterflies<2>(x, n, half, scale), half *= 4;
    else butterflies<1>(x, n, half, scale), half *= 2;
  }
}

// u8 = 128 + x * 127 / max|x|, rounded to nearest, ties to even (int8_ref.quantize_rows); returns max|x| / 127. A row
// that is not finite gets the scale NaN, one of (almost) zeros 0. ROUND: x is rounded to bf16 first, and written back.
template <bool ROUND>
float quantize(float* x, int64_t n, uint8_t* to) {
  typedef uint8_t vb __attribute__((vector_size(LANES)));
  vi tops[4] = {};
  for (int64_t i = 0; i < n; i += 4 * LANES)  // n is a multiple of 64
    repeat<4>([&](auto j) {
      // The bits of |x| order like |x|, infinity above numbers, NaN above all.
      vf given = load(x + i + j * LANES);
      if (ROUND) store(x + i + j * LANES, given = widen(narrow(given)));
      const vi v = (vi)given & INT32_MAX;
      tops[j] = v > tops[j] ? v : tops[j];
    });
  int32_t bits = 0;
  for (const vi& each : tops)
    for (int i = 0; i < LANES; i++) bits = std::max(bits, (int32_t)each[i]);
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
  const int64_t size = w.hadamard ? w.hadamard : 1;
  const vf scale = splat((float)(1 / std::sqrt((double)size)));
  int64_t i = 0;
  for (; i + LANES <= w.k; i += LANES) store(wide + i, hadamard_within(load(x + i), size, scale));
  T last[LANES] = {};
  std::memcpy(last, x + i, (w.k - i) * sizeof(T));
  std::memset(wide + i, 0, (n - i) * sizeof(float));
  if (i < n) store(wide + i, hadamard_within(load(last), size, scale));
  hadamard_across(wide, round_up(w.k, LANES), size, scale);
  if (w.product != INT8) {
    for (i = 0; i < n; i += LANES) store((T*)to + i, load(wide + i));
    return 1;
  }
  if (w.hadamard && w.compute == BF16) return quantize<true>(wide, n, (uint8_t*)to);
  return quantize<false>(wide, n, (uint8_t*)to);
}

}  // namespace hw
