// Trees of keys: the permutation by balanced splits that `fewkeys.tree.split` describes.
//
// A set is read where it lies, and its halves are written side by side to a second buffer, centred: so a set touches
// the same places of both buffers all the way down, and small sets stay in the cache next to the core. Sets of at most
// SMALL rows are split by their inner products alone: with those of a set, all sets inside have theirs, up to their
// centres.
#pragma once
#include <limits>

#include "products.h"

namespace fewkeys {

constexpr int LEAF = 8, SMALL = 64, POWER = 2, REFINE = 2, FOUR = 4;

// The inner products of four rows with another, FILL dividing their width.
static inline __attribute__((always_inline)) void four_products(const float *row, int64_t stride, const float *other,
                                                                int width, float *found) {
  count_multiply_adds(FOUR * width);
  vec sum[FOUR] = {};
  for (int d = 0; d < width; d += LANES) {
    const vec x = load(other + d);
#pragma GCC unroll 4
    for (int r = 0; r < FOUR; r++) sum[r] += load(row + r * stride + d) * x;
  }
#pragma GCC unroll 4
  for (int r = 0; r < FOUR; r++) found[r] = sum_of_lanes(sum[r]);
}

// What is no number, as products beyond all bounds leave it, counts as zero: else places would be no permutation.
static inline void numbers_only(float *x, int count) {
  for (int i = 0; i < count; i++) x[i] = x[i] == x[i] ? x[i] : 0.0f;
}

// How many of `count` numbers stand before each, of equal ones those that come first; whole vectors are written.
static inline void places_of(const float *x, int count, int32_t *place) {
  const ivec lane = count_up();
  for (int v = 0; v < count; v += LANES) {
    const vec own = load(x + v);
    ivec before = {};
    for (int j = 0; j < v; j++) before -= broadcast(x[j]) <= own;
    for (int j = v; j < std::min(v + LANES, count); j++)
      before -= lane > j - v ? broadcast(x[j]) <= own : broadcast(x[j]) < own;
    for (int j = v + LANES; j < count; j++) before -= broadcast(x[j]) < own;
    memcpy(place + v, &before, sizeof before);
  }
}

// The bits of a float, ordered as floats are; zeros are equal. No branch: signs at random would be mispredicted.
static inline uint32_t ordered(float x) {
  x += 0.0f;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ (-(bits >> 31) | 0x80000000u);
}
// And back.
static inline float number_of(uint32_t bits) {
  bits ^= ((bits >> 31) - 1) | 0x80000000u;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A number, and of equal numbers the place: what is sorted. What is no number counts as zero.
static inline uint64_t sortable(float number, int64_t place) {
  return (uint64_t)ordered(number == number ? number : 0.0f) << 32 | (uint64_t)place;
}

// Finds, of many that are `sortable`, the one of which `rank` are smaller. They go to bins by how far their numbers are
// from a middle: bins near it are narrow, and so few share that of the one sought.
class Seeker {
 public:
  explicit Seeker(int64_t most) : bin(most), left(most) {}

  uint64_t seek(const uint64_t *key, int64_t count, int64_t rank, float middle) {
    int32_t many[1 << BITS] = {};
    for (int64_t i = 0; i < count; i++) {
      bin[i] = sortable(number_of(key[i] >> 32) - middle, 0) >> (64 - BITS);
      many[bin[i]]++;
    }
    int32_t its = 0;
    for (; rank >= many[its]; its++) rank -= many[its];
    int64_t inside = 0;
    for (int64_t i = 0; i < count; i++) left[inside] = key[i], inside += bin[i] == its;
    std::nth_element(left.begin(), left.begin() + rank, left.begin() + inside);
    return left[rank];
  }

 private:
  static constexpr int BITS = 10;  // of a number, that decide its bin: the sign, the exponent and a bit
  std::vector<int32_t> bin;
  std::vector<uint64_t> left;
};

class Splitter {
 public:
  Splitter(int64_t most, int64_t width)
      : wide(round_up(width)), rows{aligned_vector<float>(most * wide), aligned_vector<float>(most * wide)},
        index{aligned_vector<int32_t>(most), aligned_vector<int32_t>(most)}, norm(most), score(most), key(most),
        seeker(most), left(most), was(most), along(wide), sum(wide), next(wide), lanes(wide * TILE) {}

  const int64_t wide;

  // Where the rows are to be put, filled up with zeros to `wide`.
  float *first() { return rows[0].data(); }

  // Puts their mean at zero.
  void centre(int64_t size) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t i = 0; i < size; i++) add(sum.data(), first() + i * wide, 1.0f, wide);
    for (int64_t i = 0; i < size; i++) shift(first() + i * wide, -1.0f / size, first() + i * wide);
  }

