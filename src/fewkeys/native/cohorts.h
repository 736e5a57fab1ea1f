// Cohorts of queries (`fewkeys.sketch.cohorts`) and the keys that each cohort keeps (`fewkeys.select.outliers`).
// Cohorts are in the lanes, keys in the rows.
#pragma once
#include "keys.h"
#include "rows.h"

namespace fewkeys {

constexpr int CHUNK = 32;     // keys that are scored at once
constexpr int64_t AHEAD = 32;  // rows between the one that is read and the one that is prefetched

// The `rank` smallest of a list of numbers: those below `end`, and the first `ties` of those equal to `end`.
struct Smallest {
  float end;
  int64_t ties;

  // By bisection. `x` has room for whole vectors; NaN becomes zero, infinity the largest number.
  Smallest(float *x, int64_t count, int64_t rank) {
    constexpr float MOST = std::numeric_limits<float>::max();
    const int64_t full = round_up(count, LANES);
    std::fill(x + count, x + full, x[0]);
    vec least = broadcast(MOST), most = -least;
    for (int64_t v = 0; v < full; v += LANES) {
      vec number = load(x + v);
      number = number == number ? number : vec{};
      number = max(-max(-number, broadcast(-MOST)), broadcast(-MOST));
      store(x + v, number);
      least = -max(-least, -number), most = max(most, number);
    }
    std::fill(x + count, x + full, INFINITY);
    float low = -max_of_lanes(-least), high = max_of_lanes(most);
    // Invariant: at most `rank` numbers are below `low`.
    for (float middle; middle = 0.5f * low + 0.5f * high, low < middle && middle < high;) {
      const int64_t below = count_below(x, full, middle);
      if (below == rank) {
        end = middle, ties = 0;
        return;
      }
      (below < rank ? low : high) = middle;
    }
    end = count_below(x, full, high) <= rank ? high : low;
    ties = rank - count_below(x, full, end);
  }

  // Whether the next number of the list is among the smallest; called once for each number, in order.
  bool takes(float x) {
    const bool is_end = x == end, is_one = (x < end) | (is_end & (ties > 0));
    ties -= is_end;
    return is_one;
  }

 private:
  static int64_t count_below(const float *x, int64_t full, float end) {
    ivec sum = {};
    for (int64_t v = 0; v < full; v += LANES) sum -= load(x + v) < broadcast(end);
    return sum_of_lanes(__builtin_convertvector(sum, vec));
  }
};

// Halves sets of rows again and again, and computes the means and covariance of the parts (`fewkeys.sketch.halves`). A
// direction of a cut is a sum of rows. Products with it are inner products in the metric.
class Halver {
 public:
  explicit Halver(const Halves &p)
      : p(p), dim(p.dim), wide(round_up(dim)), size(round_up(p.rows_each, p.count)),
        most(round_up(2 * p.sample)), order(size), others(size), score(round_up(size)), picked(most * wide), by(most),
        half(most), along(wide), turned(wide), middle(wide), metric(wide * wide), square(wide * wide) {}

  void split(int64_t set) {
    rows = p.rows + set * p.rows_each * dim;
    measure_keys(set);
    for (int64_t i = 0; i < size; i++) order[i] = i < p.rows_each ? i : -1;
    for (int64_t span = size; span > size / p.count; span /= 2)
      for (int64_t begin = 0; begin < size; begin += span) cut(&order[begin], span);
    std::copy(order.begin(), order.end(), p.place + set * size);
    describe(set);
  }

 private:
  const Halves &p;
  const int64_t dim, wide, size, most;  // most: the most rows that a direction is computed from
  const float *rows = nullptr;
  std::vector<int32_t> order, others;
  std::vector<const float *> chosen;  // rows whose mean and products are summed
  Floats score;
  // picked: sampled rows; by: their products with the direction, or their weights; half: -1 in the smaller half. metric
  // and square: matrices, padded to `wide` in both dimensions.
  Floats picked, by, half, along, turned, middle, metric, square;

  // Moves the rows with smaller products to the front half. Entries of -1, which are no rows, stay at the end.
  void cut(int32_t *members, int64_t span) {
    int64_t real = span;
    while (real && members[real - 1] < 0) real--;
    if (real <= span / 2) return;
    look(members, span, real);
    measure(members, real);
    Smallest left(score.data(), real, span / 2);
    // The order of rows within a half does not change.
    int64_t low = 0, high = 0;
    for (int64_t i = 0; i < real; i++) {
      const bool is_left = left.takes(score[i]);
      others[high] = members[low] = members[i];
      low += is_left, high += !is_left;
    }
    std::copy_n(others.begin(), high, members + low);
  }

