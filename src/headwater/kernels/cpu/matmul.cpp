// Matrix products: out [rows][N] = x [rows][K] times a packed weight (linear.h), times scales, plus a bias.
//
// A row's bits depend on nothing but that row: every output is one chain of sums over K in ascending order, of the same
// instruction however many rows there are (AMX tiles even for one row: memory is slower than they are), and no sum ever
// reads another row. How rows are cut into blocks and tiles, where K is cut, and which thread does what change no bit.
#include <algorithm>
#include <array>

#include "activations.h"
#include "amx.h"
#include "gates.h"

using namespace hw;

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int VECTOR_ROWS = 12;  // of a tile: 24 sums, 2 vectors of weights and 1 of activations in 32 registers
#else
constexpr int VECTOR_ROWS = 6;  // in 16 registers
#endif
#if defined(__AMX_TILE__)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif
constexpr int AMX_ROWS = 32;
constexpr int BLOCK_ROWS = 256;    // stay in a core's second cache while panels pass: 22 tiles of up to 12, 8 of 32
constexpr int CHUNK_DWORDS = 288;  // of K of a panel, 36 KB: stay in its first cache while a block of rows passes
constexpr int WIDEN_DWORDS = 64;   // the same for few rows and an int8 panel that is to be widened first
constexpr int FEW_ROWS = 4;        // wait for memory, not for sums
constexpr int AHEAD = 8192;        // bytes of the panels that are fetched before they are needed

// ---- what a product multiplies, a dword of activations by a dword of weights ---------------------------------

struct F32Kind {
  typedef vf Sum;
  static constexpr bool TILES = false;
  static HW_INLINE void dot(vf& sum, vi a, vi b) { sum = fma((vf)a, (vf)b, sum); }
};
struct Bf16Kind {
  typedef vf Sum;
  static constexpr bool TILES = AMX;
  static HW_INLINE void dot(vf& sum, vi a, vi b) { dot_bf16(sum, a, b); }
#if defined(__AMX_TILE__)
  template <int C, int A, int B> static HW_INLINE void dot_tiles() { amx::dot_bf16<C, A, B>(); }
#endif
};
struct Int8Kind {  // activations 0..255, weights -127..127
  typedef vi Sum;
  static constexpr bool TILES = AMX;
  static HW_INLINE void dot(vi& sum, vi a, vi b) { dot_u8s8(sum, a, b); }
#if defined(__AMX_TILE__)
  template <int C, int A, int B> static HW_INLINE void dot_tiles() { amx::dot_u8s8<C, A, B>(); }
#endif
};

// Activations as dwords; ``stride`` in bytes.
struct Rows {
  const char* first;
  int64_t stride;
  HW_INLINE const char* operator[](int64_t r) const { return first + r * stride; }
};

// ---- tiles: sums [rows][32] = (0 or sums) + rows times a panel -------------------------------------------------

template <class Kind, int R>
void add_vectors(Rows a, const int32_t* panel, int64_t n_dwords, int32_t* sums, bool from_zero) {
  typedef typename Kind::Sum Sum;
  for (int column = 0; column < COLUMNS; column += 2 * LANES) {
    const int32_t* b = panel + column;
    int32_t* to = sums + column;
    Sum c[R][2] = {};
    if (!from_zero)
      repeat<R>([&](auto r) {
        c[r][0] = load_as<Sum>(to + r * COLUMNS);
        c[r][1] = load_as<Sum>(to + r * COLUMNS + LANES);
      });
    for (int64_t d = 0; d < n_dwords; d++, b += COLUMNS) {
      if (R <= FEW_ROWS) {
        __builtin_prefetch((const char*)b + AHEAD, 0, 2);
        if (LANES == 16) __builtin_prefetch((const char*)b + AHEAD + 64, 0, 2);
      }
      vi b0 = load_as<vi>(b), b1 = load_as<vi>(b + LANES);
      repeat<R>([&](auto r) {
        vi x = splat(load_as<int32_t>(a[r] + 4 * d));
        Kind::dot(c[r][0], x, b0);
        Kind::dot(c[r][1], x, b1);
      });
    }
    repeat<R>([&](auto r) {
      std::memcpy(to + r * COLUMNS, &c[r][0], sizeof(Sum));
      std::memcpy(to + r * COLUMNS + LANES, &c[r][1], sizeof(Sum));
    });
  }
}

