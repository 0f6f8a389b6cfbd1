// Causal attention over the paged store.
//
// Keys are taken in splits of 512 at absolute positions. For each (query, head) and split that it sees: scores of all
// keys, their top m, the weights exp2(score - m) (rounded to the compute type), their sum l, and o = weights * V; then the
// splits' (o, m, l) are merged in order. Each of these numbers is one chain of operations over dimensions or keys in
// order. A key that a query does not see has weight 0 exactly, which changes no bit of a sum: so the chain is the same
// whatever other queries, keys and slots are at hand, and a query's bits follow from its position and its own keys.
//
// Queries that read the same keys (those of a chunk, the heads of a KV head, rows with the same physical blocks) do so
// together, as rows of one matrix: see attention_plan.
#include <algorithm>

#include "attention_plan.h"
#include "attention_products.h"
#include "buffer.h"

namespace {
using namespace hw;

constexpr int PANELS = SPLIT / PANEL;
constexpr int AHEAD = 4;  // panels that are fetched before they are needed
constexpr float LOG2_E = 1.44269504f;

alignas(64) const char ZEROS[PANEL * MAX_HEAD_DIM * 4] = {};

struct Call {
  const Store& store;
  const Step& step;
  Plan& plan;
  const void* q;     // [n_tokens][q_stride >= n_heads * head_dim]
  int64_t q_stride;  // elements
  void* out;         // [n_tokens][n_heads * head_dim]
  float scale, softcap;  // softcap 0: none
};

// ---- weights ----------------------------------------------------------------------------------------------------------

struct Soft {  // what becomes of a row's scores
  float top, total;
};

// softcap * tanh(x / softcap) * log2(e), of x * (2 * log2(e) * scale / softcap).
HW_INLINE vf capped(vf x, float softcap) {
  const vf e = exp2(vmin(x, splat(126.f)));
  return splat(softcap * LOG2_E) * (splat(1.f) - splat(2.f) / (e + splat(1.f)));
}

HW_INLINE vf only(vf x, int at, int from, int to, vf otherwise) {
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  lane += splat(at);
  return (lane >= splat(from)) & (lane < splat(to)) ? x : otherwise;
}

template <class T> struct Keys {  // of one split, in panels; those that nobody sees are zeros
  const T *k[PANELS], *v[PANELS];
  float k_scale[SPLIT], v_scale[SPLIT];  // int8 only
};

// f(i, whether all lanes count) for the pairs of vectors i .. i + 2 * LANES - 1 that hold some of from .. to - 1. Pairs and
// the vectors in them lie at absolute places: what is summed in each of the two does not depend on from and to.
template <class F> HW_INLINE void pairs(int from, int to, F f) {
  constexpr int PAIR_LANES = 2 * LANES;
  int i = from / PAIR_LANES * PAIR_LANES;
  if (i < from && i < to) f(i, std::false_type{}), i += PAIR_LANES;
  for (; i + PAIR_LANES <= to; i += PAIR_LANES) f(i, std::true_type{});
  if (i < to) f(i, std::false_type{});
}

// The greatest of a row's scores from .. to - 1. Four chains side by side: one would wait for each maximum in turn.
HW_INLINE float greatest(const float* row, int from, int to) {
  const vf none = splat(-INFINITY);
  vf most[4] = {none, none, none, none};
  int i = from / LANES * LANES;
  if (i < from && i < to) most[0] = only(load(row + i), i, from, to, none), i += LANES;
  for (; i + 4 * LANES <= to; i += 4 * LANES) repeat<4>([&](auto j) { most[j] = vmax(most[j], load(row + i + j * LANES)); });
  for (; i + LANES <= to; i += LANES) most[1] = vmax(most[1], load(row + i));
  if (i < to) most[2] = vmax(most[2], only(load(row + i), i, from, to, none));
  return top(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
}

// Scores from .. to - 1 as exponents of two, but for a factor that ``weights`` applies; returns the greatest, with it. Apart from
// ``weights`` so that one row's maximum, a chain from lane to lane, can be found while another's weights are made.
template <class T, bool INT8>
float exponents(float* row, const Keys<T>& keys, float factor, float softcap, int from, int to) {
  if (!INT8 && softcap == 0) return greatest(row, from, to) * factor;
  for (int i = from / LANES * LANES; i < to; i += LANES) {
    vf x = load(row + i);
    if (INT8) x = x * load(keys.k_scale + i);
    store(row + i, softcap != 0 ? capped(x * splat(2 * factor / softcap), softcap) : x * splat(factor));
  }
  return greatest(row, from, to);
}

// Makes weights (T) of the exponents from .. to - 1, in place, and 0 of the others in first .. last - 1, which are multiples of
// PANEL. Returns their sum.
template <class T, bool INT8>
float weights(float* row, const Keys<T>& keys, float factor, float top_score, int from, int to, int first, int last) {
  vf total[2] = {};
  T* w = (T*)row;
  const int begin = from / (2 * LANES) * (2 * LANES), end = (to + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
  for (int i = first; i < begin; i += LANES) store(w + i, vf{});
  pairs(from, to, [&](int i, auto all) {
    vf p[2];
    repeat<2>([&](auto j) {
      const int at = i + j * LANES;
      p[j] = exp2<std::is_same_v<T, bf16>>(fma(load(row + at), splat(factor), splat(-top_score)));
      if (!all) p[j] = only(p[j], at, from, to, vf{});
      total[j] += p[j];
      if (INT8) p[j] = p[j] * load(keys.v_scale + at);
      if (INT8 && !all) p[j] = only(p[j], at, from, to, vf{});
    });
    store_pair(w + i, p[0], p[1]);
  });
  for (int i = std::max(begin, end); i < last; i += LANES) store(w + i, vf{});
  return sum(total[0] + total[1]);
}

// ---- results of splits ------------------------------------------------------------------------------------------------

// (o, m, l) and the next split's: as one.
void merge(float* o, float& m, float& l, const float* next, float next_m, float next_l, int dim) {
  const float most = std::max(m, next_m);
  const vf old = exp2(splat(m - most)), fresh = exp2(splat(next_m - most));
  for (int i = 0; i < dim; i += LANES) store(o + i, fma(load(o + i), old, load(next + i) * fresh));
  l = l * old[0] + next_l * fresh[0];
  m = most;
}

template <class T> void finish(const float* o, float l, int dim, T* out) {
  const vf inverse = splat(1 / l);
  for (int i = 0; i < dim; i += LANES) store(out + i, load(o + i) * inverse);
}

// ---- one thread's work --------------------------------------------------------------------------------------------------

template <class T> struct Scratch {
  Buffer<T> q, k, v;
  Buffer<float> scores, o, sum_o, top, total;
  Buffer<int> position;
  Keys<T> keys;
};

HW_INLINE vf whole(const int8_t* x) {
#if defined(__AVX512F__)
  const vi wide = (vi)_mm512_cvtepi8_epi32(load_as<__m128i>(x));
#elif defined(__AVX2__)
  const vi wide = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
  typedef int8_t vb __attribute__((vector_size(LANES)));
  const vi wide = __builtin_convertvector(load_as<vb>(x), vi);
#endif
  return __builtin_convertvector(wide, vf);
}
template <class T> HW_INLINE void widen(const int8_t* x, T* y, int n) {  // n a multiple of two vectors
  for (int i = 0; i < n; i += 2 * LANES) store_pair(y + i, whole(x + i), whole(x + i + LANES));
}
HW_INLINE bf16 as(bf16, bf16 x) { return x; }
HW_INLINE float as(float, float x) { return x; }
HW_INLINE float as(float, int8_t x) { return x; }
HW_INLINE bf16 as(bf16, int8_t x) {  // exact: 8 bits
  const float wide = x;
  uint32_t bits;
  std::memcpy(&bits, &wide, 4);
  return (bf16)(bits >> 16);
}

template <class T> class Worker {
 public:
  Worker(const Call& call, Scratch<T>& s)
      : call(call), plan(call.plan), store_(call.store), s(s), dim(call.store.head_dim), int8(call.store.k_scale != nullptr) {
    s.k.of(SPLIT * dim), s.v.of(SPLIT * dim);
    s.scores.of(BLOCK * STRIDE), s.o.of(BLOCK * dim);
  }
  ~Worker() { products.release(); }

  void run(const Task& task, int head) {
    const int rows = gather_queries(task, head);
    const Tile& first = plan.tiles[plan.members[task.first_member]];
    for (int split = task.split; split < task.split + task.n_splits; split++)
      attend(task, call.step.table(first.row), head, split, 0, rows);
    if (task.partial) return;
    for (int r = 0; r < rows; r++) finish(s.sum_o.of(0) + r * dim, s.total.of(0)[r], dim, out(first, head, r));
  }

  void merge_partials(const Tile& tile, int head) {
    float* o = s.o.of(dim);
    for (int r = 0; r < tile.n * plan.group; r++) {
      const int position = tile.position + r / plan.group, first = plan.seen_from(position) / SPLIT;
      float m = 0, l = 0;
      for (int split = first; split <= position / SPLIT; split++) {
        const float* part = plan.partial(tile, split, head, store_.n_kv_heads) + r * (dim + 2);
        if (split > first) {
          merge(o, m, l, part, part[dim], part[dim + 1], dim);
          continue;
        }
        std::copy(part, part + dim, o);
        m = part[dim], l = part[dim + 1];
      }
      finish(o, l, dim, out(tile, head, r));
    }
  }

 private:
  const Call& call;
  Plan& plan;
  const Store& store_;
  Scratch<T>& s;
  const int dim;
  const bool int8;
  Products<T> products;

  T* out(const Tile& tile, int head, int r) const {
    const int64_t token = tile.token + r / plan.group;
    return (T*)call.out + (token * plan.n_heads + head * plan.group + r % plan.group) * dim;
  }

  // The task's rows, one after another: (tile, query, head).
  int gather_queries(const Task& task, int head) {
    int rows = 0;
    for (int i = 0; i < task.n_members; i++) rows += plan.tiles[plan.members[task.first_member + i]].n * plan.group;
    T* q = s.q.of(rows * dim);
    int* position = s.position.of(rows);
    s.sum_o.of(rows * dim), s.top.of(rows), s.total.of(rows);
    for (int i = 0; i < task.n_members; i++) {
      const Tile& tile = plan.tiles[plan.members[task.first_member + i]];
      for (int n = 0; n < tile.n; n++, q += plan.group * dim, position += plan.group) {
        const T* from = (const T*)call.q + (tile.token + n) * call.q_stride + head * plan.group * dim;
        std::copy(from, from + plan.group * dim, q);
        std::fill(position, position + plan.group, tile.position + n);
      }
    }
    return rows;
  }

  // The keys of a split that a query sees: from .. to, counted from the split's first.
  int from(int position, int split) const { return std::clamp(plan.seen_from(position) - split * SPLIT, 0, SPLIT); }
  int to(int position, int split) const { return std::clamp(position + 1 - split * SPLIT, 0, SPLIT); }

  // Rows begin .. end - 1 of the task against one split.
  void attend(const Task& task, const int32_t* table, int head, int split, int begin, int end) {
    const int* position = s.position.of(0);
    const int first = position[begin], last = position[end - 1];
    gather_keys(table, head, split, from(first, split), to(last, split));
    const bool differ = task.n_members == 1 && first != last;
    if (differ && !finite(from(first, split), from(last, split), to(first, split), to(last, split))) {
      // weight 0 times such a value is no number: every query only with what it sees
      for (int r = begin; r < end; r += plan.group) attend(task, table, head, split, r, r + plan.group);
      return;
    }
    for (int r = begin; r < end; r += BLOCK) block(task, head, split, r, std::min(BLOCK, end - r));
  }

  void block(const Task& task, int head, int split, int begin, int rows) {
    const int* position = s.position.of(0) + begin;
    float* scores = s.scores.of(0);
    int first = SPLIT, last = 0;
    bool fresh = !task.partial;  // the first split of all rows: nothing to add it to
    for (int r = 0; r < rows; r++) {
      fresh &= split == plan.seen_from(position[r]) / SPLIT;
      first = std::min(first, from(position[r], split) / (2 * PANEL) * (2 * PANEL));
      last = std::max(last, (to(position[r], split) + 2 * PANEL - 1) / (2 * PANEL) * (2 * PANEL));
    }
    if (first >= last) return;
    products.rows(rows);
    products.score(s.q.of(0) + begin * dim, rows, dim, s.keys.k, first / PANEL, last / PANEL, scores);
    Soft soft[BLOCK];
    if (int8) soften<true>(scores, position, rows, split, first, last, soft);
    else soften<false>(scores, position, rows, split, first, last, soft);
    float* o = fresh ? s.sum_o.of(0) + begin * dim : s.o.of(0);
    products.weigh(scores, rows, dim, s.keys.v, first / PANEL, last / PANEL, o);
    if (fresh)
      for (int r = 0; r < rows; r++) s.top.of(0)[begin + r] = soft[r].top, s.total.of(0)[begin + r] = soft[r].total;
    else if (task.partial) keep_partials(task, head, split, begin, rows, soft);
    else
      for (int r = 0; r < rows; r++) add(begin + r, o + r * dim, soft[r], split);
  }

  // Weights of all rows' scores.
  template <bool INT8> void soften(float* scores, const int* position, int rows, int split, int first, int last, Soft* soft) const {
    const float factor = call.scale * LOG2_E, left = INT8 || call.softcap != 0 ? 1 : factor;
    for (int r = 0; r <= rows; r++) {
      float* row = scores + r * STRIDE;
      if (r < rows)
        soft[r].top = exponents<T, INT8>(row, s.keys, factor, call.softcap, from(position[r], split), to(position[r], split));
      if (r == 0) continue;
      const int seen_from = from(position[r - 1], split), seen_to = to(position[r - 1], split);
      soft[r - 1].total = weights<T, INT8>(row - STRIDE, s.keys, left, soft[r - 1].top, seen_from, seen_to, first, last);
    }
  }

  // A row's next split.
  void add(int row, const float* o, Soft soft, int split) {
    const int position = s.position.of(0)[row];
    float *sum_o = s.sum_o.of(0) + row * dim, &m = s.top.of(0)[row], &l = s.total.of(0)[row];
    if (split == plan.seen_from(position) / SPLIT) {
      std::copy(o, o + dim, sum_o);
      m = soft.top, l = soft.total;
    } else if (split > plan.seen_from(position) / SPLIT && split <= position / SPLIT) {
      merge(sum_o, m, l, o, soft.top, soft.total, dim);
    }
  }

  void keep_partials(const Task& task, int head, int split, int begin, int rows, const Soft* soft) {
    int at = 0;  // of the tile's first row among the task's
    for (int i = 0; i < task.n_members; i++) {
      const Tile& tile = plan.tiles[plan.members[task.first_member + i]];
      const int n = tile.n * plan.group;
      float* part = plan.partial(tile, split, head, store_.n_kv_heads);
      for (int row = std::max(at, begin); row < std::min(at + n, begin + rows); row++) {
        float* to = part + (row - at) * (dim + 2);
        std::copy_n(s.o.of(0) + (row - begin) * dim, dim, to);
        to[dim] = soft[row - begin].top, to[dim + 1] = soft[row - begin].total;
      }
      at += n;
    }
  }

  // The keys from .. to of a split, two panels at a time. What nobody sees is zero (K: or whatever is in the store).
  void gather_keys(const int32_t* table, int head, int split, int from, int to) {
    std::fill(s.keys.k, s.keys.k + PANELS, (const T*)ZEROS);
    std::fill(s.keys.v, s.keys.v + PANELS, (const T*)ZEROS);
    for (int j = from / (2 * PANEL) * 2; j * PANEL < to; j += 2) {
      const bool whole = j * PANEL >= from && (j + 2) * PANEL <= to;
      const bool direct = whole && store_.panelled() && !int8 && store_.block_size % (Products<T>::PANELS_TOGETHER * PANEL) == 0;
      for (int i = j; i < j + 2; i++) {
        if (store_.panelled() && (i + AHEAD) * PANEL < to) fetch(table, head, split * SPLIT + (i + AHEAD) * PANEL);
        panel(table, head, split, i, from, to, direct);
      }
    }
  }

  // The panel at a position, before it is needed: blocks lie anywhere, and no processor foresees the next one. (Inlined: a call
  // that only fetches ahead has no effect for the compiler, which leaves it out.)
  HW_INLINE void fetch(const int32_t* table, int head, int at) {
    const int size = int8 ? 1 : sizeof(T), bytes = PANEL * dim * size;
    const int64_t begin = store_.at(table[at / store_.block_size], head, at % store_.block_size) * size;
    for (const void* part : {store_.v, store_.k})
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)part + begin + i, 0, 2);
  }

  void panel(const int32_t* table, int head, int split, int j, int from, int to, bool direct) {
    const int first = std::max(from, j * PANEL), last = std::min(to, (j + 1) * PANEL), size = store_.block_size;
    const int at = split * SPLIT + j * PANEL;
    T *k = s.k.of(0) + j * PANEL * dim, *v = s.v.of(0) + j * PANEL * dim;
    if (!direct) s.keys.v[j] = v;
    if (first >= last) return (void)std::fill(v, v + PANEL * dim, T{});
    if (int8) gather_scales(table, head, split, first, last);
    if (!store_.panelled()) {
      s.keys.k[j] = k;
      std::fill(v, v + PANEL * dim, T{});
      if (int8) rows<int8_t>(table, head, at, first - j * PANEL, last - j * PANEL, k, v);
      else rows<T>(table, head, at, first - j * PANEL, last - j * PANEL, k, v);
      return;
    }
    const int64_t begin = store_.at(table[at / size], head, at % size);
    if (int8) {
      s.keys.k[j] = k;
      widen((const int8_t*)store_.k + begin, k, PANEL * dim);
      widen((const int8_t*)store_.v + begin, v, PANEL * dim);
      return;
    }
    s.keys.k[j] = (const T*)store_.k + begin;
    if (direct) s.keys.v[j] = (const T*)store_.v + begin;
    else std::copy_n((const T*)store_.v + begin, PANEL * dim, v);
    for (int slot = 0; slot < PANEL; slot++)
      if (j * PANEL + slot < first || j * PANEL + slot >= last)
        for (int d = 0; d < dim; d++) v[v_at<T>(slot, d, dim)] = T{};
  }

  // Slots first .. last - 1 of a panel that begins at position ``at``, from a store without panels.
  template <class E> void rows(const int32_t* table, int head, int at, int first, int last, T* k, T* v) {
    for (int slot = first; slot < last; slot++) {
      const int64_t row = store_.at(table[(at + slot) / store_.block_size], head, (at + slot) % store_.block_size);
      for (int d = 0; d < dim; d++) k[k_at<T>(slot, d)] = as(T{}, ((const E*)store_.k)[row + d]);
      for (int d = 0; d < dim; d++) v[v_at<T>(slot, d, dim)] = as(T{}, ((const E*)store_.v)[row + d]);
    }
  }

  void gather_scales(const int32_t* table, int head, int split, int first, int last) {
    const int size = store_.block_size, base = split * SPLIT;
    for (int i = first, n; i < last; i += n) {
      n = std::min(last - i, size - (base + i) % size);  // to the end of a block
      const int64_t slot = store_.scale_at(table[(base + i) / size], head, (base + i) % size);
      std::copy_n(store_.k_scale + slot, n, s.keys.k_scale + i);
      std::copy_n(store_.v_scale + slot, n, s.keys.v_scale + i);
    }
  }

  // Whether the values of all keys are finite that some rows see and others do not: from .. all_from, all_to .. to.
  bool finite(int from, int all_from, int all_to, int to) const {
    if (int8) return true;
    vf poison = {};
    for (int j = from / PANEL; j * PANEL < to; j++) {
      if (j * PANEL >= all_from && (j + 1) * PANEL <= all_to) continue;
      for (int i = 0; i < PANEL * dim; i += LANES) poison += load(s.keys.v[j] + i) * splat(0.f);
    }
    return sum(poison) == 0;
  }
};

// What each thread of a team does: all of them are to come here.
template <class T> void share(const Call& call) {
  Plan& plan = call.plan;
  const int n_kv_heads = call.store.n_kv_heads, n = (int)plan.tasks.size() * n_kv_heads, n_merges = (int)plan.merged.size() * n_kv_heads;
  static thread_local Scratch<T> scratch;
  Worker<T> worker(call, scratch);
#pragma omp for schedule(dynamic, 1)
  for (int i = 0; i < n; i++) worker.run(plan.tasks[i / n_kv_heads], i % n_kv_heads);
  if (n_merges) {
#pragma omp for schedule(static)
    for (int i = 0; i < n_merges; i++) worker.merge_partials(plan.tiles[plan.merged[i / n_kv_heads]], i % n_kv_heads);
  }
}

template <class T> void attention(const Call& call) {
#pragma omp parallel if (call.plan.tasks.size() * call.store.n_kv_heads > 1)
  share<T>(call);
}

}  // namespace

// q [n_tokens][q_stride], out [n_tokens][n_heads * head_dim]; head_dim a multiple of 32 up to 256; softcap 0: none. The ``share``
// of it is for a team of threads, all of which call it; when it returns all of it is done.
#define HW_ATTENTION(T, NAME)                                                                                              \
  HW_API void hw_attention_##NAME(const Store* store, const Step* step, Plan* plan, const void* q, int64_t q_stride,       \
                                  void* out, float scale, float softcap) {                                                 \
    attention<T>({*store, *step, *plan, q, q_stride, out, scale, softcap});                                                \
  }                                                                                                                        \
  HW_API void hw_attention_share_##NAME(const Store* store, const Step* step, Plan* plan, const void* q, int64_t q_stride, \
                                        void* out, float scale, float softcap) {                                           \
    share<T>({*store, *step, *plan, q, q_stride, out, scale, softcap});                                                    \
  }

HW_ATTENTION(bf16, bfloat16)
HW_ATTENTION(float, float32)
