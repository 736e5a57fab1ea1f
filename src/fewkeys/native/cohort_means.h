// The stand-ins of every cohort, from the sums of `tilts.h`. `fewkeys.rest.cluster_means` has the equations.
#pragma once
#include "tile.h"

namespace fewkeys {

// The leading directions of the products of keys and values, by subspace iteration
// (`fewkeys.sketch.gram.top_subspace`).
class Subspace {
 public:
  explicit Subspace(const StandIns &p)
      : p(p), dim(p.dim), wide(p.value_dim), rank(p.rank), across(round_up(wide)),
        turned(round_up(dim) * across), square(across * across), start(rank * wide), next(rank * wide) {
    for (int64_t r = 0; r < rank; r++)
      for (int64_t e = 0; e < wide; e++) start[r * wide + e] = std::cos((e + 0.5f) * r * float(M_PI / wide));
  }

  // Writes the factors (D, r) and (r, Dv) of padded pooled products (D, Dv). metric: in tiles of columns.
  void find(const float *metric, const float *pooled, float *left, float *right) {
    std::fill(turned.begin(), turned.end(), 0.0f), std::fill(square.begin(), square.end(), 0.0f);
    for (int64_t d = 0; d < dim; d += SOME)
      mix(pooled, across, dim, across, metric + d / TILE * TILE * dim + d % TILE, TILE, &turned[d * across], across);
    for (int64_t e = 0; e < across; e += SOME)
      mix(turned.data(), across, dim, across, pooled + e, across, &square[e * across], across);
    std::copy(start.begin(), start.end(), right);
    for (int64_t step = 0; step < p.steps; step++) {
      std::fill(next.begin(), next.end(), 0.0f);
      for (int64_t r = 0; r < rank; r++)
        for (int64_t e = 0; e < wide; e++) add(&next[r * wide], &square[e * across], right[r * wide + e], wide);
      const float largest = std::sqrt(product(next.data(), next.data(), wide));
      for (int64_t r = 0; r < rank; r++) straighten(r, largest);
      std::copy(next.begin(), next.end(), right);
    }
    for (int64_t r = 0; r < rank; r++)
      for (int64_t d = 0; d < dim; d++) left[d * rank + r] = product(&pooled[d * across], right + r * wide, wide);
  }

 private:
  const StandIns &p;
  const int64_t dim, wide, rank, across;
  Floats turned, square, start, next;

  // Orthogonalises row r of `next` against the earlier rows and normalises it; zero if hardly anything is left.
  void straighten(int64_t r, float largest) {
    float *row = &next[r * wide];
    for (int twice = 0; twice < 2; twice++)
      for (int64_t other = 0; other < r; other++) {
        const float *across = &next[other * wide];
        add(row, across, -product(row, across, wide), wide);
      }
    const float length = std::sqrt(product(row, row, wide));
    const bool left = length > p.least * largest;
    for (int64_t d = 0; d < wide; d++) row[d] = left ? row[d] / length : 0.0f;
  }
};

class CohortMeans {
 public:
  explicit CohortMeans(const StandIns &p)
      : p(p), count(p.count), dim(p.dim), wide(p.value_dim), tall(round_up(dim, TILE)), across(round_up(wide)),
        ranks(round_up(p.rank, TILE)), subspace(p), pooled(tall * across),
        weighted(count * tall), values(count * across), offset(count * tall), within(dim * tall), left(dim * ranks),
        moving(dim * ranks), turned(count * tall), moved(count * ranks), start(ranks), spread(count) {}

  void represent(int64_t head) {
    for (int64_t at = head * p.cohorts * count; at < (head + 1) * p.cohorts * count; at++) {
      const float inverse = 1.0f / mass_of(at);
      for (int64_t e = at * wide; e < (at + 1) * wide; e++) p.value[e] *= inverse;
    }
    const float *metric = p.within + head * dim * dim;
    to_columns(metric, dim, within.data());
    float *first = p.left + head * p.cohorts * dim * p.rank, *right = p.right + head * p.cohorts * p.rank * wide;
    if (p.rank) {
      pool(head);
      subspace.find(within.data(), pooled.data(), first, right);
      to_columns(first, p.rank, left.data());
      for (int64_t r = 0; r < ranks; r += TILE)
        dots(metric, dim, dim, dim, &left[r * dim], &moving[r * dim], used(r));
    }
    for (int64_t h = 0; h < p.cohorts; h++) {
      if (h) std::copy_n(first, dim * p.rank, first + h * dim * p.rank);
      if (h) std::copy_n(right, p.rank * wide, right + h * p.rank * wide);
      finish(head, head * p.cohorts + h, right);
    }
  }

 private:
  const StandIns &p;
  const int64_t count, dim, wide, tall, across, ranks;
  Subspace subspace;
  Floats pooled, weighted, values, offset;
  Floats within, left, moving;  // W, the left factor, and W times the left factor, in tiles of columns
  Floats turned, moved, start, spread;