  // Computes the metric of a head: the covariance of its keys, times their number.
  void measure_keys(int64_t head) {
    const uint8_t *real = real_keys(p.real, p.key, head, p.keys);
    chosen.clear();
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) chosen.push_back(p.key.at<float>(head, j));
    std::fill(metric.begin(), metric.end(), 0.0f);
    add_products(middle.data(), metric.data());
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = 0; e < d; e++) metric[d * wide + e] = metric[e * wide + d];
  }

  // mean <- the mean of the chosen rows. Adds their outer products around it to the upper triangle of `sums`.
  void add_products(float *mean, float *sums) {
    const int64_t count = chosen.size();
    std::fill_n(mean, dim, 0.0f);
    for (const float *row : chosen) add(mean, row, 1.0f, dim);
    for (int64_t d = 0; d < dim; d++) mean[d] /= std::max<int64_t>(1, count);
    for (int64_t begin = 0; begin < count; begin += p.sample) {
      const int few = std::min(p.sample, count - begin);
      for (int j = 0; j < few; j++) {
        copy_rows(chosen[begin + j], 0, 1, dim, wide, &picked[j * wide]);
        add(&picked[j * wide], mean, -1.0f, dim);
      }
      add_square(picked.data(), wide, few, wide, sums);
    }
  }

  // score <- the products of all rows with the direction.
  void measure(const int32_t *members, int64_t real) {
    for (int64_t i = 0; i < real; i += FOUR) {
      const float *row[FOUR];
      for (int r = 0; r < FOUR; r++) {
        row[r] = rows + members[std::min(i + r, real - 1)] * dim;
        prefetch(rows + members[std::min(i + r + AHEAD, real - 1)] * dim, dim * sizeof(float));
      }
      four_dots(row, turned.data(), dim, &score[i]);
    }
  }

  // turned <- metric * along, whose plain products are those of `along` in the metric.
  void turn() { sum_rows(metric.data(), wide, along.data(), wide, turned.data()); }

  // along, turned <- the direction of the cut, from a sample of the rows, padded with zero rows to a multiple of FOUR:
  // power iterations from the longest row, then steps that move it to the sum of the rows of one half.
  void look(const int32_t *members, int64_t span, int64_t real) {
    const int64_t step = std::max<int64_t>(1, span / p.sample), count = divide_up(real, step);
    const int64_t full = round_up(count, FOUR);
    for (int64_t i = 0; i < full; i++) {
      const bool is_row = i < count;
      copy_rows(rows + members[is_row ? i * step : 0] * dim, 0, 1, is_row ? dim : 0, wide, &picked[i * wide]);
      by[i] = is_row;
    }
    sum_rows(picked.data(), full, by.data(), wide, middle.data());
    for (float &x : middle) x /= count;
    float longest = -1.0f;
    int64_t place = 0;
    for (int64_t i = 0; i < count; i++) {
      float *row = &picked[i * wide];
      add(row, middle.data(), -1.0f, wide);
      if (const float square = product(row, row, wide); square > longest) longest = square, place = i;
    }
    copy(along.data(), &picked[place * wide], wide);
    turn();
    for (int i = 0; i < p.power; i++) {
      products_with(picked.data(), full, turned.data(), wide, by.data());
      sum_rows(picked.data(), full, by.data(), wide, along.data());
      turn();
      const float square = product(along.data(), turned.data(), wide), least = std::numeric_limits<float>::min();
      const float length = std::max(least, std::sqrt(std::max(0.0f, square)));
      for (float &x : turned) x /= length;
    }
    const int64_t left = std::min(divide_up(span, step) / 2, count);
    for (int i = 0; i < p.refine; i++) {
      products_with(picked.data(), full, turned.data(), wide, by.data());
      Smallest smallest(by.data(), count, left);
      for (int64_t j = 0; j < full; j++) half[j] = -float(smallest.takes(by[j]));
      sum_rows(picked.data(), full, half.data(), wide, along.data());
      turn();
    }
  }

  // Writes the mean of each part and the covariance within parts, both from every `step`-th row.
  void describe(int64_t set) {
    const int64_t each = size / p.count;
    int64_t all = 0;
    std::fill(square.begin(), square.end(), 0.0f);
    for (int64_t c = 0; c < p.count; c++) {
      const int32_t *members = &order[c * each];
      float *mean = p.mean + (set * p.count + c) * dim;
      chosen.clear();
      for (int64_t i = 0; i < each && members[i] >= 0; i += p.step) chosen.push_back(rows + members[i] * dim);
      add_products(mean, square.data());
      for (int64_t d = 0; d < dim; d++) mean[d] *= p.scale;
      all += chosen.size();
    }
    const float unit = p.scale * p.scale / std::max<int64_t>(1, all);
    float *within = p.within + set * dim * dim;
    for (int64_t d = 0; d < dim; d++)
      for (int64_t e = d; e < dim; e++) within[d * dim + e] = within[e * dim + d] = unit * square[d * wide + e];
  }
};

