// Cluster means, with their first order in the query if there is a rank: `fewkeys.rest.cluster_means.represent` has the
// equations.
#pragma once
#include "keys.h"

namespace fewkeys {

// Directions of the values along which products with keys move most: `fewkeys.sketch.gram.top_subspace`.
class Subspace {
 public:
  Subspace(int64_t dim, int64_t wide, int64_t rank, int64_t steps, float least)
      : dim(dim), wide(wide), rank(rank), steps(steps), tall(round_up(dim)), across(round_up(wide)), least(least),
        second(dim * tall), turned(tall * across), square(across * across), start(rank * wide), next(rank * wide) {
    for (int64_t r = 0; r < rank; r++)
      for (int64_t e = 0; e < wide; e++) start[r * wide + e] = std::cos((e + 0.5f) * r * float(M_PI / wide));
  }

  // Writes both factors, (D, r) and (r, Dv), of pooled products (D, Dv), filled up on both sides, in the metric (D, D).
  void find(const float *metric, const float *pooled, float *left, float *right) {
    for (int64_t d = 0; d < dim; d++) std::copy_n(metric + d * dim, dim, &second[d * tall]);
    std::fill(turned.begin(), turned.end(), 0.0f), std::fill(square.begin(), square.end(), 0.0f);
    for (int64_t d = 0; d < tall; d += SOME)
      mix(pooled, across, dim, across, &second[d], tall, &turned[d * across], across);
    for (int64_t e = 0; e < across; e += SOME)
      mix(turned.data(), across, dim, across, pooled + e, across, &square[e * across], across);
    std::copy(start.begin(), start.end(), right);
    for (int64_t step = 0; step < steps; step++) {
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
  const int64_t dim, wide, rank, steps, tall, across;
  const float least;
  aligned_vector<float> second, turned, square, start, next;

  // Makes row r of `next` one of length one that stands across those before, zero where too little is left.
  void straighten(int64_t r, float largest) {
    float *own = &next[r * wide];
    for (int twice = 0; twice < 2; twice++)
      for (int64_t other = 0; other < r; other++) {
        const float *across = &next[other * wide];
        add(own, across, -product(own, across, wide), wide);
      }
    const float length = std::sqrt(product(own, own, wide));
    const bool left = length > least * largest;
    for (int64_t d = 0; d < wide; d++) own[d] = left ? own[d] / length : 0.0f;
  }
};

template <class T>
class Represent {
 public:
  explicit Represent(const Represented &p)
      : p(p), of(p.rank ? p.of : without_products(p.of)), count(p.of.count), keys(p.of.keys), dim(p.of.dim),
        wide(p.of.value_dim), tall(round_up(dim)), across(round_up(wide)), adder(of),
        subspace(dim, wide, p.rank, p.steps, p.least), offset(dim), turned(dim), along(dim), direction(p.rank),
        mass(count), energy(count), reference(count * dim) {}

  // Sums and products of a piece of the keys.
  int64_t size() const { return count * (dim + wide) + (p.rank ? tall * across : 0); }

  void add_piece(int64_t head, int64_t piece, float *sums) {
    const int64_t first = piece * PIECE, last = std::min(keys, first + PIECE);
    weigh(head, first, last);
    adder.add_all(head, first, last, sums, sums + count * (dim + wide));
  }

  void finish(int64_t head, int64_t pieces, float *sums) {
    for (int64_t piece = 1; piece < pieces; piece++) add(sums, sums + piece * size(), 1.0f, size());
    float *pooled = sums + count * (dim + wide);
    std::fill(mass.begin(), mass.end(), 0.0f), std::fill(energy.begin(), energy.end(), 0.0f);
    count_multiply_adds(2 * keys);
    for (int64_t j = head * keys; j < (head + 1) * keys; j++) {
      if (p.share[j] == 0.0f) continue;
      mass[p.of.label[j]] += p.share[j];
      energy[p.of.label[j]] += p.share[j] * p.spread[j];
    }
    float all = 0.0f, spreads = 0.0f;
    for (float &one : mass) all += one = std::max(one, 1e-30f);  // a safe divisor, where nobody is in a cluster
    for (int64_t c = 0; c < count; c++) spreads += mass[c] * (energy[c] = spread_of(head, c, sums));
    if (!p.rank) return;
    // The mean of (k - key_c)(v - value_c)^T over all clusters.
    for (int64_t i = 0; i < tall * across; i++) pooled[i] /= all;
    for (int64_t c = 0; c < count; c++) {
      const float *key = p.key + (head * count + c) * dim, *value = p.value + (head * count + c) * wide;
      const float *mean = p.of.middle + head * dim;
      for (int64_t d = 0; d < dim; d++) add(&pooled[d * across], value, -(mass[c] / all) * (key[d] - mean[d]), wide);
    }
    reach_along(head, pooled);
    const float *left = p.left + head * dim * p.rank, *right = p.right + head * p.rank * wide;
    const float *reach = p.bounds + (head * 2 + 1) * p.rank;
    for (int64_t c = 0; c < count; c++) {
      const float relative = energy[c] / std::max(spreads / all, 1e-30f);
      const float factor = p.factor[head * count + c] = std::min(std::sqrt(relative), p.largest_spread);
      std::fill(direction.begin(), direction.end(), 0.0f);
      for (int64_t d = 0; d < dim; d++) add(direction.data(), left + d * p.rank, reference[c * dim + d], p.rank);
      float *value = p.value + (head * count + c) * wide;
      for (int64_t r = 0; r < p.rank; r++)
        add(value, right + r * wide, -factor * std::clamp(direction[r], -reach[r], reach[r]), wide);
    }
  }

 private:
  const Represented &p;
  const Sums of;
  const int64_t count, keys, dim, wide, tall, across;
  Adder<T> adder;
  Subspace subspace;
  aligned_vector<float> offset, turned, along, direction, mass, energy, reference;

  static Sums without_products(Sums of) {
    of.middle = nullptr;
    return of;
  }

  // What the keys count for in their clusters.
  void weigh(int64_t head, int64_t first, int64_t last) {
    const int64_t at = head * keys;
    const float *middle = p.cluster_importance + head * count, most = p.largest_tilt, up = std::exp(most);
    count_multiply_adds(last - first);
    for (int64_t j = at + first; j < at + last; j += TILE) {
      const int some = std::min<int64_t>(TILE, at + last - j);
      float x[TILE] = {};
      for (int i = 0; i < some; i++)
        x[i] = std::clamp(p.tilt * (p.importance[j + i] - middle[p.of.label[j + i]]), -most, most) - most;
      for (int v = 0; v < TILE; v += LANES) store(x + v, exponential(load(x + v)) * up);
      for (int i = 0; i < some; i++) p.share[j + i] = p.hidden && p.hidden[j + i] ? 0.0f : x[i];
    }
  }

  // Writes the means of a cluster, its bias, and how far from the mean query its value is right; returns its spread.
  float spread_of(int64_t head, int64_t c, const float *sums) {
    const int64_t at = head * count + c;
    const float *asked = p.mean_query + head * dim, *mean = p.of.middle + head * dim;
    const float *second = p.second + head * dim * dim, *root = p.root + head * dim * dim;
    sums += c * (dim + wide);
    for (int64_t d = 0; d < dim; d++) {
      p.key[at * dim + d] = sums[d] / mass[c];
      offset[d] = p.key[at * dim + d] - mean[d];
    }
    for (int64_t d = 0; d < wide; d++) p.value[at * wide + d] = sums[dim + d] / mass[c];
    std::fill(turned.begin(), turned.end(), 0.0f), std::fill(along.begin(), along.end(), 0.0f);
    for (int64_t d = 0; d < dim; d++) {
      add(turned.data(), second + d * dim, offset[d], dim);
      add(along.data(), root + d * dim, offset[d], d + 1);  // lower triangular
    }
    const float score = product(offset.data(), asked, dim), here = product(along.data(), along.data(), dim);
    const float seen = score + 0.5f * (product(turned.data(), offset.data(), dim) - score * score);
    p.bias[at] = std::clamp(p.tilt * (p.cluster_importance[at] - seen), -p.largest_tilt, p.largest_tilt);
    for (int64_t d = 0; d < dim; d++) reference[c * dim + d] = p.tilt * (turned[d] - score * asked[d]);
    // A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    const float whole = energy[c] / mass[c];
    return whole - here > 64 * std::numeric_limits<float>::epsilon() * whole ? whole - here : 0.0f;
  }

  // Writes both factors of the pooled products, and how far queries reach along them.
  void reach_along(int64_t head, const float *pooled) {
    const float *asked = p.mean_query + head * dim, reach = p.reach / p.unit[head];
    float *left = p.left + head * dim * p.rank, *bounds = p.bounds + head * 2 * p.rank;
    subspace.find(p.second + head * dim * dim, pooled, left, p.right + head * p.rank * wide);
    for (int64_t r = 0; r < p.rank; r++) {
      float middle = 0.0f;
      for (int64_t d = 0; d < dim; d++) middle += asked[d] * left[d * p.rank + r];
      bounds[r] = p.tilt * middle, bounds[p.rank + r] = reach;
    }
  }
};

template <class T>
static void represent(const Represented &p, int threads) {
  const int64_t heads = p.of.batch * p.of.heads, pieces = (p.of.keys + PIECE - 1) / PIECE;
  const int64_t size = pieces * Represent<T>(p).size();
  aligned_vector<float> sums(heads * size);
  const auto add_piece = [&](Represent<T> &one, int64_t head, int64_t piece) {
    one.add_piece(head, piece, sums.data() + head * size + piece * one.size());
  };
  const auto finish = [&](Represent<T> &one, int64_t head, int64_t) {
    one.finish(head, pieces, sums.data() + head * size);
  };
  in_phases(threads, heads, pieces == 1, [&] { return Represent<T>(p); }, Phase{pieces, add_piece}, Phase{1, finish});
}

}  // namespace fewkeys
