// Attention to the lists and stand-ins of cohorts of queries and to a window around each query. It is `near.h` for
// cohorts; `fewkeys.rest.base.CohortStandIns` has the equations.
#pragma once
#include "neighbours.h"

namespace fewkeys {

template <class T>
class CohortAttention {
 public:
  explicit CohortAttention(const Near &p)
      : p(p), query(p.dim * TILE), mixed(TILE * round_up(p.value_dim)), weights(p), shared(p), neighbours(p) {}

  // Attends with TILE queries of a cohort, from the entry `first` of its order on, and stores the partial results.
  // `head`: the cohort, numbered through all sequences.
  void attend(Surroundings &around, int64_t head, int64_t first) {
    const int64_t b = head / p.heads, h = head % p.heads;
    const int rows = gather(b, h, first, std::min<int64_t>(TILE, p.queries - first));
    if (!rows) return;
    around.expect(row, rows);
    if (held != head) shared.read(b, h), held = head;
    const int columns = p.entries + p.means + p.rank;
    to_lanes(asking, rows, p.dim, 1.0f, query.data());
    shared.columns.dots(query.data(), columns, weights.score.data());

    Tile tile(p.scale);
    weights.weigh_cohort(tile, head, [&](float *mass) { neighbours.look(around, head, place, rows, mass); });
    weights.weigh_first_order(head);

    std::fill(mixed.begin(), mixed.end(), 0.0f);
    shared.columns.mix(weights.score.data(), columns, rows, mixed.data());
    around.keep(tile, mixed.data(), row, rows);
  }

 private:
  const Near &p;
  aligned_vector<float> query, mixed;
  NearWeights weights;
  Shared<T> shared;
  int64_t held = -1;  // the cohort that `shared` holds
  Neighbours neighbours;
  const T *asking[TILE];
  int64_t row[TILE], place[TILE];  // numbers of the queries among all of the key head, and their positions

  // Collects the queries among `count` entries of the cohort's order; returns their number.
  int gather(int64_t b, int64_t h, int64_t first, int count) {
    const int64_t *members = p.order + (b * p.heads + h) * p.queries + first;
    int queries = 0;
    for (int i = 0; i < count; i++) {
      if (members[i] < 0) continue;
      const int64_t head = h / p.cohorts * p.asking + members[i] / p.asked, at = members[i] % p.asked;
      row[queries] = members[i], place[queries] = at;
      asking[queries++] = p.query.at<T>(b, head, at);
    }
    return queries;
  }
};

// A unit is a key head of a sequence. With many units each thread takes whole units.
template <class T>
static void attend_cohorts(const Near &p, int threads) {
  const int64_t units = p.batch * p.heads / p.cohorts, tiles = (p.queries + TILE - 1) / TILE;
  const int64_t band_tiles = (p.asked + TILE - 1) / TILE * p.asking;
  typedef BandAttention<T> Band;
  typedef CohortAttention<T> Attention;
  const auto attend_tile = [&](Attention &attention, Surroundings &around, int64_t unit, int64_t i) {
    attention.attend(around, unit * p.cohorts + i / tiles, i % tiles * TILE);
  };
  const auto attend_band = [&](Band &band, const Surroundings &around, int64_t unit, int64_t i) {
    const int64_t first = i / p.asking * TILE, head = i % p.asking, heads = p.heads / p.cohorts;
    band.attend(around, unit / heads, unit % heads * p.asking + head, first, head * p.asked + first);
  };
  if (units >= 4 * threads) {
    struct Worker {
      Surroundings around;
      Attention attention;
      Band band;
      explicit Worker(const Near &p) : around(p), attention(p), band(p) {}
    };
    return in_parallel(threads, units, [&] { return Worker(p); }, [&](Worker &worker, int64_t unit) {
      worker.around.read(p, unit * p.cohorts);
      for (int64_t i = 0; i < tiles * p.cohorts; i++) attend_tile(worker.attention, worker.around, unit, i);
      for (int64_t i = 0; i < band_tiles; i++) attend_band(worker.band, worker.around, unit, i);
    });
  }
  // With few units all threads share each, one unit after the other in the same memory.
  Surroundings around(p);
  for (int64_t unit = 0; unit < units; unit++) {
    around.read(p, unit * p.cohorts);
    in_parallel(threads, tiles * p.cohorts, [&] { return Attention(p); }, [&](Attention &attention, int64_t i) {
      attend_tile(attention, around, unit, i);
    }, 4);
    in_parallel(threads, band_tiles, [&] { return Band(p); }, [&](Band &band, int64_t i) {
      attend_band(band, around, unit, i);
    }, 4);
  }
}

template <class T>
static void attend(const Near &p, int threads) {
  p.order ? attend_cohorts<T>(p, threads) : attend_near<T>(p, threads);
}

}  // namespace fewkeys
