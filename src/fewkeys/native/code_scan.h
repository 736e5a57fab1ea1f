// The keys with the largest scores for each query, by codes of two bits a number. `fewkeys.sketch.codes` has the
// equations.
//
// A query scores all earlier keys, piece by piece in ascending order, and stores the scores of one piece. To keep the
// list of candidates short, a sample of the blocks is scored first. It gives a bound that more than `count` keys are
// expected to exceed. If fewer do, all keys are scored again without a bound, so the choice is exact.
#pragma once
#include <optional>

#include "byte_scores.h"

namespace fewkeys {

// At most TILE queries that choose among the first `seen` keys of a key head. The queries start .. stop - 1 of all its
// query heads are numbered head after head; these are `first` .. first + rows - 1 of them.
struct Asking {
  int64_t seen, start, stop, first;
  int rows;
  int64_t head(int i) const { return (first + i) / (stop - start); }  // among the query heads of the key head
  int64_t query(int i) const { return start + (first + i) % (stop - start); }
  template <class T>
  const T *row(const Scan &p, int64_t key_head, int i) const {
    return p.query.at<T>(key_head * p.gqa_ratio + head(i), query(i));
  }
};
static inline std::vector<Asking> asking(const Scan &p) {
  std::vector<Asking> all;
  for (int64_t start = 0, stop; start < p.queries; start = stop) {
    for (stop = start + 1; stop < p.queries && stop - start < CODED && p.seen[stop] == p.seen[start];) stop++;
    const int64_t many = p.gqa_ratio * (stop - start);
    for (int64_t first = 0; first < many; first += TILE)
      all.push_back({p.seen[start], start, stop, first, (int)std::min<int64_t>(TILE, many - first)});
  }
  return all;
}

// Chooses keys for tiles of queries; the working memory of one thread.
template <class T>
class Scanner {
 public:
  Largest lists[TILE];  // the best keys of each query of a tile

  explicit Scanner(const Scan &p) : p(p), turned(p.wide), query(TILE * p.wide), scores(1) {}

  // Writes the best keys of each query to `best`: of all that the tile sees, or of part `part` of `parts` equal parts.
  void choose(int64_t head, const Asking &tile, Largest *best, int64_t part = 0, int64_t parts = 1) {
    for (int i = 0; i < tile.rows; i++)
      round_query(tile.row<T>(p, head, i), p.dim, p.wide, p.sign, turned.data(), &query[i * p.wide]);
    const int64_t blocks = divide_up(tile.seen, CODED);
    this->best = best, first = blocks * part / parts, last = blocks * (part + 1) / parts;
#ifdef FEWKEYS_MATRIX
    if (tile.rows > FEW && MatrixScores::is_there()) return choose(matrix, head, tile);
#endif
#ifdef FEWKEYS_LEVELS
    if (tile.rows > FEW) return choose(vectors, head, tile);
#endif
    choose(tables, head, tile);
  }

 private:
  static constexpr int FEW = 4;
  static constexpr int SAMPLED = 16;  // the sample is one block of 16, taken where there are 16 times `count` keys
  const Scan &p;
  Floats turned;
  aligned_vector<int8_t> query;
  aligned_vector<PieceScores> scores;
  std::optional<TableScores> tables;
#ifdef FEWKEYS_LEVELS
  std::optional<VectorScores> vectors;
#endif
#ifdef FEWKEYS_MATRIX
  std::optional<MatrixScores> matrix;
#endif
  Largest *best = nullptr;
  int64_t first = 0, last = 0;  // scanned blocks: first .. last - 1

  template <class Scores>
  void choose(std::optional<Scores> &by, int64_t head, const Asking &tile) {
    if (!by) by.emplace(p.wide);
    by->set(query.data(), tile.rows);
    // With few queries most time goes into reading codes, and a short list of candidates gains nothing.
    const int64_t keys = std::min(last * CODED, tile.seen) - first * CODED;
    const bool many = tile.rows > FEW && keys >= SAMPLED * p.count;
    if (many) {
      // Twice the share of `count` in the sample, so that a query rarely has fewer than `count` keys above the bound.
      for (int i = 0; i < tile.rows; i++) best[i].begin(2 * p.count / SAMPLED + 8);
      scan(*by, head, tile, SAMPLED, true);
    }
    for (int i = 0; i < tile.rows; i++) best[i].begin(p.count, many ? best[i].reached() : INT16_MIN);
    scan(*by, head, tile, 1, !many);
    bool again = false;
    for (int i = 0; many && i < tile.rows; i++) {
      const bool lacks = best[i].finish() < std::min(p.count, keys) && best[i].bound() > INT16_MIN;
      lacks ? best[i].begin(p.count) : best[i].close();
      again |= lacks;
    }
    if (again) scan(*by, head, tile, 1, true);
  }