  // Writes `base` plus the order of rows whose mean is zero.
  void split(int64_t size, int64_t base, int64_t *order) {
    for (int64_t i = 0; i < size; i++) {
      norm[i] = size > SMALL ? product(first() + i * wide, first() + i * wide, wide) : 0.0f;
      index[0][i] = i;
    }
    out = order, added = base;
    descend(0, size, 0);
  }

 private:
  aligned_vector<float> rows[2];
  aligned_vector<int32_t> index[2];
  aligned_vector<float> norm, score;
  aligned_vector<uint64_t> key;
  Seeker seeker;
  aligned_vector<uint8_t> left, was;
  aligned_vector<float> along, sum, next, lanes;
  alignas(64) float inner[SMALL * SMALL], inside[SMALL * TILE], weight[SMALL], mean[SMALL];
  alignas(64) int32_t place[SMALL];
  int64_t *out = nullptr, added = 0;

  // Splits `size` centred rows of a buffer from `first` on.
  void descend(int64_t first, int64_t size, int buffer) {
    float *x = &rows[buffer][first * wide];
    if (size <= SMALL) return small(x, first, size, buffer);
    const auto longest = std::max_element(&norm[first], &norm[first] + size) - &norm[first];
    copy(along.data(), x + longest * wide, wide);
    for (int step = 0; step < POWER; step++) iterate(x, size);
    halve(x, size, 1.0f, along.data());
    std::fill(sum.begin(), sum.end(), 0.0f);
    std::fill_n(was.begin(), size, 0);
    for (int step = 0; step < REFINE; step++) {
      follow(x, size);
      halve(x, size, -1.0f, sum.data());
    }
    follow(x, size);
    // The sum of the right half is minus that of the left.
    const int64_t half = size / 2;
    int64_t to[2] = {first + half, first};
    for (int64_t i = 0; i < size; i++) {
      const int64_t side = left[i], at = to[side]++;
      norm[at] = shift(x + i * wide, (side ? -1.0f : 1.0f) / half, &rows[!buffer][at * wide]);
      index[!buffer][at] = index[buffer][first + i];
    }
    descend(first, half, !buffer);
    descend(first + half, half, !buffer);
  }

  // Writes a row plus `scale` times `sum`; returns its square.
  float shift(const float *from, float scale, float *to) {
    count_multiply_adds(2 * wide);
    vec square = {};
    for (int d = 0; d < wide; d += LANES) {
      const vec x = load(from + d) + load(&sum[d]) * scale;
      store(to + d, x);
      square += x * x;
    }
    return sum_of_lanes(square);
  }

  // along <- the sum of the rows, each times its product with it; of length one.
  void iterate(const float *x, int64_t size) {
    count_multiply_adds(size * wide);
    std::fill(next.begin(), next.end(), 0.0f);
    for (int64_t i = 0; i < size; i += FOUR, x += FOUR * wide) {
      float by[FOUR];
      four_products(x, wide, along.data(), wide, by);
      for (int d = 0; d < wide; d += LANES) {
        vec all = load(&next[d]);
#pragma GCC unroll 4
        for (int r = 0; r < FOUR; r++) all += load(x + r * wide + d) * by[r];
        store(&next[d], all);
      }
    }
    const float length = std::sqrt(product(next.data(), next.data(), wide));
    along.swap(next);
    scale(along.data(), 1.0f / std::max(length, std::numeric_limits<float>::min()), wide);
  }

  // The left half: the rows with the smaller products, of equal ones those that come first.
  void halve(const float *x, int64_t size, float sign, const float *by) {
    for (int64_t i = 0; i < size; i += FOUR) four_products(x + i * wide, wide, by, wide, &score[i]);
    for (int64_t i = 0; i < size; i++) key[i] = sortable(sign * score[i], i);
    const uint64_t middle = seeker.seek(key.data(), size, size / 2, 0.0f);
    for (int64_t i = 0; i < size; i++) left[i] = key[i] < middle;
  }

  // The sum of the left half, from that of the last one.
  void follow(const float *x, int64_t size) {
    for (int64_t i = 0; i < size; i++)
      if (left[i] != was[i]) add(sum.data(), x + i * wide, left[i] ? 1.0f : -1.0f, wide), was[i] = left[i];
  }

