// The two matrix products of attention, over keys and values in panels: with vectors, and for bf16 with AMX tiles.
#pragma once

#include <algorithm>

#include "amx.h"
#include "attention_plan.h"

namespace hw {

constexpr int BLOCK = 32;           // rows whose scores lie side by side
constexpr int STRIDE = SPLIT + 16;  // floats from a row's scores to the next's; a power of two would fall into few cache sets

template <class T> HW_INLINE void dot(vf& acc, vi a, vi b) {
  if constexpr (PAIR<T> == 2) dot_bf16(acc, a, b);
  else acc = fma((vf)a, (vf)b, acc);
}

// Rows and vectors of accumulators that fit the registers; a vector of the last kind covers part of a panel.
constexpr int MICRO_ROWS = LANES == 4 ? 2 : 6, MICRO_VECTORS = LANES == 8 ? 2 : 4;
constexpr int MICRO_PANELS = MICRO_VECTORS * LANES / PANEL;

// acc[r][j] += a[r][i] * b(j)[i * b_stride] for i < n; everything in dwords.
template <class T, int R, int N, class B>
HW_INLINE void multiply(vf (&acc)[R][N], const int32_t* a, int a_stride, int n, B b, int b_stride) {
  for (int i = 0; i < n; i++) {
    vi right[N];
    repeat<N>([&](auto j) { right[j] = load_as<vi>(b(j) + i * b_stride); });
    repeat<R>([&](auto r) {
      const vi left = splat(load_as<int32_t>(a + r * a_stride + i));
      repeat<N>([&](auto j) { dot<T>(acc[r][j], left, right[j]); });
    });
  }
}

template <class T, int R>
__attribute__((noinline)) void score_micro(const int32_t* q, int n, const T* const* k, float* scores) {
  vf acc[R][MICRO_VECTORS] = {};
  auto key = [&](auto j) { return (const int32_t*)k[j * LANES / PANEL] + j * LANES % PANEL; };
  multiply<T, R, MICRO_VECTORS>(acc, q, n, n, key, PANEL);
  repeat<R>([&](auto r) { repeat<MICRO_VECTORS>([&](auto j) { store(scores + r * STRIDE + j * LANES, acc[r][j]); }); });
}

template <class T, int R, int N>
__attribute__((noinline)) void weigh_micro(const int32_t* w, const T* const* v, int from, int to, int dim, int d, float* o) {
  constexpr int PER_PANEL = PANEL / PAIR<T>;
  vf acc[R][N] = {};
  for (int panel = from; panel < to; panel++) {
    auto value = [&](auto j) { return (const int32_t*)v[panel] + d + j * LANES; };
    multiply<T, R, N>(acc, w + panel * PER_PANEL, STRIDE, PER_PANEL, value, dim);
  }
  repeat<R>([&](auto r) { repeat<N>([&](auto j) { store(o + r * dim + d + j * LANES, acc[r][j]); }); });
}

// f(number of rows, as a constant; first row) for at most MICRO_ROWS rows at a time.
template <class F> HW_INLINE void by_rows(int rows, F f) {
  for (int r = 0; r < rows; r += MICRO_ROWS) {
    const int n = std::min(MICRO_ROWS, rows - r);
    repeat<MICRO_ROWS>([&](auto i) { if (n == i + 1) f(std::integral_constant<int, i + 1>{}, r); });
  }
}

template <class T> struct Products {
  static constexpr int PANELS_TOGETHER = 1;  // in V, whose memory must be in one piece
  void rows(int) {}
  void release() {}

  // Panels from .. to, both even; k has a multiple of MICRO_PANELS.
  static void score(const T* q, int rows, int dim, const T* const* k, int from, int to, float* scores) {
    for (int j = from / MICRO_PANELS * MICRO_PANELS; j < to; j += MICRO_PANELS)
      by_rows(rows, [&](auto R, int r) {
        score_micro<T, R>((const int32_t*)(q + r * dim), dim / PAIR<T>, k + j, scores + r * STRIDE + j * PANEL);
      });
  }
  static void weigh(const float* weights, int rows, int dim, const T* const* v, int from, int to, float* o) {
    constexpr int WIDE = MICRO_VECTORS * LANES, HALF = MICRO_VECTORS / 2;
    for (int d = 0; d < dim; d += WIDE)
      by_rows(rows, [&](auto R, int r) {
        const int32_t* w = (const int32_t*)(weights + r * STRIDE);
        if (d + WIDE <= dim) weigh_micro<T, R, MICRO_VECTORS>(w, v, from, to, dim, d, o + r * dim);
        else weigh_micro<T, R, HALF>(w, v, from, to, dim, d, o + r * dim);
      });
  }
};

#if defined(__AMX_TILE__)
// Two tiles of up to 16 rows times two of 16 columns. Two panels of V make a tile.
template <> struct Products<bf16> {
  static constexpr int PANELS_TOGETHER = 2;
  int configured = 0;

  void rows(int n) {
    if (n != configured) amx::configure(std::min(n, 16), std::max(n - 16, 1));
    configured = n;
  }
  void release() { amx::release(); }

  static HW_INLINE void four_dots(bool two) {
    amx::dot_bf16<0, 4, 6>();
    amx::dot_bf16<1, 4, 7>();
    if (!two) return;
    amx::dot_bf16<2, 5, 6>();
    amx::dot_bf16<3, 5, 7>();
  }
  static HW_INLINE void clear() { amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>(); }
  static HW_INLINE void keep(float* to, int stride, bool two) {
    amx::store<0>(to, stride * 4);
    amx::store<1>(to + 16, stride * 4);
    if (!two) return;
    amx::store<2>(to + 16 * stride, stride * 4);
    amx::store<3>(to + 16 * stride + 16, stride * 4);
  }

  static void score(const bf16* q, int rows, int dim, const bf16* const* k, int from, int to, float* scores) {
    const bool two = rows > 16;
    for (int j = from; j < to; j += 2) {
      clear();
      for (int d = 0; d < dim; d += 32) {
        amx::load<4>(q + d, dim * 2);
        if (two) amx::load<5>(q + 16 * dim + d, dim * 2);
        amx::load<6>(k[j] + d * PANEL, 64);
        amx::load<7>(k[j + 1] + d * PANEL, 64);
        four_dots(two);
      }
      keep(scores + j * PANEL, STRIDE, two);
    }
  }
  static void weigh(const float* weights, int rows, int dim, const bf16* const* v, int from, int to, float* o) {
    const bool two = rows > 16;
    for (int d = 0; d < dim; d += 32) {
      clear();
      for (int j = from; j < to; j += 2) {
        const bf16* w = (const bf16*)weights + j * PANEL;
        amx::load<4>(w, STRIDE * 4);
        if (two) amx::load<5>(w + 16 * STRIDE * 2, STRIDE * 4);
        amx::load<6>(v[j] + d * 2, dim * 4);
        amx::load<7>(v[j] + d * 2 + 32, dim * 4);
        four_dots(two);
      }
      keep(o + d, dim, two);
    }
  }
};
#endif

}  // namespace hw
