// From the product's q, k, v rows to rotated q and the store's K and V: head norms, rotary embedding, int8 KV.
#include "paged.h"

namespace {
using namespace hw;

struct Rotation {
  const float *cos, *sin;        // [max_positions][head_dim / 2]
  const float *q_norm, *k_norm;  // [head_dim], or null
  float eps;
};

// x * rsqrt(mean(x ** 2) + eps) * weight, rounded to T.
template <class T> void norm(float* x, const float* weight, float eps, int dim) {
  vf squares = {};
  for (int i = 0; i < dim; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const vf factor = splat(1 / std::sqrt(sum(squares) / (float)dim + eps));
  for (int i = 0; i < dim; i += LANES) {
    T rounded[LANES];
    store(rounded, load(x + i) * factor * load(weight + i));
    store(x + i, load(rounded));
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of x.
void rotate(float* x, const float* cos, const float* sin, int dim) {
  for (int i = 0; i < dim / 2; i += LANES) {
    vf a = load(x + i), b = load(x + dim / 2 + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + dim / 2 + i, b * c + a * s);
  }
}

// As int8_ref.quantize_rows; the scale of what is not finite is no number. Returns the scale.
float quantize(const float* x, int8_t* y, int dim) {
  vf most = {}, poison = {};
  for (int i = 0; i < dim; i += LANES) {
    most = vmax(most, vabs(load(x + i)));
    poison += load(x + i) * splat(0.f);
  }
  const float top_abs = top(most), inverse = top_abs > 0 ? 1 / top_abs * 127 : 0;  // as PyTorch divides
  for (int i = 0; i < dim; i += LANES) store_low_bytes(y + i, (vi)(load(x + i) * splat(inverse) + splat(ROUNDER)));
  return top_abs / 127 + sum(poison);
}

// Writes one slot: K by dwords, V by single elements, for its dwords hold two tokens, which two threads may be writing.
template <class T, class E> void scatter(const Store& s, int64_t block, int head, int offset, const E* k, const E* v) {
  const int dim = s.head_dim;
  if (!s.panelled()) {
    const int64_t row = s.at(block, head, offset);
    std::memcpy((E*)s.k + row, k, dim * sizeof(E));
    std::memcpy((E*)s.v + row, v, dim * sizeof(E));
    return;
  }
  const int slot = offset % PANEL;
  E* k_panel = (E*)s.k + s.at(block, head, offset - slot);
  E* v_panel = (E*)s.v + s.at(block, head, offset - slot);
  for (int d = 0; d < dim; d += PAIR<T>) std::memcpy(k_panel + k_at<T>(slot, d), k + d, PAIR<T> * sizeof(E));
  for (int d = 0; d < dim; d++) v_panel[v_at<T>(slot, d, dim)] = v[d];
}

template <class T> void write(const Store& s, int64_t slot, int head, const float* k, const T* v) {
  const int64_t block = slot / s.block_size;
  const int offset = (int)(slot % s.block_size), dim = s.head_dim;
  if (!s.k_scale) {
    T rounded[MAX_HEAD_DIM];
    for (int i = 0; i < dim; i += LANES) store(rounded + i, load(k + i));
    return scatter<T>(s, block, head, offset, rounded, v);
  }
  float wide[MAX_HEAD_DIM];
  int8_t k8[MAX_HEAD_DIM], v8[MAX_HEAD_DIM];
  for (int i = 0; i < dim; i += LANES) store(wide + i, load(v + i));
  s.k_scale[s.scale_at(block, head, offset)] = quantize(k, k8, dim);
  s.v_scale[s.scale_at(block, head, offset)] = quantize(wide, v8, dim);
  scatter<T>(s, block, head, offset, k8, v8);
}

template <class T> void token(const Store& s, const Step& step, const Rotation& by, int n_heads, T* qkv, int64_t at) {
  const int dim = s.head_dim;
  const int64_t row = step.positions[at] * (dim / 2);
  T* x = qkv + at * (n_heads + 2 * s.n_kv_heads) * dim;
  for (int h = 0; h < n_heads + s.n_kv_heads; h++, x += dim) {
    float wide[MAX_HEAD_DIM];
    for (int i = 0; i < dim; i += LANES) store(wide + i, load(x + i));
    if (by.q_norm) norm<T>(wide, h < n_heads ? by.q_norm : by.k_norm, by.eps, dim);
    rotate(wide, by.cos + row, by.sin + row, dim);
    if (h >= n_heads) write<T>(s, step.slots[at], h - n_heads, wide, x + s.n_kv_heads * dim);
    else for (int i = 0; i < dim; i += LANES) store(x + i, load(wide + i));
  }
}

template <class T> void tokens(const Store& s, const Step& step, const Rotation& by, int n_heads, T* qkv) {
#pragma omp parallel for schedule(static) if (step.n_tokens > 3)
  for (int at = 0; at < step.n_tokens; at++) token<T>(s, step, by, n_heads, qkv, at);
}

}  // namespace

// qkv [n_tokens][(n_heads + 2 * n_kv_heads) * head_dim]: q is rotated where it lies, k and v go to the store. head_dim is
// a multiple of 32 up to 256.
HW_API void hw_rope_bfloat16(const Store* store, const Step* step, bf16* qkv, int n_heads, const float* cos, const float* sin,
                             const float* q_norm, const float* k_norm, float eps) {
  tokens(*store, *step, {cos, sin, q_norm, k_norm, eps}, n_heads, qkv);
}
HW_API void hw_rope_float32(const Store* store, const Step* step, float* qkv, int n_heads, const float* cos, const float* sin,
                            const float* q_norm, const float* k_norm, float eps) {
  tokens(*store, *step, {cos, sin, q_norm, k_norm, eps}, n_heads, qkv);
}