  // At most SMALL rows.
  void small(const float *x, int64_t first, int size, int buffer) {
    int32_t *own = &index[buffer][first];
    if (size > LEAF) {
      // Of a symmetric matrix, what stands below the tiles on its diagonal is copied.
      for (int c = 0; c < size; c += TILE) {
        const int count = std::min(TILE, size - c);
        to_lanes(x + c * wide, wide, count, wide, 1.0f, lanes.data());
        dots(x, wide, c + count, wide, lanes.data(), inside);
        for (int i = 0; i < c + count; i++)
          for (int j = 0; j < count; j++) inner[i * SMALL + c + j] = inside[i * TILE + j];
      }
      for (int i = TILE; i < size; i++)
        for (int j = 0; j < TILE; j++) inner[i * SMALL + j] = inner[j * SMALL + i];
      part(inner, size, own);
    }
    for (int i = 0; i < size; i++) out[first + i] = added + own[i];
  }

  // to <- the matrix (size, size) times numbers.
  void times(const float *matrix, int size, const float *by, float *to) {
    count_multiply_adds(size * size);
    for (int v = 0; v < size; v += LANES) {
      vec all[2] = {};
      for (int j = 0; j < size; j += 2) {
        all[0] += load(matrix + j * SMALL + v) * by[j];
        all[1] += load(matrix + (j + 1) * SMALL + v) * by[j + 1];
      }
      store(to + v, all[0] + all[1]);
    }
  }

  // Orders the indices of rows with such inner products, which are lost, so that halves are side by side down to
  // leaves.
  void part(float *matrix, int size, int32_t *own) {
    // Centre: subtract the means of row and column, and add that of all.
    alignas(64) float by[SMALL], to[SMALL];
    std::fill_n(by, size, 1.0f / size);
    times(matrix, size, by, mean);
    float all = 0.0f;
    for (int i = 0; i < size; i++) all += mean[i];
    all /= size;
    int longest = 0;
    for (int i = 0; i < size; i++) {
      float *row = matrix + i * SMALL;
      for (int v = 0; v < size; v += LANES) store(row + v, load(row + v) - (load(mean + v) + (mean[i] - all)));
      if (row[i] > matrix[longest * SMALL + longest]) longest = i;
    }
    // A direction is a sum of rows, and products with it are the matrix times what they are summed with.
    std::copy_n(matrix + longest * SMALL, size, by);
    for (int step = 0; step < POWER; step++) {
      float largest = std::numeric_limits<float>::min();
      for (int i = 0; i < size; i++) largest = std::max(largest, std::fabs(by[i]));
      for (int i = 0; i < size; i++) by[i] /= largest;
      times(matrix, size, by, to);
      std::copy_n(to, size, by);
    }
    numbers_only(by, size);
    places_of(by, size, place);
    for (int step = 0; step < REFINE; step++) {
      for (int i = 0; i < size; i++) weight[i] = place[i] < size / 2 ? -1.0f : 0.0f;
      times(matrix, size, weight, to);
      numbers_only(to, size);
      places_of(to, size, place);
    }
    const int half = size / 2;
    int32_t at[2][SMALL / 2], was[SMALL];
    int count[2] = {};
    for (int i = 0; i < size; i++) {
      const int side = place[i] >= half;
      at[side][count[side]++] = i;
    }
    std::copy_n(own, size, was);
    for (int side = 0; side < 2; side++) {
      int32_t *to = own + side * half;
      for (int i = 0; i < half; i++) to[i] = was[at[side][i]];
      if (half > LEAF) {
        alignas(64) float child[SMALL / 2 * SMALL];
        for (int i = 0; i < half; i++)
          for (int j = 0; j < half; j++) child[i * SMALL + j] = matrix[at[side][i] * SMALL + at[side][j]];
        part(child, half, to);
      }
    }
  }
};

// Rows as they are.
static void split(const Split &p, int threads) {
  const auto split = [&](Splitter &splitter, int64_t t) {
    for (int64_t i = 0; i < p.size; i++) {
      float *to = splitter.first() + i * splitter.wide;
      std::fill_n(std::copy_n(p.rows + (t * p.size + i) * p.dim, p.dim, to), splitter.wide - p.dim, 0.0f);
    }
    splitter.centre(p.size);
    splitter.split(p.size, 0, p.order + t * p.size);
  };
  in_parallel(threads, p.count, [&] { return Splitter(p.size, p.dim); }, split);
}

// What trees are of: what queries see of keys, and values: `fewkeys.tree.metric.features`.
class Features {
 public:
  explicit Features(const Trees &p)
      : p(p), dim(p.dim), value_dim(p.value_dim), pitch(round_up(dim, STEP)), key_mean(dim), value_mean(value_dim),
        root(dim * pitch), rows(FOUR * dim) {}

