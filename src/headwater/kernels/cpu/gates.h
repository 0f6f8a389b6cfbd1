// Activations of gated layers: act(gate) * up.
#pragma once

#include "simd.h"

namespace hw {

enum Gate : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

// x / (1 + 2 ** -z). exp2 ends at 127, where the quotient of what is left of x is as good as zero; a NaN stays one.
HW_INLINE vf times_sigmoid(vf x, vf z) { return over(vmax(splat(-1e4f), x), splat(1.f) + exp2(vmin(-z, splat(126.f)))); }

struct Silu {
  HW_INLINE vf operator()(vf x) const { return times_sigmoid(x, x * 1.44269504f); }
};
// 0.5 x (1 + tanh(t)) = x / (1 + exp(-2 t)), t = sqrt(2 / pi) (x + 0.044715 x ** 3)
struct GeluTanh {
  HW_INLINE vf operator()(vf x) const { return times_sigmoid(x, x * fma(x * x, splat(0.102943240f), splat(2.30220818f))); }
};

// out = act(gate) * up, of n elements each.
template <class T, class Act>
HW_INLINE void gate_row(const T* gate, const T* up, int64_t n, Act act, T* out) {
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES)
    store_pair(out + i, act(load(gate + i)) * load(up + i), act(load(gate + i + LANES)) * load(up + i + LANES));
  for (; i < n; i += LANES) store_some(out + i, act(load_some(gate + i, n - i)) * load_some(up + i, n - i), n - i);
}

}  // namespace hw