static void halve(const Halves &p, int threads) {
  const auto split = [](Halver &halver, int64_t set) { halver.split(set); };
  in_parallel(threads, p.heads, [&] { return Halver(p); }, split);
}

// The mean queries of a tile of cohorts, with the cohorts in the lanes.
struct CohortLanes {
  Floats means;
  int count = 0, used = 0;  // the number of cohorts, and of lanes that are computed

  explicit CohortLanes(int dim) : means(dim * TILE) {}
  void read(const float *mean, int64_t cohorts, int64_t tile, int dim) {
    count = std::min<int64_t>(TILE, cohorts - tile * TILE), used = round_up(count, LANES);
    to_lanes(mean + tile * TILE * dim, dim, count, dim, 1.0f, means.data());
  }
};

template <class T>
class Choosing {
 public:
  explicit Choosing(const Best &p)
      : p(p), dim(p.dim), form(dim * dim), lanes(dim * TILE), turned(dim * TILE), cohorts(dim),
        copy(CHUNK * round_up(dim)), score(round_up(std::min(p.keys, SOME_KEYS), CHUNK) * TILE),
        room(round_up(2 * p.count)), lacking(TILE * room), place(TILE * room) {}

  // offset <- the score of each key in a tile without its product with a cohort's mean query. `far`: the largest
  // distance of the head.
  void weigh(int64_t head, int64_t tile, float far, float *offset) {
    const int64_t first = tile * TILE, at = head * p.keys + first;
    const uint8_t *real = real_keys(p.real, p.key, head, p.keys);
    const int count = std::min<int64_t>(TILE, p.keys - first);
    float distance[TILE], variance[TILE], sum[TILE];
    if (p.within) vary(head, first, count);
    std::copy_n(p.half_variance + at, count, variance);
    std::fill(std::copy_n(p.distance + at, count, distance), distance + TILE, 1.0f);
    const vec least = broadcast(std::max(p.near * far, std::numeric_limits<float>::min()));
    count_multiply_adds(TILE);
    for (int v = 0; v < TILE; v += LANES)
      store(sum + v, load(variance + v) + p.power * logarithm(max(load(distance + v), least)));
    std::copy_n(sum, count, offset + at);
    for (int i = 0; real && i < count; i++)
      if (!real[first + i]) offset[at + i] = -INFINITY;
  }

  void choose(int64_t head, int64_t tile, const float *offset) {
    cohorts.read(p.mean + head * p.cohorts * dim, p.cohorts, tile, dim);
    std::fill_n(least, TILE, -INFINITY), std::fill_n(many, TILE, 0);
    const int64_t early = std::min(p.keys, SOME_KEYS);
    for (int64_t first = 0; first < early; first += CHUNK) look(head, first, offset, &score[first * TILE]);
    raise(early);
    std::fill(least + cohorts.count, least + TILE, INFINITY);
    for (int64_t first = 0; first < early; first += CHUNK) take(&score[first * TILE], first);
    for (int64_t first = early; first < p.keys; first += CHUNK) {
      look(head, first, offset, score.data());
      take(score.data(), first);
    }
    for (int i = 0; i < cohorts.count; i++) {
      shrink(i);
      const int64_t to = ((head * p.cohorts) + tile * TILE + i) * p.count;
      for (int64_t s = 0; s < p.count; s++) {
        p.used[to + s] = s < many[i];
        p.index[to + s] = s < many[i] ? place[i * room + s] : 0;
      }
    }
  }

 private:
  const Best &p;
  const int dim;
  Floats form, lanes, turned;  // x^T form x = x^T W x / 2, upper triangular
  int64_t form_head = -1;      // the head that `form` belongs to
  CohortLanes cohorts;
  Floats copy, score;
  static constexpr int64_t SOME_KEYS = 2048;  // the first keys, which give a bound for all others
  static constexpr int HALVINGS = 10;
  // Candidates of every cohort in the order of the keys, fewer than `room`: negated scores and positions.
  const int64_t room;
  Floats lacking;
  aligned_vector<int32_t> place;
  int64_t many[TILE];  // the number of candidates
  float least[TILE];   // a candidate's score must exceed it; infinity in lanes without a cohort

  // Computes k^T W k / 2 of a tile of keys.
  void vary(int64_t head, int64_t first, int count) {
    float half[TILE];
    if (form_head != head) read_form(head);
    to_lanes(p.key.at<T>(head, first), p.key.row, count, dim, 1.0f, lanes.data());
    for (int d = 0; d < dim; d++)
      for (int v = 0; v < TILE; v += LANES) {
        float *x = &lanes[d * TILE + v];
        store(x, load(x) - p.middle[head * dim + d]);
      }
    triangular(form.data(), dim, lanes.data(), turned.data());
    count_multiply_adds(dim * TILE);
    for (int v = 0; v < TILE; v += LANES) {
      vec sum = {};
      for (int d = 0; d < dim; d++) sum += load(&lanes[d * TILE + v]) * load(&turned[d * TILE + v]);
      store(half + v, sum);
    }
    std::copy_n(half, count, p.half_variance + head * p.keys + first);
  }