typedef void (*AddVectors)(Rows, const int32_t*, int64_t, int32_t*, bool);
template <class Kind, int... r>
constexpr std::array<AddVectors, sizeof...(r)> by_rows(std::integer_sequence<int, r...>) {
  return {&add_vectors<Kind, r + 1>...};
}

#if defined(__AMX_TILE__)
// 32 columns of up to 16 rows, or of up to 32 (TWO). The tiles are configured for the rows there are.
template <class Kind, bool TWO>
void add_tiles(Rows a, const int32_t* panel, int64_t n_dwords, int32_t* sums, bool from_zero) {
  constexpr int64_t PITCH = 4 * COLUMNS;
  int32_t* lower = sums + 16 * COLUMNS;
  if (from_zero) {
    amx::zero<0>(), amx::zero<1>();
    if (TWO) amx::zero<2>(), amx::zero<3>();
  } else {
    amx::load<0>(sums, PITCH), amx::load<1>(sums + 16, PITCH);
    if (TWO) amx::load<2>(lower, PITCH), amx::load<3>(lower + 16, PITCH);
  }
  alignas(64) int32_t near[STEP * COLUMNS];
  for (int64_t d = 0; d < n_dwords; d += STEP, panel += STEP * COLUMNS) {
    // Few rows are bound by memory: vectors read it ahead and in order, which a tile does not (30 against 37 GB/s).
    if (!TWO)
      for (int i = 0; i < STEP * COLUMNS; i += LANES) {
        __builtin_prefetch((const char*)(panel + i) + AHEAD, 0, 2);
        store((float*)near + i, load((const float*)panel + i));
      }
    const int32_t* b = TWO ? panel : near;
    if (TWO) amx::load_once<4>(a.first + 4 * d, a.stride);
    else amx::load<4>(a.first + 4 * d, a.stride);  // few rows: they stay, and panels pass
    amx::load<6>(b, PITCH);
    Kind::template dot_tiles<0, 4, 6>();
    amx::load<7>(b + 16, PITCH);
    Kind::template dot_tiles<1, 4, 7>();
    if (TWO) {
      amx::load_once<5>(a[16] + 4 * d, a.stride);
      Kind::template dot_tiles<2, 5, 6>();
      Kind::template dot_tiles<3, 5, 7>();
    }
  }
  amx::store<0>(sums, PITCH), amx::store<1>(sums + 16, PITCH);
  if (TWO) amx::store<2>(lower, PITCH), amx::store<3>(lower + 16, PITCH);
}
#endif

// What a thread needs for its tiles.
template <class Kind>
class Tiles {
 public:
  static constexpr int ROWS = Kind::TILES ? AMX_ROWS : VECTOR_ROWS;
#if defined(__AMX_TILE__)
  ~Tiles() {
    if (configured) amx::release();
  }
#endif
  void add(Rows a, int rows, const int32_t* panel, int64_t n_dwords, int32_t* sums, bool from_zero) {
    if constexpr (!Kind::TILES) {
      static constexpr auto ADD = by_rows<Kind>(std::make_integer_sequence<int, VECTOR_ROWS>{});
      ADD[rows - 1](a, panel, n_dwords, sums, from_zero);
    }
#if defined(__AMX_TILE__)
    if constexpr (Kind::TILES) {
      if (rows != configured) amx::configure(std::min(rows, 16), std::max(rows - 16, 1));
      configured = rows;
      if (rows > 16) add_tiles<Kind, true>(a, panel, n_dwords, sums, from_zero);
      else add_tiles<Kind, false>(a, panel, n_dwords, sums, from_zero);
    }
#endif
  }

 private:
  int configured = 0;
};

// Of ``left`` rows, how many come next so that all tiles have about equally many, at most ``most``.
HW_INLINE int64_t even_share(int64_t left, int64_t most) {
  int64_t tiles = (left + most - 1) / most;
  return (left + tiles - 1) / tiles;
}

// ---- int8 weights that are multiplied by other activations ---------------------------------------------------

// The k-th byte of each dword as a float.
template <int k>
HW_INLINE vf byte_of(vi v) { return __builtin_convertvector((v << (24 - 8 * k)) >> 24, vf); }

