// All layers of a decoder in one call. Between two calls from Python pass microseconds, in which a waiting thread of the
// kernels may be put to sleep, and ten operations a layer make hundreds of calls a token. The operations are the very
// ones that can be called alone, in the same order: the same bits.
#include "attention_plan.h"
#include "gates.h"
#include "linear.h"

using namespace hw;

HW_API void hw_linear(const Linear* w, const void* x, int64_t row_bytes, int64_t n_rows, void* out);
HW_API void hw_gated_linear(const Linear* w, const void* x, int64_t row_bytes, int64_t n_rows, int32_t gate, void* out);

// The operations of one dtype under one name each, for the templates below.
#define HW_OPERATIONS(T, NAME)                                                                                   \
  HW_API void hw_rms_norm_##NAME(const T*, const float*, T*, int64_t, int64_t, float);                           \
  HW_API void hw_add_rms_norm_##NAME(const T*, const T*, const float*, T*, T*, int64_t, int64_t, float);         \
  HW_API void hw_silu_##NAME(const T*, T*, int64_t, int64_t);                                                    \
  HW_API void hw_gelu_tanh_##NAME(const T*, T*, int64_t, int64_t);                                               \
  HW_API void hw_rope_##NAME(const Store*, const Step*, T*, int, const float*, const float*, const float*,       \
                             const float*, float);                                                               \
  HW_API void hw_attention_##NAME(const Store*, const Step*, Plan*, const void*, int64_t, void*, float, float);  \
  template <> struct Operations<T> {                                                                             \
    static constexpr auto rms_norm = hw_rms_norm_##NAME;                                                         \
    static constexpr auto add_rms_norm = hw_add_rms_norm_##NAME;                                                 \
    static constexpr auto silu = hw_silu_##NAME;                                                                 \
    static constexpr auto gelu_tanh = hw_gelu_tanh_##NAME;                                                       \
    static constexpr auto rope = hw_rope_##NAME;                                                                 \
    static constexpr auto attention = hw_attention_##NAME;                                                       \
  };

template <class T> struct Operations;
HW_OPERATIONS(float, float32)
HW_OPERATIONS(bf16, bfloat16)

namespace {

constexpr int64_t MANY = 33;  // rows: fewer wait for the weights, which are read fastest from one end to the other

// The same structures are in native_stack.py.
struct Layer {
  const Linear *qkv, *o, *gate_up, *down;
  const float *ffn_norm, *post_attn_norm, *post_ffn_norm;  // [d_model]; the post norms may be null
  const float* next_norm;                                  // of the next layer's input, or the final one
  const float *cos, *sin, *q_norm, *k_norm;                // as hw_rope takes them
  int32_t n_heads, gelu;
  float eps, head_eps, scale;
};

struct Place {  // what a layer works on in this step
  const Store* store;
  const Step* step;
  Plan* plan;
};

// h [n][d_model] -> heads [n][n_heads * head_dim], null where only K and V are wanted; ``qkv`` has room for the product's
// rows.
template <class T>
void attend(const Layer& l, const Place& place, const T* h, T* qkv, T* heads) {
  typedef Operations<T> ops;
  hw_linear(l.qkv, h, l.qkv->k * sizeof(T), place.step->n_tokens, qkv);
  ops::rope(place.store, place.step, qkv, l.n_heads, l.cos, l.sin, l.q_norm, l.k_norm, l.head_eps);
  if (heads) ops::attention(place.store, place.step, place.plan, qkv, l.qkv->n, heads, l.scale, 0);
}

// heads [n][n_heads * head_dim], residual [n][d_model] -> the next input h, residual. ``scratch``: n rows of
// d_model + 3 * d_ff elements.
template <class T>
void finish(const Layer& l, int64_t n, const T* heads, T* residual, T* h, T* scratch) {
  typedef Operations<T> ops;
  int64_t d_model = l.o->n, d_ff = l.down->k;
  T *out = scratch, *gate_up = out + n * d_model, *act = gate_up + 2 * n * d_ff;
  hw_linear(l.o, heads, l.o->k * sizeof(T), n, out);
  if (l.post_attn_norm) ops::rms_norm(out, l.post_attn_norm, out, n, d_model, l.eps);
  ops::add_rms_norm(out, residual, l.ffn_norm, h, residual, n, d_model, l.eps);
  if (n >= MANY && d_ff % COLUMNS == 0) {
    hw_gated_linear(l.gate_up, h, d_model * sizeof(T), n, l.gelu ? GELU_TANH : SILU, act);
  } else {
    hw_linear(l.gate_up, h, d_model * sizeof(T), n, gate_up);
    (l.gelu ? ops::gelu_tanh : ops::silu)(gate_up, act, n, d_ff);
  }
  hw_linear(l.down, act, d_ff * sizeof(T), n, out);
  if (l.post_ffn_norm) ops::rms_norm(out, l.post_ffn_norm, out, n, d_model, l.eps);
  ops::add_rms_norm(out, residual, l.next_norm, h, residual, n, d_model, l.eps);
}

// Rows ``at`` (ascending) to the beginning.
template <class T>
void pick(T* rows, int64_t width, const int64_t* at, int64_t n) {
  for (int64_t i = 0; i < n; i++) std::memmove(rows + i * width, rows + at[i] * width, width * sizeof(T));
}

// h and residual [n_tokens][d_model]; after it the first ``n_at`` rows of h are the outputs, normed, of rows ``at``: after
// the last layer's attention nothing mixes rows, so that it goes on with those alone. ``heads`` and ``scratch`` have room
// for n_tokens rows of their kinds.
template <class T>
void run(const Layer* layers, const Place* places, int64_t n_layers, const int64_t* at, int64_t n_at, T* h, T* residual,
         T* heads, T* scratch) {
  for (int64_t i = 0; i < n_layers; i++) {
    const Layer& l = layers[i];
    int64_t n = places[i].step->n_tokens;
    const bool last = i == n_layers - 1;
    attend(l, places[i], h, scratch, last && !n_at ? nullptr : heads);
    if (last) {
      pick(heads, l.o->k, at, n_at);
      pick(residual, l.o->n, at, n_at);
      n = n_at;
    }
    if (n) finish(l, n, heads, residual, h, scratch);
  }
}

}  // namespace

HW_API void hw_layers_float32(const Layer* layers, const Place* places, int64_t n_layers, const int64_t* at,
                              int64_t n_at, float* h, float* residual, float* heads, float* scratch) {
  run(layers, places, n_layers, at, n_at, h, residual, heads, scratch);
}
HW_API void hw_layers_bfloat16(const Layer* layers, const Place* places, int64_t n_layers, const int64_t* at,
                               int64_t n_at, bf16* h, bf16* residual, bf16* heads, bf16* scratch) {
  run(layers, places, n_layers, at, n_at, h, residual, heads, scratch);
}
