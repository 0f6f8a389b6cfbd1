// Rows of activations as a product wants them: transformed, quantised, filled up with zeros to whole dwords and steps.
#pragma once

#include <algorithm>
#include <cfloat>

#include "buffer.h"
#include "linear.h"

namespace hw {

constexpr int TOGETHER = 4;  // vectors that are worked on side by side
constexpr int GROUP = TOGETHER * LANES, LEVELS_OF_GROUP = LANES == 16 ? 6 : LANES == 8 ? 5 : 4;  // GROUP = 2 ** levels

template <int HALF, int... i>
HW_INLINE vf butterfly(vf v, std::integer_sequence<int, i...>) {
  constexpr vf SIGNS = {((i & HALF) ? -1.f : 1.f)...};
  return fma(v, SIGNS, vf{v[i ^ HALF]...});  // lane i: v[i] + its partner, or its partner - v[i]; rounded once
}

// A level between vectors APART.
template <int APART, size_t N>
HW_INLINE void between(vf (&v)[N]) {
  repeat<N>([&](auto j) {
    if constexpr ((j & APART) == 0) {
      const vf a = v[j], b = v[j + APART];
      v[j] = a + b, v[j + APART] = a - b;
    }
  });
}

// The first LEVELS of the transform, in registers: within vectors, then between vectors that lie side by side.
template <int LEVELS, size_t N>
HW_INLINE void transform_near(vf (&v)[N]) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  repeat<LEVELS>([&](auto level) {
    constexpr int APART = 1 << level;
    if constexpr (APART < LANES) repeat<N>([&](auto j) { v[j] = butterfly<APART>(v[j], lanes); });
    else between<APART / LANES>(v);
  });
}

// LEVELS of it, from pairs ``half`` elements apart on, in registers; ``last`` makes of each vector what is kept.
template <int LEVELS, class F>
HW_INLINE void butterflies(float* x, int64_t n, int64_t half, F last) {
  constexpr int VECTORS = 1 << LEVELS;
  for (int64_t at = 0; at < n; at += half * VECTORS)
    for (int64_t i = at; i < at + half; i += LANES) {
      vf v[VECTORS];
      repeat<VECTORS>([&](auto j) { v[j] = load(x + i + j * half); });
      repeat<LEVELS>([&](auto level) { between<(1 << level)>(v); });
      repeat<VECTORS>([&](auto j) { store(x + i + j * half, last(v[j], j % TOGETHER)); });
    }
}

// The orthonormal Walsh-Hadamard transform of pieces of ``size``, a power of two that divides k (int8_ref.hadamard: the same
// sums in the same order), of the k elements of ``from``, filled up with zeros to x [n], n a multiple of GROUP. Each vector of
// the result goes through last(vector, which of TOGETHER), which is to apply the scale. LEVELS: of size, or of GROUP if that is
// less.
template <int LEVELS, class T, class F>
void transform_(const T* from, int64_t k, int64_t n, int64_t size, float* x, F last) {
  const bool near = size <= GROUP;
  for (int64_t i = 0; i < n; i += GROUP) {
    vf v[TOGETHER];
    if (i + GROUP <= k) repeat<TOGETHER>([&](auto j) { v[j] = load(from + i + j * LANES); });
    else repeat<TOGETHER>([&](auto j) { v[j] = load_some(from + i + j * LANES, std::max<int64_t>(k - i - j * LANES, 0)); });
    transform_near<LEVELS>(v);
    if (near) repeat<TOGETHER>([&](auto j) { v[j] = last(v[j], j); });
    repeat<TOGETHER>([&](auto j) { store(x + i + j * LANES, v[j]); });
  }
  const auto keep = [](vf v, int) HW_INLINE_LAMBDA { return v; };
  for (int64_t half = GROUP; half < size;) {
    const int64_t left = size / half;  // 2 ** levels that are left
    if (left > 8) butterflies<3>(x, k, half, keep), half *= 8;
    else if (left == 8) butterflies<3>(x, k, half, last), half *= 8;
    else if (left == 4) butterflies<2>(x, k, half, last), half *= 4;
    else butterflies<1>(x, k, half, last), half *= 2;
  }
}
template <class T, class F>
HW_INLINE void transform(const T* from, int64_t k, int64_t n, int64_t size, float* x, F last) {
  repeat<LEVELS_OF_GROUP + 1>([&](auto levels) {
    if (size == 1 << levels || (levels == LEVELS_OF_GROUP && size > GROUP)) transform_<levels>(from, k, n, size, x, last);
  });
}

// The bits of |x| order like |x|, infinity above numbers, NaN above all: the greatest of a row.
struct Greatest {
  vi tops[TOGETHER] = {};
  HW_INLINE void see(vf x, int j) { tops[j] = vmax((vi)x & INT32_MAX, tops[j]); }
  float get() {
    for (int j = 1; j < TOGETHER; j++) see((vf)tops[j], 0);
    int32_t lanes[LANES];
    std::memcpy(lanes, &tops[0], sizeof lanes);
    const int32_t most = *std::max_element(lanes, lanes + LANES);
    float x;
    std::memcpy(&x, &most, sizeof x);
    return x;
  }
};

// u8 = 128 + x * 127 / max|x|, rounded to nearest, ties to even (int8_ref.quantize_rows); returns max|x| / 127, where ``top``
// is max|x|. A row that is not finite gets the scale NaN, one of (almost) zeros 0.
inline float quantize(const float* x, int64_t n, float top, uint8_t* to) {
  float inverse = 1.f / top * 127.f;  // as PyTorch divides
  if (!(inverse <= FLT_MAX) || !std::isfinite(top)) inverse = 0;
  for (int64_t i = 0; i < n; i += LANES) store_low_bytes(to + i, (vi)(load(x + i) * splat(inverse) + splat(ROUNDER + 128)));
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
  const int64_t n = round_up(dwords(w.product, w.k) * elements(w.product), GROUP);
  const int64_t size = w.hadamard ? w.hadamard : 1;
  const vf scale = splat((float)(1 / std::sqrt((double)size)));
  float* wide = memory.of(n);
  if (w.product != INT8) {
    transform(x, w.k, n, size, wide, [&](vf v, int) HW_INLINE_LAMBDA { return v * scale; });
    for (int64_t i = 0; i < pitch(w) / (int64_t)sizeof(T); i += LANES) store((T*)to + i, load(wide + i));
    return 1;
  }
  Greatest greatest;
  transform(x, w.k, n, size, wide, [&](vf v, int j) HW_INLINE_LAMBDA {
    v = v * scale;
    greatest.see(v, j);
    return v;
  });
  return quantize(wide, n, greatest.get(), (uint8_t*)to);
}

}  // namespace hw