  // Of a tree of a head; their means are zero.
  void write(int64_t head, int64_t tree, float *to, int64_t wide) {
    const int64_t size = p.size[tree];
    const float *key = p.key.at<float>(head, 0, p.start[tree]), *value = p.value.at<float>(head, 0, p.start[tree]);
    mean(key, p.key.row, size, dim, key_mean.data());
    mean(value, p.value.row, size, value_dim, value_mean.data());
    const float *own = p.root + (head * p.roots + p.kind[tree]) * dim * dim;
    if (pitch != dim) {
      for (int64_t i = 0; i < dim; i++) std::copy_n(own + i * dim, dim, &root[i * pitch]);
      own = root.data();
    }
    double energy[2] = {};
    for (int64_t i = 0; i < size; i += FOUR) {
      float square[2] = {};
      for (int r = 0; r < FOUR; r++) subtract(key + (i + r) * p.key.row, key_mean.data(), dim, &rows[r * dim]);
      multiply(own, to + i * wide, wide);
      for (int r = 0; r < FOUR; r++) {
        float *row = to + (i + r) * wide;
        subtract(value + (i + r) * p.value.row, value_mean.data(), value_dim, row + dim);
        std::fill(row + dim + value_dim, row + wide, 0.0f);
        square[0] += product(row, row, dim), square[1] += product(row + dim, row + dim, value_dim);
      }
      energy[0] += square[0], energy[1] += square[1];
    }
    const double least = std::numeric_limits<float>::min();
    const float by = p.value_weight * std::sqrt(energy[0] / std::max(energy[1], least));
    count_multiply_adds(size * value_dim);
    for (int64_t i = 0; i < size; i++) {
      float *row = to + i * wide + dim;
      for (int64_t d = 0; d < value_dim; d++) row[d] *= by;
    }
  }

 private:
  static constexpr int64_t STEP = 2 * LANES;
  const Trees &p;
  const int64_t dim, value_dim, pitch;
  aligned_vector<float> key_mean, value_mean, root, rows;

  static void subtract(const float *__restrict__ from, const float *__restrict__ other, int64_t count,
                       float *__restrict__ to) {
    for (int64_t d = 0; d < count; d++) to[d] = from[d] - other[d];
  }

  // Of rows whose number FOUR divides.
  static void mean(const float *row, int64_t stride, int64_t count, int64_t dim, float *__restrict__ to) {
    count_multiply_adds(count * dim);
    std::fill_n(to, dim, 0.0f);
    for (int64_t i = 0; i < count; i += FOUR, row += FOUR * stride)
      for (int64_t d = 0; d < dim; d++)
        to[d] += (row[d] + row[stride + d]) + (row[2 * stride + d] + row[3 * stride + d]);
    for (int64_t d = 0; d < dim; d++) to[d] /= count;
  }

  // FOUR rows times the root, which is lower triangular.
  __attribute__((noinline)) void multiply(const float *own, float *to, int64_t stride) const {
    const float *const x = rows.data();
    for (int64_t e = 0; e < dim; e += STEP) {
      count_multiply_adds(FOUR * STEP * (dim - e));
      vec sum[FOUR][2] = {};
      for (int64_t d = e; d < dim; d++) {
        const vec a = load(own + d * pitch + e), b = load(own + d * pitch + e + LANES);
#pragma GCC unroll 4
        for (int r = 0; r < FOUR; r++) {
          const float by = x[r * dim + d];
          sum[r][0] += a * by;
          sum[r][1] += b * by;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < FOUR; r++) {
        if (e + STEP <= dim) {
          store(to + r * stride + e, sum[r][0]), store(to + r * stride + e + LANES, sum[r][1]);
        } else {
          alignas(64) float found[STEP];
          store(found, sum[r][0]), store(found + LANES, sum[r][1]);
          std::copy_n(found, dim - e, to + r * stride + e);
        }
      }
    }
  }
};

static void grow(const Trees &p, int threads) {
  int64_t most = 0;
  for (int64_t t = 0; t < p.trees; t++) most = std::max(most, p.size[t]);
  struct Grower {
    Splitter splitter;
    Features features;
  };
  const auto grow = [&](Grower &of, int64_t t) {
    const int64_t head = t % p.heads, tree = t / p.heads;
    of.features.write(head, tree, of.splitter.first(), of.splitter.wide);
    of.splitter.split(p.size[tree], p.start[tree], p.order + head * p.places + p.base[tree]);
  };
  const auto make = [&] { return Grower{Splitter(most, p.dim + p.value_dim), Features(p)}; };
  in_parallel(threads, p.heads * p.trees, make, grow);
}

}  // namespace fewkeys
