// All layers of a decoder in one call. Between two calls from Python pass microseconds, in which a waiting thread of the
// kernels may be put to sleep, and ten operations a layer make hundreds of calls a token. The operations are the very
// ones that can be called alone, in the same order: the same bits.
#include <omp.h>

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
  HW_API void hw_attention_share_##NAME(const Store*, const Step*, Plan*, const void*, int64_t, void*, float,    \
                                        float);                                                                  \
  template <> struct Operations<T> {                                                                             \
    static constexpr auto rms_norm = hw_rms_norm_##NAME;                                                         \
    static constexpr auto add_rms_norm = hw_add_rms_norm_##NAME;                                                 \
    static constexpr auto silu = hw_silu_##NAME;                                                                 \
    static constexpr auto gelu_tanh = hw_gelu_tanh_##NAME;                                                       \
    static constexpr auto rope = hw_rope_##NAME;                                                                 \
    static constexpr auto attention = hw_attention_##NAME;                                                       \
    static constexpr auto attention_share = hw_attention_share_##NAME;                                           \
  };

template <class T> struct Operations;
HW_OPERATIONS(float, float32)
HW_OPERATIONS(bf16, bfloat16)

namespace {

constexpr int64_t MANY = 33;  // rows: fewer wait for the weights, which are read fastest from one end to the other
constexpr int64_t ROWS_OF_A_THREAD = 192;  // with fewer it would wait for the weights, which each thread reads for its own rows

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

// h [n][d_model] of the step's tokens from ``first`` on -> qkv, n rows; K and V to the store.
template <class T>
void project(const Layer& l, const Place& place, int64_t first, int64_t n, const T* h, T* qkv) {
  Step part = *place.step;
  part.positions += first, part.slots += first, part.n_tokens = (int32_t)n;
  hw_linear(l.qkv, h, l.qkv->k * sizeof(T), n, qkv);
  Operations<T>::rope(place.store, &part, qkv, l.n_heads, l.cos, l.sin, l.q_norm, l.k_norm, l.head_eps);
}

int64_t finish_width(const Layer& l) { return l.o->n + 3 * l.down->k; }  // d_model + 3 * d_ff

// heads [n][n_heads * head_dim], residual [n][d_model] -> the next input h, residual. ``scratch``: n rows of finish_width.
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

// What the layers work on, in rows of all tokens of the step.
template <class T> struct Memory {
  T *h, *residual;  // [d_model]
  T* qkv;           // [width of the product]
  T* heads;         // [n_heads * head_dim]
  T* scratch;       // [finish_width]
};

// All layers but what follows the last one's attention, for ``n`` rows from ``first`` on: all of them, each operation shared out
// among the threads; or a thread's own in a TEAM, each of which calls this. Its rows then stay in a cache near it, and it waits for the
// others at attention alone, which needs all rows' K and V and is shared by all. (The other operations find themselves in a team
// already, and run in one thread.)
template <bool TEAM, class T>
void pass(const Layer* layers, const Place* places, int64_t n_layers, int64_t first, int64_t n, bool sampled,
          const Memory<T>& memory) {
  for (int64_t i = 0; i < n_layers; i++) {
    const Layer& l = layers[i];
    const Place& place = places[i];
    const bool last = i == n_layers - 1;
    T* h = memory.h + first * l.o->n;
    project(l, place, first, n, h, memory.qkv + first * l.qkv->n);
    if (TEAM) {
#pragma omp barrier
    }
    if (last && !sampled) return;
    const auto attention = TEAM ? Operations<T>::attention_share : Operations<T>::attention;
    attention(place.store, place.step, place.plan, memory.qkv, l.qkv->n, memory.heads, l.scale, 0);
    if (last) return;
    T *heads = memory.heads + first * l.o->k, *residual = memory.residual + first * l.o->n;
    finish(l, n, heads, residual, h, memory.scratch + first * finish_width(l));
  }
}

// Rows ``at`` (ascending) to the beginning.
template <class T>
void pick(T* rows, int64_t width, const int64_t* at, int64_t n) {
  for (int64_t i = 0; i < n; i++) std::memmove(rows + i * width, rows + at[i] * width, width * sizeof(T));
}

// h and residual [n_tokens][d_model]; after it the first ``n_at`` rows of h are the outputs, normed, of rows ``at``: after
// the last layer's attention nothing mixes rows, so that it goes on with those alone.
template <class T>
void run(const Layer* layers, const Place* places, int64_t n_layers, const int64_t* at, int64_t n_at, const Memory<T>& memory) {
  const int64_t n = places[0].step->n_tokens, n_threads = omp_get_max_threads();
  if (n_threads > 1 && n >= ROWS_OF_A_THREAD * n_threads) {
#pragma omp parallel
    {
      const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads(), first = n * thread / team;
      pass<true>(layers, places, n_layers, first, n * (thread + 1) / team - first, n_at > 0, memory);
    }
  } else {
    pass<false>(layers, places, n_layers, 0, n, n_at > 0, memory);
  }
  if (!n_at) return;
  const Layer& last = layers[n_layers - 1];
  pick(memory.heads, last.o->k, at, n_at);
  pick(memory.residual, last.o->n, at, n_at);
  finish(last, n_at, memory.heads, memory.residual, memory.h, memory.scratch);
}

}  // namespace

#define HW_LAYERS(T, NAME)                                                                                                 \
  HW_API void hw_layers_##NAME(const Layer* layers, const Place* places, int64_t n_layers, const int64_t* at, int64_t n_at, \
                               T* h, T* residual, T* qkv, T* heads, T* scratch) {                                          \
    run<T>(layers, places, n_layers, at, n_at, {h, residual, qkv, heads, scratch});                                        \
  }

HW_LAYERS(float, float32)
HW_LAYERS(bf16, bfloat16)
