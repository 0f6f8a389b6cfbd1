// One vector of floats for every target: 16 lanes with AVX512, 8 with AVX2, 4 elsewhere (SSE2, NEON).
//
// Arithmetic is the compiler's own (GCC and Clang vector extensions); only what they cannot say, the fused
// multiply-add and the dot products, is written per target. Built with -ffp-contract=off: nothing is fused
// that does not say so, or two instances of one template could round differently.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define HW_API extern "C" __attribute__((visibility("default")))
#define HW_INLINE_LAMBDA __attribute__((always_inline))  // after a lambda's parameters
#define HW_INLINE inline HW_INLINE_LAMBDA

namespace hw {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;  // the upper half of a float

// Calls f(integral_constant 0), f(1), ... f(N - 1): unrolled by the language, so that arrays stay in registers.
template <class F, int... i>
HW_INLINE void repeat_(F& f, std::integer_sequence<int, i...>) { (f(std::integral_constant<int, i>{}), ...); }
template <int N, class F>
HW_INLINE void repeat(F f) { repeat_(f, std::make_integer_sequence<int, N>{}); }

HW_INLINE vf splat(float x) { return x - vf{}; }
HW_INLINE vi splat(int32_t x) { return x - vi{}; }
// b if one of them is no number.
HW_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
HW_INLINE vi vmax(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}
HW_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
HW_INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

HW_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // two roundings
#endif
}

// a / b to 2 ** -23 of it, for b of 1 to 2 ** 126: four instructions for one that keeps its port busy four times as long.
HW_INLINE vf over(vf a, vf b) {
#if defined(__AVX512F__)
  const vf near = (vf)_mm512_rcp14_ps((__m512)b);
  return a * (near * (splat(2.f) - b * near));
#else
  return a / b;
#endif
}

// ---- memory; nothing needs to be aligned ------------------------------------------------------------

template <class V, class T>
HW_INLINE V load_as(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }

HW_INLINE vf widen(vh bits) { return (vf)(__builtin_convertvector(bits, vu) << 16); }

// To the nearest bf16, ties to even; what is no number stays so.
HW_INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(x == x ? rounded : quiet, vh);
#endif
}

HW_INLINE vf load(const float* p) { return load_as<vf>(p); }
HW_INLINE vf load(const bf16* p) { return widen(load_as<vh>(p)); }
HW_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
HW_INLINE void store(bf16* p, vf v) { vh h = narrow(v); std::memcpy(p, &h, sizeof h); }
HW_INLINE void store_pair(float* p, vf a, vf b) { store(p, a), store(p + LANES, b); }
HW_INLINE void store_pair(bf16* p, vf a, vf b) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  std::memcpy(p, &both, sizeof both);
#else
  store(p, a), store(p + LANES, b);
#endif
}

HW_INLINE void store_low_bytes(void* p, vi v) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);  // GCC 12 takes the general form lane by lane
#else
  typedef int8_t vb __attribute__((vector_size(LANES)));
  const vb bytes = __builtin_convertvector(v, vb);
#endif
  std::memcpy(p, &bytes, sizeof bytes);
}

