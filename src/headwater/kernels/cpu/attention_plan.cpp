#include "attention_plan.h"

#include <algorithm>

namespace {
using namespace hw;

constexpr int WHOLE_TASKS_PER_THREAD = 4;

struct Piece {  // a split of a tile
  int tile, split;
};

class Planner {
 public:
  Planner(Plan& plan, const Step& step, int n_kv_heads, int n_threads)
      : plan(plan), step(step), n_kv_heads(n_kv_heads), n_threads(n_threads) {}

  void run(bool share) {
    for (int row = 0; row < step.n_rows; row++) add(row);
    if (share) share_splits();
    for (const Piece& p : pieces) task({p.tile}, p.split, 1, true);
    // the longest first, so that threads end together
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    plan.partials.reset(new float[n_partials * (plan.head_dim + 2)]);
  }

 private:
  Plan& plan;
  const Step& step;
  int n_kv_heads, n_threads;
  std::vector<Piece> pieces;
  int64_t n_partials = 0;

  // A row of many tiles keeps the threads busy tile by tile; of a few, split by split.
  void add(int row) {
    const int begin = step.query_start[row], n = step.query_start[row + 1] - begin, position = step.context_len[row] - n;
    const int size = std::max(1, MAX_ROWS / plan.group), n_tiles = (n + size - 1) / size;
    const bool whole = n_tiles * n_kv_heads >= WHOLE_TASKS_PER_THREAD * n_threads;
    for (int at = 0; at < n; at += size) {
      Tile tile{row, begin + at, position + at, std::min(size, n - at), n_partials};
      const int id = (int)plan.tiles.size(), first = plan.first_split(tile), n_splits = plan.n_splits(tile);
      plan.tiles.push_back(tile);
      if (whole || n_splits == 1) {
        task({id}, first, n_splits, false);
        continue;
      }
      for (int split = first; split < first + n_splits; split++) pieces.push_back({id, split});
      plan.merged.push_back(id);
      n_partials += (int64_t)n_splits * n_kv_heads * tile.n * plan.group;
    }
  }

  void task(const std::vector<int>& tiles, int split, int n_splits, bool partial) {
    plan.tasks.push_back({(int)plan.members.size(), (int)tiles.size(), split, n_splits, partial});
    plan.members.insert(plan.members.end(), tiles.begin(), tiles.end());
  }

  int64_t cost(const Task& t) const {
    int64_t n = 0;
    for (int i = 0; i < t.n_members; i++) n += plan.tiles[plan.members[t.first_member + i]].n;
    return n * t.n_splits;
  }

  // Whether all queries see all keys of the split.
  bool sees_all(const Piece& p) const {
    const Tile& tile = plan.tiles[p.tile];
    return tile.position >= (p.split + 1) * SPLIT - 1 && plan.seen_from(tile.last()) <= p.split * SPLIT;
  }

  // Less, equal or greater (as memcmp): pieces that are equal read the same slots.
  int compare(const Piece& a, const Piece& b) const {
    if (a.split != b.split) return a.split - b.split;
    const int first = a.split * SPLIT / step.block_size, last = ((a.split + 1) * SPLIT - 1) / step.block_size;
    const int32_t *x = step.table(plan.tiles[a.tile].row), *y = step.table(plan.tiles[b.tile].row);
    return std::memcmp(x + first, y + first, (last - first + 1) * sizeof *x);
  }

  // Takes the pieces that all see the same whole split out, as tasks.
  void share_splits() {
    const auto rest = std::stable_partition(pieces.begin(), pieces.end(), [&](const Piece& p) { return sees_all(p); });
    std::stable_sort(pieces.begin(), rest, [&](const Piece& a, const Piece& b) { return compare(a, b) < 0; });
    std::vector<int> together;
    for (auto p = pieces.begin(); p != rest;) {
      const Piece& first = *p;
      int n = 0;
      together.clear();
      do {
        together.push_back(p->tile);
        n += plan.tiles[p->tile].n;
        p++;
      } while (p != rest && compare(first, *p) == 0 && (n + plan.tiles[p->tile].n) * plan.group <= MAX_ROWS);
      task(together, first.split, 1, true);
    }
    pieces.erase(pieces.begin(), rest);
  }
};

}  // namespace

// For the layers of one group with one window (the largest int: none). To be freed with hw_plan_free.
HW_API Plan* hw_plan(const Step* step, int n_heads, int n_kv_heads, int head_dim, int window, int n_threads, int share) {
  Plan* plan = new Plan{n_heads / n_kv_heads, window, n_heads, head_dim, {}, {}, {}, {}, {}};
  Planner(*plan, *step, n_kv_heads, n_threads).run(share);
  return plan;
}

HW_API void hw_plan_free(Plan* plan) { delete plan; }
