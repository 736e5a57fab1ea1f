// What a forest of key trees needs beside its splits: the metric of the queries seen so far, and what is known of
// nodes.
#pragma once
#include "split.h"

namespace fewkeys {

// The lower triangular roots of the covariance of all queries up to some turns: `fewkeys.tree.metric.roots`.
class Roots {
 public:
  explicit Roots(const TreeRoots &p)
      : p(p), dim(p.dim), wide(round_up(dim)), total(dim), mean(dim), asked(FOUR * dim), square(dim * dim),
        root(wide * wide) {}

  void run(int64_t head) {
    std::fill(total.begin(), total.end(), 0.0), std::fill(square.begin(), square.end(), 0.0);
    if (p.before) {
      std::copy_n(p.total + head * dim, dim, total.begin());
      std::copy_n(p.square + head * dim * dim, dim * dim, square.begin());
    }
    int64_t turn = 0, from = 0;
    for (int64_t e = 0; e < p.count; e++) {
      // Turn by turn, so that sums are the same wherever one stops.
      for (; turn <= p.turn[e]; turn++) {
        const int64_t to = turn < p.turns ? p.stop[turn] : from;
        for (int64_t g = 0; g < p.gqa_ratio; g++) take(head, g, from, to);
        from = to;
      }
      factor(p.before + from * p.gqa_ratio);
      float *out = p.root + (head * p.count + e) * dim * dim;
      for (int64_t i = 0; i < dim; i++)
        for (int64_t j = 0; j < dim; j++) out[i * dim + j] = j <= i ? root[j * wide + i] : 0.0f;
    }
  }

 private:
  const TreeRoots &p;
  const int64_t dim, wide;
  aligned_vector<double> total, mean, asked, square;
  aligned_vector<float> root;  // of this and of `square`, what stands on the diagonal and right of it

  // Adds queries, FOUR at a time.
  void take(int64_t head, int64_t group, int64_t from, int64_t to) {
    for (; from < to; from += FOUR) {
      const int count = std::min<int64_t>(FOUR, to - from);
      count_multiply_adds(count * dim * (dim + 1) / 2);
      double *__restrict__ x = asked.data();
      std::fill(asked.begin(), asked.end(), 0.0);
      for (int r = 0; r < count; r++)
        std::copy_n(p.query.at<float>(head, group, p.asking[from + r]), dim, x + r * dim);
      for (int64_t i = 0; i < dim; i++) {
        double own[FOUR], *__restrict__ row = &square[i * dim];
        for (int r = 0; r < FOUR; r++) total[i] += own[r] = x[r * dim + i];
        for (int64_t j = i; j < dim; j++)
          row[j] += (own[0] * x[j] + own[1] * x[dim + j]) + (own[2] * x[2 * dim + j] + own[3] * x[3 * dim + j]);
      }
    }
  }

  // One imagined query of covariance I / D makes it defined before the first one. With three times the mean variance in
  // all directions it is so well conditioned that floats factorise it.
  void factor(double count) {
    const double by = 1 / (count + 1);
    double trace = 0;
    for (int64_t i = 0; i < dim; i++) {
      mean[i] = total[i] * by;
      trace += variance(i, by);
    }
    const double least = p.ridge * trace / dim + std::numeric_limits<float>::min();
    for (int64_t i = 0; i < dim; i++) {
      const double *__restrict__ row = &square[i * dim], own = mean[i];
      float *__restrict__ to = &root[i * wide];
      for (int64_t j = i; j < dim; j++) to[j] = row[j] * by - own * mean[j];
      to[i] = variance(i, by) + least;
    }
    if (factorise(root.data(), wide, dim)) return;
    // What rounding has made indefinite is measured coordinate by coordinate.
    std::fill(root.begin(), root.end(), 0.0f);
    for (int64_t i = 0; i < dim; i++) root[i * wide + i] = std::sqrt(std::max(variance(i, by) + least, 0.0));
  }
  double variance(int64_t i, double by) const { return (square[i * dim + i] + 1.0 / dim) * by - mean[i] * mean[i]; }
};

static void roots(const TreeRoots &p, int threads) {
  in_parallel(threads, p.heads, [&] { return Roots(p); }, [](Roots &roots, int64_t head) { roots.run(head); });
}

struct TableTo {
  float *key, *value, *variance;
  int64_t rows, size;
};

// Mean and, where asked for, variance of `count` rows; `inside`: what their own variances add.
static inline void moments(const float *const *row, const float *inside, int count, int64_t dim, float *mean,
                           float *variance) {
  count_multiply_adds(count * dim * (variance ? 2 : 1));
  const float scale = 1.0f / count;
  const auto at = [&](int64_t d, auto read, auto write) {
    auto sum = read(row[0] + d);
    for (int i = 1; i < count; i++) sum += read(row[i] + d);
    sum *= scale;
    write(mean + d, sum);
    if (!variance) return;
    auto square = sum * 0.0f;
    for (int i = 0; i < count; i++) {
      const auto x = read(row[i] + d) - sum;
      square += x * x;
      if (inside) square += read(inside + i * dim + d);
    }
    write(variance + d, square * scale);
  };
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES)
    at(d, [](const float *x) { return load(x); }, [](float *to, vec x) { store(to, x); });
  for (; d < dim; d++) at(d, [](const float *x) { return *x; }, [](float *to, float x) { *to = x; });
}

// What is known of all nodes: `fewkeys.tree.forest.summarise`.
static void summarise(const Summaries &p, int threads) {
  const auto *tables = (const TableTo *)p.tables;
  in_parallel(threads, p.heads * p.trees, [&](int64_t t) {
    const int64_t head = t % p.heads, tree = t / p.heads, base = p.base[tree], size = p.size[tree];
    for (int64_t level = 0; level < p.count && tables[level].size <= size; level++) {
      const TableTo &to = tables[level];
      for (int64_t i = base / to.size; i < (base + size) / to.size; i++) {
        const int64_t at = head * to.rows + i;
        const float *key[LEAF], *value[LEAF], *inside = nullptr;
        int count = LEAF;
        if (level == 0) {
          for (int r = 0; r < LEAF; r++) {
            const int64_t place = p.order[head * p.places + i * LEAF + r];
            key[r] = p.key.at<float>(head, 0, place), value[r] = p.value.at<float>(head, 0, place);
          }
        } else {
          const TableTo &below = tables[level - 1];
          const int64_t first = head * below.rows + i * FOUR;
          count = FOUR, inside = below.variance + first * p.dim;
          for (int r = 0; r < FOUR; r++)
            key[r] = below.key + (first + r) * p.dim, value[r] = below.value + (first + r) * p.value_dim;
        }
        moments(key, inside, count, p.dim, to.key + at * p.dim, to.variance + at * p.dim);
        moments(value, nullptr, count, p.value_dim, to.value + at * p.value_dim, nullptr);
      }
    }
  });
}

}  // namespace fewkeys