  // Scores the keys that a tile sees: of every `step` blocks one, at a pseudo-random place among them. `dense`: most
  // blocks have scores above the bound.
  template <class Scores>
  void scan(Scores &by, int64_t head, const Asking &tile, int step, bool dense) {
    const uint8_t *real = real_keys(p.real, p.packed, head, p.keys);
    Piece piece = {p.packed.at<uint8_t>(head, 0), p.sigma.at<int16_t>(head, 0), 0, {}};
    PieceScores &of = scores[0];
    for (int64_t next = first; next < last;) {
      uint32_t shown[TOGETHER];
      for (piece.blocks = 0; piece.blocks < Scores::AT_ONCE && next < last; next += step) {
        const int64_t block = step > 1 ? next + (next * 0x9e3779b1u >> 16) % step : next;
        if (block >= last) continue;
        shown[piece.blocks] = shown_of(real, block, tile.seen);
        piece.block[piece.blocks++] = block;
      }
      int16_t bound[TILE] = {};
      for (int i = 0; i < tile.rows; i++) bound[i] = best[i].bound();
      by.write(piece, bound, of);
      const auto add = [&](int i, int b) {
        best[i].add(of.score[b][i], piece.block[b], of.above[b][i] & shown[b]);
      };
      // A mask of the blocks of a query, or of the queries of a block, that have scores above the bound, without
      // branches.
      for (int i = 0; dense && i < tile.rows; i++) {
        uint32_t mask = 0;
        for (int b = 0; b < piece.blocks; b++) mask |= (uint32_t)((of.above[b][i] & shown[b]) != 0) << b;
        for (; mask; mask &= mask - 1) add(i, __builtin_ctz(mask));
      }
      for (int b = 0; !dense && b < piece.blocks; b++)
        for (uint32_t mask = that_have(of.above[b], shown[b]) & ~0u >> (TILE - tile.rows); mask; mask &= mask - 1)
          add(__builtin_ctz(mask), b);
    }
  }

  // One bit for each key of a block: 1 if the tile sees it and it is not padding.
  static uint32_t shown_of(const uint8_t *real, int64_t block, int64_t seen) {
    const int64_t first = block * CODED, left = std::min<int64_t>(CODED, seen - first);
    uint32_t shown = left < CODED ? (1u << left) - 1 : UINT32_MAX;
    for (int i = 0; real && i < left; i++)
      if (!real[first + i]) shown &= ~(1u << i);
    return shown;
  }
};

// Calls `run(worker, head, tile, tiles)` for the tiles of all key heads, at most `together` tiles of a head at once.
template <class NewWorker, class Run>
static void by_tiles(const Scan &p, int threads, int64_t together, NewWorker new_worker, Run run) {
  const std::vector<Asking> all = asking(p);
  const int64_t heads = p.heads / p.gqa_ratio, count = all.size();
  // At least four portions for every thread, so that threads end at about the same time.
  together = std::clamp<int64_t>(count * heads / (4 * team_size(threads)), 1, together);
  const int64_t each = divide_up(count, together);
  in_parallel(threads, heads * each, new_worker, [&](auto &worker, int64_t t) {
    const int64_t first = t % each * together;
    run(worker, t / each, &all[first], (int)std::min(together, count - first));
  });
}

template <class T>
static void scan_codes(const Scan &p, int threads) {
  by_tiles(
      p, threads, 1, [&] { return Scanner<T>(p); },
      [&](Scanner<T> &scanner, int64_t head, const Asking *tile, int) {
        scanner.choose(head, *tile, scanner.lists);
        for (int i = 0; i < tile->rows; i++) {
          Largest &best = scanner.lists[i];
          const int64_t query_head = head * p.gqa_ratio + tile->head(i);
          int32_t *to = p.index + (query_head * p.queries + tile->query(i)) * p.count;
          const int64_t count = best.finish();
          std::copy_n(best.places(), count, to);
          std::fill(to + count, to + p.count, -1);
        }
      });
}

}  // namespace fewkeys
