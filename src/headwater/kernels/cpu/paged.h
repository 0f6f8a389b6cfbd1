// The paged store and a step's batch as rope.cpp and attention.cpp see them. The Python side (native_attention.py)
// fills in the same structures.
//
// A block's K and V of all layers lie together, so that a layer's blocks are block_stride elements apart; in one, a head's
// slots lie together: [kv head][block_size * head_dim]. Where block_size is a multiple of 16
// they go in panels of 16 slots, in the order in which the dot products read them; a dword holds PAIR = 2 bf16 or 1 float:
//
//   K panel  [head_dim / PAIR][16 slots][PAIR dims]        V panel  [16 / PAIR][head_dim][PAIR slots]
//
// Otherwise they lie slot after slot, [block_size][head_dim]. int8 values lie where the compute type's would.
#pragma once

#include "simd.h"

namespace hw {

constexpr int PANEL = 16;  // slots
constexpr int MAX_HEAD_DIM = 256;

struct Store {  // one layer
  void *k, *v;
  float *k_scale, *v_scale;            // of a block [kv head][block_size]; null unless the values are int8
  int64_t block_stride, scale_stride;  // from a block to the next: elements of k and v, of the scales
  int32_t n_kv_heads, head_dim, block_size;

  bool panelled() const { return block_size % PANEL == 0; }
  // Where the row of a head's slot begins in k and v; its panel, if offset is a panel's first slot.
  int64_t at(int64_t block, int head, int offset) const {
    return block * block_stride + ((int64_t)head * block_size + offset) * head_dim;
  }
  int64_t scale_at(int64_t block, int head, int offset) const { return block * scale_stride + head * block_size + offset; }
};

struct Step {  // one group's part of a batch, see ops.py
  const int64_t *positions, *slots;                                        // [n_tokens]
  const int32_t *tables, *first_block, *query_start, *context_len;         // [n_rows][table_width], [n_rows] (+ 1)
  int32_t n_rows, n_tokens, table_width, block_size;

  // Such that logical block i of the row is the i-th element; those before first_block are not there.
  const int32_t* table(int row) const { return tables + (int64_t)row * table_width - first_block[row]; }
};

// Elements in a dword.
template <class T> constexpr int PAIR = 4 / sizeof(T);

// Where dimension d of a panel's slot is.
template <class T> HW_INLINE int k_at(int slot, int d) { return (d / PAIR<T> * PANEL + slot) * PAIR<T> + d % PAIR<T>; }
template <class T> HW_INLINE int v_at(int slot, int d, int head_dim) {
  return (slot / PAIR<T> * head_dim + d) * PAIR<T> + slot % PAIR<T>;
}

}  // namespace hw
