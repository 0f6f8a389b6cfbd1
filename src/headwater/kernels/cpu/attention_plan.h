// How a step's attention is cut into tasks. Bits do not depend on it: what is added to what, and in which order, follows
// from a query's position alone (attention.cpp).
#pragma once

#include <memory>
#include <vector>

#include "paged.h"

namespace hw {

constexpr int SPLIT = 512;     // keys, at absolute positions: split i holds i * SPLIT .. (i + 1) * SPLIT - 1
constexpr int MAX_ROWS = 192;  // (query, head) pairs of one KV head in a task, unless one query has more heads

struct Tile {  // queries of a row, next to each other
  int row, token, position, n;
  int64_t partial;  // where its part of Plan::partials begins, in pairs of query and head

  int last() const { return position + n - 1; }
};

struct Task {  // tiles (members first_member ... of the plan) that read the same keys: for each KV head
  int first_member, n_members, split, n_splits;
  bool partial;  // its result is for one split, and is merged with the others' later
};

struct Plan {
  int group, window, n_heads, head_dim;
  std::vector<Tile> tiles;
  std::vector<int> members;  // tiles
  std::vector<Task> tasks;
  std::vector<int> merged;            // tiles with partial results
  std::unique_ptr<float[]> partials;  // [tile][split that it sees][KV head][query][head]: o [head_dim], m, l

  // First position that a query sees.
  int seen_from(int position) const { return position < window ? 0 : position - window + 1; }
  int first_split(const Tile& t) const { return seen_from(t.position) / SPLIT; }
  int n_splits(const Tile& t) const { return t.last() / SPLIT - first_split(t) + 1; }
  float* partial(const Tile& t, int split, int kv_head, int n_kv_heads) {
    int64_t at = (int64_t)((split - first_split(t)) * n_kv_heads + kv_head) * t.n * group;
    return partials.get() + (t.partial + at) * (head_dim + 2);
  }
};

}  // namespace hw
