// What is done to each token alone: RMS norms and gated activations. Computed in float, rounded once at the end.
//
// The order of a row's sum follows from its length only. A row's last, partial vector is filled up with zeros and goes
// through the same instructions as the others, so that an element's bits do not depend on where it stands.
#include <algorithm>

#include "gates.h"

using namespace hw;

namespace {

constexpr int64_t ENOUGH = 1 << 14;  // elements below which waking other threads costs more than it saves

// out = row / sqrt(mean of squares + eps) * weight
template <class T>
void norm_row(const T* row, const float* weight, T* out, int64_t dim, float eps) {
  vf acc[4] = {};
  for (int64_t i = 0; i < dim; i += 4 * LANES)
    repeat<4>([&](auto k) {
      int64_t at = i + k * LANES;
      if (at < dim) {
        vf v = load_some(row + at, dim - at);
        acc[k] = fma(v, v, acc[k]);
      }
    });
  float mean = sum((acc[0] + acc[1]) + (acc[2] + acc[3])) / (float)dim;
  vf scale = splat(1.f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < dim; i += LANES)
    store_some(out + i, load_some(row + i, dim - i) * scale * load_some(weight + i, dim - i), dim - i);
}

template <class T>
void rms_norm(const T* x, const float* weight, T* out, int64_t n, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (n > 1 && n * dim >= ENOUGH)
  for (int64_t r = 0; r < n; r++) norm_row(x + r * dim, weight, out + r * dim, dim, eps);
}

// total = x + residual, rounded; out = the norm of that
template <class T>
void add_rms_norm(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t n, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (n > 1 && n * dim >= ENOUGH)
  for (int64_t r = 0; r < n; r++) {
    const T *a = x + r * dim, *b = residual + r * dim;
    T* both = total + r * dim;
    for (int64_t i = 0; i < dim; i += LANES) store_some(both + i, load_some(a + i, dim - i) + load_some(b + i, dim - i), dim - i);
    norm_row(both, weight, out + r * dim, dim, eps);
  }
}

// Rows of 2 * dim, out of dim: act(first half) * second half
template <class Act, class T>
void gated(const T* gate_up, T* out, int64_t n, int64_t dim, Act act) {
#pragma omp parallel for schedule(static) if (n > 1 && n * dim >= ENOUGH)
  for (int64_t r = 0; r < n; r++) {
    const T* gate = gate_up + 2 * r * dim;
    gate_row(gate, gate + dim, dim, act, out + r * dim);
  }
}

}  // namespace

#define HW_ROWWISE(T, NAME)                                                                                              \
  HW_API void hw_rms_norm_##NAME(const T* x, const float* weight, T* out, int64_t n, int64_t dim, float eps) {           \
    rms_norm(x, weight, out, n, dim, eps);                                                                               \
  }                                                                                                                      \
  HW_API void hw_add_rms_norm_##NAME(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t n,    \
                                     int64_t dim, float eps) {                                                           \
    add_rms_norm(x, residual, weight, out, total, n, dim, eps);                                                          \
  }                                                                                                                      \
  HW_API void hw_silu_##NAME(const T* gate_up, T* out, int64_t n, int64_t dim) { gated(gate_up, out, n, dim, Silu{}); }  \
  HW_API void hw_gelu_tanh_##NAME(const T* gate_up, T* out, int64_t n, int64_t dim) {                                    \
    gated(gate_up, out, n, dim, GeluTanh{});                                                                             \
  }

HW_ROWWISE(float, float32)
HW_ROWWISE(bf16, bfloat16)