// ``n`` dwords of floats or pairs of bf16 from a panel of int8. All are exact.
template <class Kind>
void widen_panel(const int32_t* from, int64_t n, int32_t* to) {
  constexpr bool FLOATS = std::is_same_v<Kind, F32Kind>;
  for (; n > 0; n -= FLOATS ? 4 : 2, from += COLUMNS) {
    __builtin_prefetch((const char*)from + AHEAD, 0, 2), __builtin_prefetch((const char*)from + AHEAD + 64, 0, 2);
    for (int c = 0; c < COLUMNS; c += LANES) {
      vi v = load_as<vi>(from + c);
      if constexpr (FLOATS)
        repeat<4>([&](auto k) { store((float*)to + k * COLUMNS + c, byte_of<k>(v)); });
      else
        repeat<2>([&](auto k) {
          vu low = (vu)byte_of<2 * k>(v) >> 16, high = (vu)byte_of<2 * k + 1>(v) & 0xffff0000u;
          store((float*)to + k * COLUMNS + c, (vf)(low | high));
        });
    }
    to += (FLOATS ? 4 : 2) * COLUMNS;
  }
}

// ---- the product -------------------------------------------------------------------------------------------------

struct Call {
  const Linear& w;
  Rows rows;               // as the product wants them
  const float* row_scale;  // of quantised rows
};

// Where results go: the first of the block's rows and of the panel's columns, and from a row to the next, in elements.
struct Target {
  void* first;
  int64_t pitch;
};

// Sums of ``n_rows`` rows from ``row``, columns from ``column``, to results.
template <class Kind, class Out>
void finish(const Call& call, const int32_t* sums, int64_t row, int64_t n_rows, int64_t column, Out* to, int64_t pitch) {
  const Linear& w = call.w;
  int64_t columns = std::min<int64_t>(COLUMNS, w.n - column);
  Out last[AMX_ROWS][COLUMNS];
  int64_t to_pitch = columns == COLUMNS ? pitch : COLUMNS;
  Out* here = columns == COLUMNS ? to : last[0];
  for (int c = 0; c < COLUMNS; c += 2 * LANES) {
    vf scale[2], bias[2];
    vi offset[2];
    repeat<2>([&](auto j) {
      const int64_t at = column + c + j * LANES;
      scale[j] = load(w.scale + at), bias[j] = load(w.bias + at), offset[j] = load_as<vi>(w.offset + at);
    });
    for (int64_t r = 0; r < n_rows; r++) {
      vf v[2];
      repeat<2>([&](auto j) {
        const vi sum = load_as<vi>(sums + r * COLUMNS + c + j * LANES);
        if constexpr (std::is_same_v<Kind, Int8Kind>)
          v[j] = __builtin_convertvector(sum - offset[j], vf) * (splat(call.row_scale[row + r]) * scale[j]);
        else v[j] = (vf)sum * scale[j];
        v[j] += bias[j];
      });
      store_pair(here + r * to_pitch + c, v[0], v[1]);
    }
  }
  if (columns < COLUMNS)
    for (int64_t r = 0; r < n_rows; r++) std::memcpy(to + r * pitch, last[r], columns * sizeof(Out));
}

// A block of rows times a panel.
template <class Kind>
void multiply(Tiles<Kind>& tiles, const Call& call, int64_t row, int64_t end, int64_t panel, Target out) {
  const Linear& w = call.w;
  const int32_t* weights = (const int32_t*)w.panels + panel * dwords(w.weight, w.k) * COLUMNS;
  int64_t n_dwords = dwords(w.product, w.k);
  bool widen = w.weight != w.product;
  int64_t chunk = widen && end - row <= AMX_ROWS ? WIDEN_DWORDS : CHUNK_DWORDS;
  alignas(64) int32_t wide[CHUNK_DWORDS * COLUMNS], sums[BLOCK_ROWS * COLUMNS];
  for (int64_t d = 0, n; d < n_dwords; d += n) {
    n = round_up(even_share(n_dwords - d, chunk), STEP);
    const int32_t* b = weights + d * COLUMNS;
    if (widen) {
      widen_panel<Kind>(weights + d * elements(w.product) / elements(INT8) * COLUMNS, n, wide);
      b = wide;
    }
    for (int64_t at = row, rows; at < end; at += rows) {
      rows = even_share(end - at, tiles.ROWS);
      int32_t* to = sums + (n == n_dwords ? 0 : at - row) * COLUMNS;
      tiles.add({call.rows[at] + 4 * d, call.rows.stride}, (int)rows, b, n, to, d == 0);
      if (d + n < n_dwords) continue;
      const int64_t first = (at - row) * out.pitch, column = panel * COLUMNS;
      if (w.out == BF16) finish<Kind>(call, to, at, rows, column, (bf16*)out.first + first, out.pitch);
      else finish<Kind>(call, to, at, rows, column, (float*)out.first + first, out.pitch);
    }
  }
}