  void read_form(int64_t head) {
    form_head = head;
    const float *within = p.within + head * dim * dim;
    for (int d = 0; d < dim; d++)
      for (int e = 0; e < dim; e++)
        form[d * dim + e] = e < d ? 0.0f : within[d * dim + e] * (e == d ? 0.5f : 1.0f);
  }

  // Scores the keys first .. first + CHUNK - 1 for all cohorts of the tile.
  void look(int64_t head, int64_t first, const float *offset, float *to) {
    const int64_t rows = std::min<int64_t>(CHUNK, p.keys - first);
    int64_t stride = p.key.row;
    const float *key = as_floats(p.key.at<T>(head, first), stride, rows, dim, round_up(dim), copy.data());
    dots(key, stride, rows, dim, cohorts.means.data(), to, cohorts.used);
    count_multiply_adds(rows * cohorts.used);
    for (int v = 0; v < cohorts.used; v += LANES)
      for (int j = 0; j < rows; j++)
        store(to + j * TILE + v, load(to + j * TILE + v) + offset[head * p.keys + first + j]);
  }

  // least <- a bound that at least `count` of the first keys exceed, by bisection, so that few later keys do.
  void raise(int64_t rows) {
    if (rows <= p.count) return;
    for (int v = 0; v < cohorts.used; v += LANES) {
      vec low = broadcast(INFINITY), high = broadcast(-INFINITY), passed = broadcast(-INFINITY);
      for (int64_t j = 0; j < rows; j++) {
        const vec x = load(&score[j * TILE + v]);
        high = max(high, x), low = -max(-low, x > broadcast(-INFINITY) ? -x : broadcast(-INFINITY));
      }
      count_multiply_adds(HALVINGS * rows * LANES);
      for (int step = 0; step < HALVINGS; step++) {
        const vec middle = low * 0.5f + high * 0.5f;
        ivec above = {};
        for (int64_t j = 0; j < rows; j++) above -= load(&score[j * TILE + v]) > middle;
        const ivec enough = above >= int32_t(p.count);
        passed = enough ? middle : passed, low = enough ? middle : low, high = enough ? high : middle;
      }
      store(least + v, passed);
    }
  }

  // Adds the keys whose scores exceed `least` to the candidates.
  void take(const float *scores, int64_t first) {
    for (int64_t j = first; j < std::min(p.keys, first + CHUNK); j++, scores += TILE)
      for (int v = 0; v < cohorts.used; v += LANES)
        for (uint32_t bits = bits_of(load(scores + v) > load(least + v)); bits; bits &= bits - 1) {
          const int i = v + __builtin_ctz(bits);
          lacking[i * room + many[i]] = -scores[i], place[i * room + many[i]] = j;
          if (++many[i] == room) shrink(i);
        }
  }

  // Drops all candidates of cohort i but the best `count`.
  void shrink(int i) {
    if (many[i] <= p.count) return;
    float *lacks = &lacking[i * room];
    int32_t *its = &place[i * room];
    Smallest best(lacks, many[i], p.count);
    least[i] = -best.end;
    int64_t kept = 0;
    for (int64_t j = 0; j < many[i]; j++) {
      lacks[kept] = lacks[j], its[kept] = its[j];
      kept += best.takes(lacks[j]);
    }
    many[i] = kept;
  }
};

template <class T>
static void best(const Best &p, int threads) {
  Floats offset(p.heads * p.keys), far(p.heads);
  const auto measure = [&](Choosing<T> &, int64_t head, int64_t) {
    const uint8_t *real = real_keys(p.real, p.key, head, p.keys);
    far[head] = 0.0f;
    for (int64_t j = 0; j < p.keys; j++)
      if (!real || real[j]) far[head] = std::max(far[head], p.distance[head * p.keys + j]);
  };
  const auto weigh = [&](Choosing<T> &choosing, int64_t head, int64_t tile) {
    choosing.weigh(head, tile, far[head], offset.data());
  };
  const auto choose = [&](Choosing<T> &choosing, int64_t head, int64_t tile) {
    choosing.choose(head, tile, offset.data());
  };
  in_phases(threads, p.heads, p.keys <= PIECE, [&] { return Choosing<T>(p); }, Phase{1, measure},
            Phase{divide_up(p.keys, TILE), weigh}, Phase{divide_up(p.cohorts, TILE), choose});
}

}  // namespace fewkeys
