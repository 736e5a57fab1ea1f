// Cluster means with their first order in the query, from sums over clusters: `fewkeys.rest.cluster_means.represent` has
// the equations.
#pragma once
#include "lanes.h"

namespace fewkeys {

class Represent {
 public:
  explicit Represent(const Represented &p)
      : p(p), dim(p.dim), wide(p.value_dim), offset(dim), turned(dim), along(dim), direction(p.rank), energy(p.count),
        reference(p.count * dim), pooled(dim * wide), turned_pooled(dim * wide), square(wide * wide), next(p.rank * wide) {}

  void run(int64_t head) {
    const float *mass = p.mass + head * p.count;
    float all = 0.0f;
    for (int64_t c = 0; c < p.count; c++) all += mass[c];
    std::copy_n(p.products + head * dim * wide, dim * wide, pooled.data());
    std::fill(energy.begin(), energy.end(), 0.0f);
    count_multiply_adds(p.keys);
    for (int64_t j = head * p.keys; j < (head + 1) * p.keys; j++)
      if (p.share[j] != 0.0f) energy[p.label[j]] += p.share[j] * p.spread[j];
    float spreads = 0.0f;
    for (int64_t c = 0; c < p.count; c++) spreads += mass[c] * (energy[c] = spread_of(head, c, mass[c]));
    // The mean of (k - key_c)(v - value_c)^T over all clusters.
    for (float &x : pooled) x /= all;
    for (int64_t c = 0; c < p.count; c++) {
      const float *key = p.key + (head * p.count + c) * dim, *value = p.value + (head * p.count + c) * wide;
      const float *mean = p.mean + head * dim;
      for (int64_t d = 0; d < dim; d++) add(&pooled[d * wide], value, -(mass[c] / all) * (key[d] - mean[d]), wide);
    }
    subspace(head);
    const float *left = p.left + head * dim * p.rank, *right = p.right + head * p.rank * wide;
    const float *low = p.bounds + head * 2 * p.rank, *high = low + p.rank;
    for (int64_t c = 0; c < p.count; c++) {
      const float relative = energy[c] / std::max(spreads / all, 1e-30f);
      const float factor = p.factor[head * p.count + c] = std::min(std::sqrt(relative), p.largest_spread);
      std::fill(direction.begin(), direction.end(), 0.0f);
      for (int64_t d = 0; d < dim; d++) add(direction.data(), left + d * p.rank, reference[c * dim + d], p.rank);
      float *value = p.value + (head * p.count + c) * wide;
      for (int64_t r = 0; r < p.rank; r++)
        add(value, right + r * wide, -factor * std::min(std::max(direction[r], low[r]), high[r]), wide);
    }
  }

 private:
  const Represented &p;
  const int64_t dim, wide;
  aligned_vector<float> offset, turned, along, direction, energy, reference, pooled, turned_pooled, square, next;

  // Writes the means of a cluster, its bias, and at which query its value is right; returns its spread.
  float spread_of(int64_t head, int64_t c, float mass) {
    const int64_t at = head * p.count + c;
    const float *asked = p.mean_query + head * dim, *mean = p.mean + head * dim;
    const float *second = p.second + head * dim * dim, *root = p.root + head * dim * dim;
    for (int64_t d = 0; d < dim; d++) {
      p.key[at * dim + d] = p.key_sum[at * dim + d] / mass;
      offset[d] = p.key[at * dim + d] - mean[d];
    }
    for (int64_t d = 0; d < wide; d++) p.value[at * wide + d] = p.value_sum[at * wide + d] / mass;
    std::fill(turned.begin(), turned.end(), 0.0f), std::fill(along.begin(), along.end(), 0.0f);
    for (int64_t d = 0; d < dim; d++) {
      add(turned.data(), second + d * dim, offset[d], dim);
      add(along.data(), root + d * dim, offset[d], d + 1);  // lower triangular
    }
    const float score = product(offset.data(), asked, dim), here = product(along.data(), along.data(), dim);
    const float seen = score + 0.5f * (product(turned.data(), offset.data(), dim) - score * score);
    p.bias[at] = std::clamp(p.tilt * (p.importance[at] - seen), -p.largest_tilt, p.largest_tilt);
    for (int64_t d = 0; d < dim; d++) reference[c * dim + d] = p.tilt * (asked[d] + turned[d] - score * asked[d]);
    // A cluster of equal keys has no spread: what rounding leaves of the difference must not become one.
    const float whole = energy[c] / mass;
    return whole - here > 64 * std::numeric_limits<float>::epsilon() * whole ? whole - here : 0.0f;
  }

  // Writes both factors of the pooled products, and how far queries reach along them.
  void subspace(int64_t head) {
    const float *second = p.second + head * dim * dim, *asked = p.mean_query + head * dim;
    std::fill(turned_pooled.begin(), turned_pooled.end(), 0.0f), std::fill(square.begin(), square.end(), 0.0f);
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < dim; e++) add(&turned_pooled[d * wide], &pooled[e * wide], second[d * dim + e], wide);
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < wide; e++) add(&square[e * wide], &turned_pooled[d * wide], pooled[d * wide + e], wide);
    float *right = p.right + head * p.rank * wide, *left = p.left + head * dim * p.rank;
    for (int64_t r = 0; r < p.rank; r++) std::copy_n(p.start + r * wide, wide, right + r * wide);
    for (int64_t step = 0; step < p.steps; step++) {
      std::fill(next.begin(), next.end(), 0.0f);
      for (int64_t r = 0; r < p.rank; r++)
        for (int64_t e = 0; e < wide; e++) add(&next[r * wide], &square[e * wide], right[r * wide + e], wide);
      for (int64_t r = 0; r < p.rank; r++) straighten(r);
      std::copy(next.begin(), next.end(), right);
    }
    float *low = p.bounds + head * 2 * p.rank;
    for (int64_t r = 0; r < p.rank; r++) {
      float middle = 0.0f;
      for (int64_t d = 0; d < dim; d++) {
        left[d * p.rank + r] = product(&pooled[d * wide], right + r * wide, wide);
        middle += asked[d] * left[d * p.rank + r];
      }
      const float reach = p.reach / p.unit[head];
      low[r] = p.tilt * middle - reach, low[p.rank + r] = p.tilt * middle + reach;
    }
  }

  // Makes row r of `next` one of length one that stands across those before, zero where nothing but rounding is left.
  void straighten(int64_t r) {
    float *own = &next[r * wide];
    const float before = std::sqrt(product(own, own, wide));
    for (int twice = 0; twice < 2; twice++)
      for (int64_t other = 0; other < r; other++) {
        const float *across = &next[other * wide];
        add(own, across, -product(own, across, wide), wide);
      }
    const float length = std::sqrt(product(own, own, wide));
    const bool left = length > 8 * std::numeric_limits<float>::epsilon() * before;
    for (int64_t d = 0; d < wide; d++) own[d] = left ? own[d] / length : 0.0f;
  }
};

static void represent(const Represented &p, int threads) {
  in_parallel(threads, p.heads, [&] { return Represent(p); }, [](Represent &one, int64_t head) { one.run(head); });
}

}  // namespace fewkeys