  // The number of lanes, in whole vectors, of the ranks from r on.
  int used(int64_t r) const { return round_up(std::min<int64_t>(TILE, p.rank - r), LANES); }

  // The mass, or a positive divisor for empty clusters.
  float mass_of(int64_t at) const { return std::max(p.mass[at], 1e-30f); }

  // Copies the columns of a matrix (D, width) as lanes for `dots`, TILE at a time.
  void to_columns(const float *rows, int64_t width, float *to) {
    for (int64_t e = 0; e < width; e += TILE, to += dim * TILE)
      copy_rows(rows + e, width, dim, std::min<int64_t>(TILE, width - e), TILE, to);
  }

  // pooled <- the mean of (k - key_c)(v - value_c)^T over all clusters of all cohorts.
  void pool(int64_t head) {
    std::fill(pooled.begin(), pooled.end(), 0.0f);
    float all = 0.0f;
    for (int64_t h = 0; h < p.cohorts; h++) {
      const int64_t first = (head * p.cohorts + h) * count;
      for (int64_t c = 0; c < count; c++) {
        all += p.mass[first + c];
        std::copy_n(p.key + (first + c) * dim, dim, &weighted[c * tall]);
        std::copy_n(p.value + (first + c) * wide, wide, &values[c * across]);
      }
      for (int64_t d = 0; d < tall; d += SOME)
        mix(values.data(), across, count, across, &weighted[d], tall, &pooled[d * across], across);
    }
    const float *together = p.together + head * dim * wide;
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < wide; e++) {
        float &one = pooled[d * across + e];
        one = (together[d * wide + e] - one) / std::max(all, 1e-30f);
      }
  }

  // Writes the mean keys, biases, factors and bounds of a cohort, and moves its mean values to where the first-order
  // term is zero.
  void finish(int64_t head, int64_t cohort, const float *right) {
    const float *middle = p.middle + head * dim, *asked = p.mean + cohort * dim;
    const int64_t first = cohort * count;
    for (int64_t c = 0; c < count; c++) {
      const float inverse = 1.0f / mass_of(first + c);
      float *key = p.key + (first + c) * dim, *off = &offset[c * tall];
      for (int64_t d = 0; d < dim; d++) off[d] = key[d] * inverse, key[d] = off[d] + middle[d];
    }
    for (int64_t d = 0; d < tall; d += TILE)
      dots(offset.data(), tall, count, dim, &within[d * dim], &turned[d * count]);
    float all = 0.0f, spreads = 0.0f;
    for (int64_t c = 0; c < count; c++) {
      float square = 0.0f;
      for (int64_t d = 0; d < tall; d += TILE)
        square += product(&offset[c * tall + d], &turned[d * count + c * TILE], TILE);
      const float along = product(&offset[c * tall], asked, dim);
      const float seen = p.tilt * (p.level[first + c] - along - 0.5f * square);
      p.bias[first + c] = std::clamp(seen, -p.largest_tilt, p.largest_tilt);
      // A cluster of equal keys has spread zero. Without this test the rounding error of the difference would be its
      // spread.
      const float energy = p.energy[first + c] / mass_of(first + c), epsilon = std::numeric_limits<float>::epsilon();
      spread[c] = energy - square > 64 * epsilon * energy ? energy - square : 0.0f;
      all += p.mass[first + c], spreads += p.mass[first + c] * spread[c];
    }
    if (!p.rank) return;
    const float mean = std::max(spreads / std::max(all, 1e-30f), 1e-30f), reach = p.reach / p.unit[head];
    float *bounds = p.bounds + cohort * 2 * p.rank;
    for (int64_t r = 0; r < ranks; r += TILE) {
      dots(asked, dim, 1, dim, &left[r * dim], &start[r], used(r));
      dots(offset.data(), tall, count, dim, &moving[r * dim], &moved[r * count], used(r));
    }
    for (int64_t r = 0; r < p.rank; r++) bounds[r] = p.tilt * start[r], bounds[p.rank + r] = reach;
    for (int64_t c = 0; c < count; c++) {
      const float factor = p.factor[first + c] = std::min(std::sqrt(spread[c] / mean), p.largest_spread);
      for (int64_t r = 0; r < p.rank; r++) {
        const float x = p.tilt * moved[r / TILE * TILE * count + c * TILE + r % TILE];  // from the middle
        add(p.value + (first + c) * wide, right + r * wide, -factor * std::clamp(x, -reach, reach), wide);
      }
    }
  }
};

static void cohort_means(const StandIns &p, int threads) {
  in_parallel(threads, p.heads, [&] { return CohortMeans(p); }, &CohortMeans::represent);
}

}  // namespace fewkeys