// A block of rows times a panel of the first half of the columns and the same of the second, rounded, and gated: what would
// be written for another operation to read stays in a near cache.
template <class Kind, class T>
void multiply_gated(Tiles<Kind>& tiles, const Call& call, int64_t row, int64_t end, int64_t panel, Gate gate, Target out) {
  alignas(64) T halves[2][BLOCK_ROWS * COLUMNS];
  for (int64_t i = 0; i < 2; i++)
    multiply(tiles, call, row, end, panel + i * call.w.n / 2 / COLUMNS, {halves[i], COLUMNS});
  for (int64_t r = 0; r < end - row; r++) {
    const T *first = halves[0] + r * COLUMNS, *second = halves[1] + r * COLUMNS;
    T* to = (T*)out.first + r * out.pitch;
    if (gate == SILU) gate_row(first, second, COLUMNS, Silu{}, to);
    else gate_row(first, second, COLUMNS, GeluTanh{}, to);
  }
}

// The rows are made ready by all threads, then blocks of them and panels are shared out. ``gate``: out has half the columns.
template <class Kind>
void run(const Linear& w, const char* x, int64_t row_bytes, int64_t n_rows, void* out, Gate gate) {
  static thread_local Buffer<char> staged_memory;
  static thread_local Buffer<float> scale_memory;
  bool staging = !as_they_lie(w);
  char* staged = staging ? staged_memory.of(n_rows * pitch(w)) : nullptr;
  float* scales = staging ? scale_memory.of(n_rows) : nullptr;
  Rows rows = staging ? Rows{staged, pitch(w)} : Rows{x, row_bytes};
  Call call{w, rows, scales};
  int64_t out_columns = gate ? w.n / 2 : w.n, size = w.out == BF16 ? sizeof(bf16) : sizeof(float);
  int64_t n_panels = (out_columns + COLUMNS - 1) / COLUMNS;
  int64_t n_blocks = (n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;  // all of about equally many rows
#pragma omp parallel
  {
    if (staging) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < n_rows; r++) {
        const char* row = x + r * row_bytes;
        char* to = staged + r * pitch(w);
        scales[r] = w.compute == BF16 ? stage(w, (const bf16*)row, to) : stage(w, (const float*)row, to);
      }
    }
    Tiles<Kind> tiles;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < n_blocks * n_panels; i++) {
      int64_t block = i / n_panels, panel = i % n_panels;
      int64_t row = block * n_rows / n_blocks, end = (block + 1) * n_rows / n_blocks;
      Target to{(char*)out + (row * out_columns + panel * COLUMNS) * size, out_columns};
      if (!gate) multiply(tiles, call, row, end, panel, to);
      else if (w.out == BF16) multiply_gated<Kind, bf16>(tiles, call, row, end, panel, gate, to);
      else multiply_gated<Kind, float>(tiles, call, row, end, panel, gate, to);
    }
  }
}

void product(const Linear& w, const void* x, int64_t row_bytes, int64_t n_rows, void* out, Gate gate) {
  if (w.product == INT8) run<Int8Kind>(w, (const char*)x, row_bytes, n_rows, out, gate);
  else if (w.product == BF16) run<Bf16Kind>(w, (const char*)x, row_bytes, n_rows, out, gate);
  else run<F32Kind>(w, (const char*)x, row_bytes, n_rows, out, gate);
}

}  // namespace

// out [n_rows][N] (w.out) = x [n_rows][K] (w.compute; rows row_bytes apart) times the weight.
HW_API void hw_linear(const Linear* w, const void* x, int64_t row_bytes, int64_t n_rows, void* out) {
  product(*w, x, row_bytes, n_rows, out, NONE);
}

// out [n_rows][N / 2] = act(first half of the product) * second half, with the bits of the two operations one after the
// other; N / 2 is a multiple of COLUMNS.
HW_API void hw_gated_linear(const Linear* w, const void* x, int64_t row_bytes, int64_t n_rows, int32_t gate, void* out) {
  product(*w, x, row_bytes, n_rows, out, (Gate)gate);
}
