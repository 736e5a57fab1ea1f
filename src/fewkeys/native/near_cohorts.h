// Softmax over lists and stand-ins of cohorts of queries, and over the keys around each query: `near.h` for cohorts.
// `fewkeys.rest.base.CohortStandIns` has the equations.
#pragma once
#include "near.h"
#include "neighbours.h"

namespace fewkeys {

// A tile of queries of a cohort, which stand anywhere, and their outputs.
template <class T>
class Scattered {
 public:
  explicit Scattered(const Near &p) : out(TILE * p.value_dim), p(p) {}
  aligned_vector<T> out;
  const T *query[TILE];
  int64_t row[TILE];  // the queries' numbers among those that read the key head

  // Looks up those among `count` places that are of a query; returns how many.
  int gather(int64_t b, int64_t h, int64_t first, int count) {
    const int64_t *own = p.order + (b * p.heads + h) * p.queries + first;
    int found = 0;
    for (int i = 0; i < count; i++) {
      if (own[i] < 0) continue;
      const int64_t head = h / p.cohorts * p.asking + own[i] / p.asked, place = own[i] % p.asked;
      query[found] = p.query.at<T>(b, head, place);
      row[found] = own[i];
      to[found++] = (T *)p.out.at<T>(b, head, place);
    }
    return found;
  }
  void scatter(int count) const {
    for (int i = 0; i < count; i++) std::copy_n(&out[i * p.value_dim], p.value_dim, to[i]);
  }

 private:
  const Near &p;
  T *to[TILE];
};

template <class Products>
class CohortAttention {
 public:
  explicit CohortAttention(const Near &p)
      : p(p), query(p.dim), mixed(p.value_dim), weights(p), scattered(p), neighbours(p) {}

  // The queries of cohort h, counted through all key heads of the sequence, from the place `first` on. Where there is a
  // band, it writes the output.
  void attend(const typename Products::Columns &shared, Surroundings &around, int64_t b, int64_t h, int64_t first) {
    const int rows = scattered.gather(b, h, first, std::min<int64_t>(TILE, p.queries - first));
    if (!rows) return;
    if (has_band(p)) around.expect(scattered.row, rows);
    const int64_t head = b * p.heads + h, wide = round_up(p.value_dim);
    const int columns = p.entries + p.means + p.rank;
    query.set(scattered.query, rows);
    shared.dots(query, columns, weights.score.data());

    Tile tile(p.scale);
    weights.weigh_cohort(tile, head, [&](float *mass) {
      if (has_band(p)) neighbours.look(around, head, scattered.row, rows, mass);
    });
    weights.weigh_first_order(head);

    mixed.clear();
    shared.mix(weights.score.data(), columns, rows, Everywhere(), mixed);
    if (has_band(p)) return around.keep(tile, mixed.rows(), scattered.row, rows);
    tile.write(mixed.rows(), wide, scattered.out.data(), p.value_dim, rows, p.value_dim);
    scattered.scatter(rows);
  }

 private:
  const Near &p;
  const typename Products::Session session = {};
  typename Products::Queries query;
  typename Products::Mixed mixed;
  NearWeights weights;
  Scattered<typename Products::Number> scattered;
  Neighbours neighbours;
};

// A unit is a key head of a sequence: lists and stand-ins of its cohorts, and what its queries see around them.
template <class Products>
struct Unit {
  std::vector<Shared<Products>> shared;
  Surroundings around;

  explicit Unit(const Near &p) : shared(p.cohorts, Shared<Products>(p)), around(p) {}

  void read(const Near &p, int64_t unit) {
    const int64_t first = unit * p.cohorts;
    for (int64_t c = 0; c < p.cohorts; c++) shared[c].read(first / p.heads, first % p.heads + c);
    if (has_band(p)) around.read(p, first);
  }
};

template <class Products>
static void attend_cohorts(const Near &p, int threads) {
  const int64_t units = p.batch * p.heads / p.cohorts, tiles = (p.queries + TILE - 1) / TILE;
  const int64_t band_tiles = has_band(p) ? (p.asked + TILE - 1) / TILE * p.asking : 0;
  typedef Unit<Products> Heads;
  typedef BandAttention<typename Products::Number> Band;
  typedef CohortAttention<Products> Attention;
  // Tiles of the same number of all cohorts follow one another: they are near one another in the sequence.
  const auto attend_tile = [&](Attention &attention, Heads &of, int64_t unit, int64_t i) {
    const int64_t first = unit * p.cohorts, c = i % p.cohorts;
    attention.attend(of.shared[c].columns, of.around, first / p.heads, first % p.heads + c, i / p.cohorts * TILE);
  };
  const auto attend_band = [&](Band &band, Heads &of, int64_t unit, int64_t i) {
    const int64_t first = i / p.asking * TILE, head = i % p.asking, heads = p.heads / p.cohorts;
    band.attend(of.around, unit / heads, unit % heads * p.asking + head, first, head * p.asked + first);
  };
  if (units >= 4 * threads) {
    struct Worker {
      Heads heads;
      Attention attention;
      Band band;
      explicit Worker(const Near &p) : heads(p), attention(p), band(p, heads.around.most) {}
    };
    return in_parallel(threads, units, [&] { return Worker(p); }, [&](Worker &worker, int64_t unit) {
      worker.heads.read(p, unit);
      for (int64_t i = 0; i < tiles * p.cohorts; i++) attend_tile(worker.attention, worker.heads, unit, i);
      for (int64_t i = 0; i < band_tiles; i++) attend_band(worker.band, worker.heads, unit, i);
    });
  }
  // Else all threads share a unit, and what is known of one makes room for the next.
  Heads heads(p);
  for (int64_t unit = 0; unit < units; unit++) {
    heads.read(p, unit);
    in_parallel(threads, tiles * p.cohorts, [&] { return Attention(p); }, [&](Attention &attention, int64_t i) {
      attend_tile(attention, heads, unit, i);
    }, 4);
    in_parallel(threads, band_tiles, [&] { return Band(p, heads.around.most); }, [&](Band &band, int64_t i) {
      attend_band(band, heads, unit, i);
    }, 4);
  }
}

template <class Products>
static void attend(const Near &p, int threads) {
  p.order ? attend_cohorts<Products>(p, threads) : attend_near<Products>(p, threads);
}

}  // namespace fewkeys