// The first n elements of a vector, or all of it if there are more; what is not there is zeros.
template <class T>
HW_INLINE vf load_some(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T padded[LANES] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

template <class T>
HW_INLINE void store_some(T* p, vf v, int64_t n) {
  if (n >= LANES) return store(p, v);
  T padded[LANES];
  store(padded, v);
  std::memcpy(p, padded, n * sizeof(T));
}

// ---- functions ----------------------------------------------------------------------------------------

// Adding it to a number of less than 2 ** 22 rounds that to whole, to nearest and ties to even, in the low bits of the sum.
constexpr float ROUNDER = 12582912.f;  // 1.5 * 2 ** 23

// first + x * (next + x * ...), by Horner's rule.
HW_INLINE vf polynomial(vf, float last) { return splat(last); }
template <class... More>
HW_INLINE vf polynomial(vf x, float first, More... more) { return fma(polynomial(x, more...), x, splat(first)); }

// 2 ** x for x <= 127; below -126 what is smaller than any normal number, or 2 ** -126. Exactly 1 at 0; what is no number stays so.
// Relative error below 3e-7; SHORT: 3e-6, for what is rounded to 8 bits next.
template <bool SHORT = false> HW_INLINE vf exp2(vf x) {
#if defined(__AVX512DQ__)
  const vf f = (vf)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
  const vf p = SHORT ? polynomial(f, 1.f, 6.93044845e-1f, 2.41280205e-1f, 5.22424737e-2f, 1.34266846e-2f)
                     : polynomial(f, 1.f, 6.93147044e-1f, 2.40229306e-1f, 5.54852806e-2f, 9.67545158e-3f,
                                  1.24678463e-3f, 2.16129153e-4f);
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2 ** floor(x)
#else
  x = vmax(splat(-126.f), x);
  const vf shifted = x + splat(ROUNDER), f = x - (shifted - splat(ROUNDER));
  const vf p = SHORT ? polynomial(f, 1.f, 6.9312420e-1f, 2.4024099e-1f, 5.5906400e-2f, 9.5828301e-3f)
                     : polynomial(f, 1.f, 6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f, 9.6181291e-3f, 1.3333558e-3f,
                                  1.5403530e-4f);
  return (vf)((vi)p + ((vi)shifted << 23));
#endif
}

// Lane i is lane (i + N) % LANES of v.
template <int N, int... i> HW_INLINE vf turned_(vf v, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, ((i + N) % LANES)...);
#else
  return __builtin_shuffle(v, vi{((i + N) % LANES)...});
#endif
}
template <int N> HW_INLINE vf turned(vf v) { return turned_<N>(v, std::make_integer_sequence<int, LANES>{}); }

// Sum and maximum over the lanes, always in the same tree: lanes of the lower half and the upper half, and so on.
HW_INLINE float sum(vf v) {
  if constexpr (LANES > 8) v += turned<LANES / 2>(v);
  if constexpr (LANES > 4) v += turned<4>(v);
  v += turned<2>(v);
  v += turned<1>(v);
  return v[0];
}
HW_INLINE float top(vf v) {
  if constexpr (LANES > 8) v = vmax(v, turned<LANES / 2>(v));
  if constexpr (LANES > 4) v = vmax(v, turned<4>(v));
  v = vmax(v, turned<2>(v));
  v = vmax(v, turned<1>(v));
  return v[0];
}

// ---- dot products: of pairs of bf16 into float, of fours of bytes into int32, lane by lane ----------------

// acc + a.lo * b.lo + a.hi * b.hi; a and b hold two bf16 in every 32-bit lane. Pinned by inline assembly: GCC 12
// copies and spills the accumulators of the intrinsic.
HW_INLINE void dot_bf16(vf& acc, vi a, vi b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  acc = fma((vf)(a << 16), (vf)(b << 16), acc);
  acc = fma((vf)(a & (int32_t)0xffff0000), (vf)(b & (int32_t)0xffff0000), acc);
#endif
}

// acc + sum of four u8 (a) times s8 (b) in every 32-bit lane; exact.
HW_INLINE void dot_u8s8(vi& acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#elif defined(__AVX512BW__)
  __m512i even = _mm512_madd_epi16(_mm512_and_si512((__m512i)a, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)a, 8), _mm512_srai_epi16((__m512i)b, 8));
  acc += (vi)even + (vi)odd;
#elif defined(__AVX2__)
  __m256i even = _mm256_madd_epi16(_mm256_and_si256((__m256i)a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)a, 8), _mm256_srai_epi16((__m256i)b, 8));
  acc += (vi)even + (vi)odd;
#else
  repeat<4>([&](auto i) { acc += (vi)((vu)(a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24); });
#endif
}

}  // namespace hw
